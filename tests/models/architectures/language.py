"""Hugging Face language models."""

from models.specimen import Architecture, Built, tokens

ROWS, WORDS = 2, 6
MENDED = ("HD410",)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return Built(BertForSequenceClassification(config), (tokens(40, ROWS, WORDS),))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    return Built(GPT2LMHeadModel(config), (tokens(40, ROWS, WORDS),))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return Built(LlamaForCausalLM(config), (tokens(40, ROWS, WORDS),))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return Built(T5ForConditionalGeneration(config), (tokens(40, ROWS, WORDS), None, tokens(40, ROWS, 4)))


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=40, hidden_size=8, state_size=4, num_hidden_layers=2)
    return Built(MambaForCausalLM(config), (tokens(40, ROWS, 5),))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=16,
    )
    return Built(MixtralForCausalLM(config), (tokens(40, ROWS, WORDS),))


ARCHITECTURES = [
    Architecture("BERT", bert, "transformers", warnings=MENDED, quick=True),
    Architecture("GPT-2", gpt2, "transformers", warnings=MENDED),
    Architecture("Llama", llama, "transformers", warnings=MENDED, coarse=True),
    Architecture("T5", t5, "transformers", warnings=MENDED, coarse=True),
    Architecture("Mamba", mamba, "transformers", coarse=True),
    Architecture("Mixtral", mixtral, "transformers", warnings=MENDED, coarse=True),
]
