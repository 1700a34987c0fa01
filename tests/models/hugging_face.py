"""Write the table of Hugging Face architectures into the documentation: products by hodiff and by torch.

python tests/models/hugging_face.py [model types ...]

Every model has its default configuration with sizes that take seconds, and random weights. With model types as
arguments, the script prints only their rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.measures import Case
    from models.specimen import Built

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "hugging_face.md"
# Finished rows, one per line, from which an interrupted run continues; delete the file to measure again.
FINISHED = ROOT / "build" / "hugging_face.jsonl"
ATTENTIONS = ("eager", "sdpa")
OUTCOMES = ("right", "wrong", "raises")
# In these differences, derivatives of a function's gradient are symmetric to 5e-11, and other fields to 1e-7 at best.
SYMMETRIC = 1e-9
WORDS, IMAGE, BANDS, SAMPLES = 40, 32, 8, 800

# Configuration fields, by their reduced value.
SIZES = {
    name: size
    for size, names in {
        1: "num_key_value_heads",
        2: """num_frames num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
            num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads
            decoder_attention_heads num_experts_per_tok type_vocab_size""",
        3: "num_local_experts num_experts",
        4: """n_routed_experts qk_rope_head_dim qk_nope_head_dim rotary_dim state_size time_step_rank conv_kernel
            window_size""",
        BANDS: """head_dim d_kv d_head kv_lora_rank q_lora_rank v_head_dim qk_head_dim patch_size num_mel_bins""",
        16: """hidden_size d_model n_embd dim emb_dim embed_dim embedding_size n_embed moe_intermediate_size
            shared_expert_intermediate_size pooler_hidden_size projection_dim""",
        IMAGE: "image_size",
        WORDS: "vocab_size entity_vocab_size",
    }.items()
    for name in names.split()
}
SPECIAL_WORDS = ("pad", "bos", "eos", "sep", "cls", "mask", "decoder_start")
# Fields that are inconsistent with the sizes above.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4},
    "dac": {"encoder_hidden_size": 4, "hidden_size": 64, "decoder_hidden_size": 64, "n_codebooks": 2},
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 2},
    "diffllama": {"num_key_value_heads": 2},
    "esm": {"vocab_size": WORDS, "pad_token_id": 1, "mask_token_id": 2},
    "informer": {"prediction_length": 4, "context_length": 8, "num_time_features": 1, "feature_size": 10},
    "layoutlmv3": {"coordinate_size": 2, "shape_size": 4},
    "lilt": {"hidden_size": 24},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "sam_prompt_encoder": {"image_embedding_size": 4, "image_size": IMAGE},
    "sam_vision_model": {"output_channels": 16, "global_attn_indexes": [], "num_pos_feats": 8},
    "siglip_text_model": {"projection_size": 16},
    "swin": {"depths": [1, 1], "num_heads": [1, 2], "num_layers": 2},
    "whisper": {"max_source_positions": 32, "max_target_positions": 32},
}


def _time_series() -> dict[str, Tensor]:
    from models.specimen import noise

    # Eight steps of context, and seven lagged steps.
    past = {"past_values": noise(2, 15), "past_time_features": noise(2, 15, 1), "past_observed_mask": torch.ones(2, 15)}
    return past | {"future_values": noise(2, 4), "future_time_features": noise(2, 4, 1)}


# Inputs of models whose main input does not determine them.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "dac": {"input_values": (2, 1, SAMPLES)},
    "videomae": {"pixel_values": (2, 2, 3, IMAGE, IMAGE)},
    "whisper": {"input_features": (2, BANDS, 64)},
}
NAMES = """
    albert bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert
    codegen cohere convbert ctrl data2vec-text deberta deberta-v2 deepseek_v2 deepseek_v3 diffllama distilbert
    electra ernie esm falcon falcon_mamba flaubert fnet gemma gemma2 gemma3_text git glm glm4 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium ibert jamba jetmoe lilt llama longt5 luke
    mamba mamba2 mbart mistral mixtral mobilebert modernbert mpnet mpt nemotron nystromformer olmo olmo2 olmoe opt
    pegasus phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta roformer rwkv squeezebert stablelm
    starcoder2 t5 xlm-roberta xlnet yoso
    beit clip convnext dac data2vec-vision deit dinov2 dpt focalnet groupvit hiera hubert informer layoutlmv3
    poolformer regnet resnet sam segformer siglip swin videomae vit vit_mae wav2vec2 whisper yolos
"""
ARCHITECTURES = NAMES.split()


def shrunk(config: Any) -> Any:
    """Reduce the sizes of a configuration and its nested configurations."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, SIZES.get(name, value)))
        elif isinstance(value, (list, tuple)) and len(value) > 0:
            setattr(config, name, type(value)(_shrunk_list(name, value)))
    for word in SPECIAL_WORDS:
        token = getattr(config, f"{word}_token_id", None)
        if isinstance(token, list) or (isinstance(token, int) and token >= WORDS):
            setattr(config, f"{word}_token_id", 2)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name, value in EXCEPTIONS.get(config.model_type, {}).items():
        setattr(config, name, value)
    return config


