"""Unmodified transformers: products agree with primitives, and no tensor is as large as the attention weights."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from hodiff.rules import blockwise

transformers = pytest.importorskip("transformers")

LENGTH, WIDTH = 48, 16
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = {**SMALL, "vocab_size": 40, "max_position_embeddings": 1024}


def built_model(config):
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    return transformers.AutoModel.from_config(config).double().eval()


MODELS = {
    "BERT": lambda: built_model(transformers.BertConfig(**TEXT)),
    "GPT-2": lambda: built_model(
        transformers.GPT2Config(vocab_size=40, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=1024, use_cache=False)
    ),
    "Llama, shared heads": lambda: built_model(
        transformers.LlamaConfig(**TEXT, num_key_value_heads=2, use_cache=False)
    ),
    "T5": lambda: built_model(
        transformers.T5Config(
            vocab_size=40, d_model=WIDTH, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
        )
    ),
    "ViT": lambda: built_model(transformers.ViTConfig(**SMALL, image_size=28, patch_size=4, num_channels=1)),
}


def loss_of(name, model, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        given = {"pixel_values": torch.randn(2, 1, 28, 28, generator=generator, dtype=torch.float64)}
    else:
        given = {"input_ids": torch.randint(40, (2, length), generator=generator)}
    if name == "T5":
        given["decoder_input_ids"] = torch.randint(40, (2, length // 2), generator=generator)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), given).last_hidden_state.square().mean()

    return loss


def by_primitives(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention by its definition, with whole matrices."""
    assert not dropout_p
    shared = query.shape[-3] // key.shape[-3]
    assert shared == 1 or enable_gqa
    key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores, -1) @ value


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_products_match_primitives(name, monkeypatch):
    """Both sides differ only in the rules of attention."""
    model = MODELS[name]()
    x = {key: each.detach() for key, each in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    v = {key: torch.randn(each.shape, generator=generator, dtype=each.dtype) for key, each in x.items()}
    found = hodiff.value_grad_hvp(loss_of(name, model), x, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", by_primitives)
    expected = hodiff.value_grad_hvp(loss_of(name, model), x, v)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        largest = max(float(each.abs().max()) for each in theirs.values())
        for key in x:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-10 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_attention_uses_the_rule(name, monkeypatch):
    """Self-attention and cross-attention use the rule; T5 adds its learned positions by the mask."""
    taken = []

    def watched(*args, **kwargs):
        taken.append(kwargs.get("attn_mask"))
        return by_primitives(*args, **{key: each for key, each in kwargs.items() if key in WATCHED})

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model = MODELS[name]()
    loss_of(name, model)(dict(model.named_parameters()))
    assert len(taken) == (6 if name == "T5" else 2)
    learned = [mask for mask in taken if mask is not None and mask.requires_grad]
    assert len(learned) == (4 if name == "T5" else 0)


WATCHED = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor made inside."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama, shared heads"])
def test_no_tensor_is_as_large_as_the_attention_weights(name, monkeypatch):
    """Torch's operators run in blocks; the kernels, which are disabled while operators are counted, use less memory."""
    monkeypatch.setattr(blockwise, "BLOCK", 2**14)
    length = 512
    model = MODELS[name]()
    parameters = list(model.parameters())
    loss = loss_of(name, model, length)
    with hodiff.corrected(), Largest() as counted:
        first = torch.autograd.grad(
            loss(dict(model.named_parameters())), parameters, create_graph=True, allow_unused=True
        )
        slope = sum(each.square().sum() for each in first if each is not None)
        torch.autograd.grad(slope, parameters, allow_unused=True)
    assert counted.most < 2 * 4 * length**2 / 4
