"""MAGIC scores of bergson for a small language model of random tokens."""

import tempfile

import torch
import torchopt
from bergson.distributed import grad_tree
from bergson.magic import BackwardState, DataStream, Trainer
from bergson.utils.math import weighted_causal_lm_ce
from datasets import Dataset
from torchopt.pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

DOCUMENTS, BATCH = 8, 4


def draw(length, attention, *, dtype=torch.float32, width=64, vocabulary=256):
    """Return a model of two layers, and documents of random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )
    model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    model.loss_function = weighted_causal_lm_ce
    return model, torch.randint(vocabulary, (DOCUMENTS, length))


def scores(model, tokens, optimizer=None):
    """Return the held-out loss, and its derivatives by the weights of the documents, through all steps."""
    rows = tokens.tolist()
    data = Dataset.from_dict({
        "input_ids": rows,
        "labels": rows,
        "attention_mask": torch.ones_like(tokens).tolist(),
        "doc_ids": [[i] * len(row) for i, row in enumerate(rows)],
    })
    # bergson leaves the parameters of the model empty.
    trainer, state = Trainer.initialize(model, optimizer or torchopt.adamw(1e-3, betas=(0.95, 0.975), eps_root=1e-2))
    stream = DataStream(data, batch_size=BATCH, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        state = trainer.train(state, stream, inplace=True, save_dir=folder)
        with state.activate(model) as params:
            batch = stream[0]
            del batch["example_weight"]
            loss = model(**batch).loss
            gradients = {name: g.detach().clone() for name, g in grad_tree(loss, params).items()}
        zeros = [
            torch.zeros_like(each)
            for each in tree_iter(state.opt_state)
            if isinstance(each, torch.Tensor) and each.is_floating_point()
        ]
        stream.requires_grad = True
        backward = BackwardState(gradients, zeros, torch.zeros_like(stream.weights))
        backward = trainer.backward(folder, stream, backward, state, inplace=True, cleanup=True)
    return loss.detach(), backward.weight_grads.detach()