def _shrunk_list(name: str, value: Any) -> Any:
    """Keep one block in each stage, doubling widths, and the first two layers."""
    if name in ("image_size", "patch_size"):
        return [SIZES[name]] * len(value)
    if name == "depths":
        return [1] * len(value)
    if name in ("num_heads", "num_attention_heads"):
        return [2] * len(value) if len(set(value)) == 1 else [2**place for place in range(len(value))]
    if name in ("hidden_sizes", "embed_dims", "embed_dim", "neck_hidden_sizes"):
        return [16] * len(value) if len(set(value)) == 1 else [8 * 2**place for place in range(len(value))]
    return value[:2] if name in ("layer_types", "layers_block_type") else value


def built(kind: str, attention: str) -> Built:
    """Return a model with random weights, and its inputs."""
    from models.specimen import Built, noise, tokens
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[kind]())
    # The grouped product of experts does not support float64.
    config._experts_implementation = "eager"
    model = AutoModel.from_config(config, attn_implementation=attention).eval()
    names = list(inspect.signature(model.forward).parameters)
    given = _inputs(kind, model, config)
    if "pixel_values" in names and hasattr(config, "vision_config"):
        given["pixel_values"] = noise(2, 3, IMAGE, IMAGE)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = tokens(WORDS, 2, 4)
    last = max(names.index(name) for name in given)
    return Built(model, tuple(given.get(name) for name in names[: last + 1]))


def _inputs(kind: str, model: torch.nn.Module, config: Any) -> dict[str, Tensor]:
    """Return two rows of inputs for a model."""
    from models.specimen import noise, tokens

    if kind == "informer":
        return _time_series()
    if kind in SHAPES:
        return {name: noise(*shape) for name, shape in SHAPES[kind].items()}
    if model.main_input_name == "input_ids":
        return {"input_ids": tokens(WORDS, 2, 6)}
    side = getattr(config, "image_size", IMAGE)
    sides = side if isinstance(side, (list, tuple)) else (side, side)
    shapes = {
        "pixel_values": (2, getattr(config, "num_channels", 3), *sides),
        "input_values": (2, SAMPLES),
    }
    return {model.main_input_name: noise(*shapes[model.main_input_name])}


@dataclass(frozen=True)
class Row:
    """Errors of the products of one model.

    Attributes:
        kind: The type, as in `AutoConfig`.
        attention: The implementation of attention.
        coarse: Whether the model computes in float32 inside.
        hodiff: For each product the error relative to the largest element, or the error message.
        torch: The errors of torch's three ways.
        verdict: The verdict of preflight.
        curl: The asymmetry of the derivatives of the gradient. If the model detaches a tensor, its gradient is not the
            gradient of a function, and differences see dependencies that derivatives hold fixed.
    """

    kind: str
    attention: str
    coarse: bool
    hodiff: dict[str, float | str]
    torch: dict[str, float | str]
    verdict: str
    curl: float = 0.0

    @property
    def allowed(self) -> float:
        """Tolerance: half the digits of the dtype in which the model computes."""
        return 1e-3 if self.coarse else 1e-6

    def outcome(self, found: float | str) -> str:
        """Return "right", "wrong" or "raises"."""
        return "raises" if isinstance(found, str) else "right" if found <= self.allowed else "wrong"


def products_by_torch_alone(case: Case) -> dict[str, Callable[[], Any]]:
    """Return the three ways of writing a product with torch alone."""
    from models.measures import flat
    from torch.func import grad, jvp

    def twice() -> Tensor:
        leaves = {name: each.detach().requires_grad_() for name, each in case.parameters.items()}
        first = torch.autograd.grad(case.loss(leaves), list(leaves.values()), create_graph=True, materialize_grads=True)
        slope = flat(list(first)) @ flat(case.direction)
        return flat(list(torch.autograd.grad(slope, list(leaves.values()), materialize_grads=True)))

    tangents = ((case.parameters,), (case.direction,))
    return {
        "`autograd.grad` twice": twice,
        "`jvp` of `grad`": lambda: flat(jvp(grad(case.loss), *tangents)[1]),
        "`grad` of `jvp`": lambda: flat(grad(lambda p: jvp(case.loss, (p,), tangents[1])[1])(case.parameters)),
    }


