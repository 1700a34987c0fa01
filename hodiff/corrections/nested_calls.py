"""torch's own Python functions, run so that corrections reach the calls inside them.

A function of torch written in Python offers itself to the mode first, and then runs with the mode set aside. Its twin,
the same code without that offer, runs in the mode again.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mode import Corrections
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.operators import in_projections

# Each calls functions that have a rule, and makes none of its own mistakes.
COMPOSITES: dict[Callable[..., Any], str] = {
    F.multi_head_attention_forward: "it calls scaled_dot_product_attention, whose fused kernels have no second one",
    torch.pca_lowrank: "of a sparse matrix, it makes another of means, whose gradient is a constant",
    F.triplet_margin_with_distance_loss: "it calls a distance, as a default torch's own",
    F.multilabel_soft_margin_loss: "it calls logsigmoid, which loses its digits in the tails",
}

# How a function of torch asks whether a mode is active.
_OFFERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _twin(function: Any) -> Callable[..., Any]:
    """The same code, which offers itself to no mode."""
    replaced = {**dict.fromkeys(_OFFERS, _no_offer), in_projections.__name__: _projections}
    surroundings = {**function.__globals__, **replaced}
    # Without a name, dynamo does not look the globals up in the module that they come from.
    del surroundings["__name__"]
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    twin = types.FunctionType(code, surroundings, function.__name__, defaults, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no_offer(*_: Any) -> bool:
    return False


def _projections(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
    """As torch has it, without the method `unflatten`, which dynamo cannot trace where a mode is active."""
    if not torch.compiler.is_compiling():
        return in_projections(q, k, v, w, b)
    biases = (None,) * 3 if b is None else b.chunk(3)
    return tuple(F.linear(*each) for each in zip((q, k, v), w.chunk(3), biases, strict=True))


def _run_in_the_mode(twin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Corrections():
        return twin(*args, **kwargs)


for _function, _reason in COMPOSITES.items():
    register(
        _function,
        kind="missing",
        routes=ROUTES,
        reason=_reason,
        reference="the same code, with the rules of what it calls",
    )(partial(_run_in_the_mode, _twin(_function)))