def measured(kind: str, attention: str) -> Row:
    """Compute all products of a model."""
    from models.measures import Case, error, flat
    from models.specimen import Architecture

    import hodiff
    from hodiff.checks.subjects.double_precision import InDouble

    case = Case(Architecture(kind, lambda: built(kind, attention)))
    rounded = case.gradient(case.parameters)
    case.exact = InDouble()
    with case.exact:
        coarse = error(rounded, case.gradient(case.parameters)) > 1e-12
    expected = case.difference(case.gradient, case.direction)
    other = {name: each.flip(0) for name, each in case.direction.items()}
    crossed = flat(other) @ expected, flat(case.direction) @ case.difference(case.gradient, other)
    curl = float((crossed[0] - crossed[1]).abs() / (flat(other).abs() @ expected.abs()))

    def errors(ways: dict[str, Callable[[], Tensor]]) -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        for name, product in ways.items():
            try:
                found[name] = error(product(), expected)
            except Exception as raised:
                found[name] = f"{type(raised).__name__}: {raised}"
        return found

    def product(**options: str) -> Callable[[], Tensor]:
        return lambda: flat(hodiff.hvp(case.loss, case.parameters, case.direction, **options))

    # Skip forward-over-forward, which takes a pass for each parameter.
    routes = {"`hvp`": product()} | {route: product(route=route) for route in hodiff.ROUTES[:3]}
    routes["`HessianOperator`"] = lambda: flat(hodiff.HessianOperator(case.loss, case.parameters) @ case.direction)
    verdict = hodiff.preflight(case.model, *case.inputs).verdict.removeprefix("verdict: ")
    return Row(kind, attention, coarse, errors(routes), errors(products_by_torch_alone(case)), verdict, curl)


def rows(kinds: list[str]) -> Iterator[Row]:
    """Yield the rows of all models, and read finished rows from the file."""
    from tqdm import tqdm

    from hodiff.checks.torch_warnings import silence_torch_warnings

    FINISHED.parent.mkdir(exist_ok=True)
    lines = FINISHED.read_text(encoding="utf-8").splitlines() if FINISHED.exists() else []
    before = {(row.kind, row.attention): row for row in (Row(**json.loads(each)) for each in lines)}
    for kind in tqdm(kinds, unit=" models"):
        for attention in ATTENTIONS:
            if (kind, attention) not in before:
                try:
                    with silence_torch_warnings():
                        row = measured(kind, attention)
                except Exception as raised:
                    # Many models support only one attention.
                    sys.stderr.write(f"{kind} {attention}: {type(raised).__name__}: {str(raised)[:200]}\n")
                    continue
                with FINISHED.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(vars(row)) + "\n")
                before[kind, attention] = row
            yield before[kind, attention]


INTRODUCTION = """\
# Architectures of Hugging Face

The table compares Hessian-vector products of {architectures} architectures ({models} models, with different attention
implementations) with central differences of gradients, in float64. The Hessians are with respect to the parameters.
Models have their default configuration with smaller sizes and random weights, and run in evaluation mode. The loss is
the mean of sin(y) + y² over all floating-point outputs y.

hodiff computes five products: `hvp`, `hvp` by reverse-over-reverse, forward-over-reverse and reverse-over-forward, and
a product with a `HessianOperator`. A product is right if its error is below 1e-6 relative to the largest element, or
below 1e-3 if the model computes in float32 inside.

Of hodiff's {products} products, {right} are right, {wrong} are wrong, and {raises} raise an error.
`python tests/models/hugging_face.py` writes this page. [models.md](models.md) has more results for thirty models.

"""
ENDING = """
Many models support only one attention implementation. The table omits {detaching}.
They detach tensors, or have Functions with a gradient that is not the derivative, so the Jacobian of their gradient is
not symmetric, and differences also include the dependence that derivatives ignore. `preflight` reports these
models.{missing}

"""


def _torch_version() -> str:
    return f"With torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}.\n"


def page(found: list[Row]) -> str:
    """Format the table and its totals."""
    detaching = sorted({row.kind for row in found if row.curl > SYMMETRIC})
    shown = [row for row in found if row.kind not in detaching]
    ways = list(found[0].torch)
    lines = [
        f"| model | attention | hodiff | error | {' | '.join(ways)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(ways)}",
    ]
    for row in shown:
        outcomes = Counter(row.outcome(each) for each in row.hodiff.values())
        said = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        worst = max((each for each in row.hodiff.values() if not isinstance(each, str)), default=float("nan"))
        by_torch = (row.outcome(row.torch[way]) for way in ways)
        lines.append(f"| {row.kind} | {row.attention} | {said} | {worst:.0e} | {' | '.join(by_torch)} |")
    totals = [Counter(row.outcome(row.torch[way]) for row in shown) for way in ways]
    sums = (" / ".join(str(each[word]) for word in OUTCOMES) for each in totals)
    lines.append(f"| {' / '.join(OUTCOMES)} | | | | {' | '.join(sums)} |")
    products = Counter(row.outcome(each) for row in shown for each in row.hodiff.values())
    missing = ", ".join(sorted(set(ARCHITECTURES) - {row.kind for row in found}))
    ending = ENDING.format(
        detaching=", ".join(detaching) or "none",
        missing=f" Models that could not be built: {missing}." if missing else "",
    )
    introduction = INTRODUCTION.format(
        architectures=len({row.kind for row in shown}),
        models=len(shown),
        products=products.total(),
        **dict.fromkeys(OUTCOMES, 0) | products,
    )
    return introduction + "\n".join([*lines, ""]) + ending + _torch_version()


def main() -> None:
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="model types, as in AutoConfig; without any, all of the table")
    kinds = parser.parse_args().kinds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = list(rows(kinds or ARCHITECTURES))
    if kinds:
        sys.stdout.write("\n".join(map(str, found)) + "\n")
    else:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
