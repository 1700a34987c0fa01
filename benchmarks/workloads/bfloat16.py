"""Digits of gradients and products of a small GPT in bfloat16, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import hodiff
from benchmarks.report import table
from benchmarks.sharded_ranks import CONTEXT, VOCABULARY, model_of

Tree = dict[str, Tensor]
STEPS = tuple(10.0**-i for i in range(1, 6))
TEXT = f"""\
Relative errors of gradients and Hessian-vector products of a GPT with 2 blocks of width 32 on 4 x {CONTEXT} tokens,
against float64. Parameters and vector are numbers of bfloat16, so that their own rounding does not count. The loss is
in float32. "Mixed" has parameters in float32, which the model converts to bfloat16 as the mixed precision policy of
`fully_shard` does. "Differences" are the best of central differences of the gradient in the same precision, with steps
of {STEPS[0]:g} to {STEPS[-1]:g} times the length of the parameters."""


def digits() -> dict[str, dict[str, float]]:
    """Measure the relative errors, by precision."""
    model = model_of(2, 32)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, CONTEXT), generator=generator)
    following = tokens.roll(-1, 1).flatten()
    whole = {name: each.detach().bfloat16().double() for name, each in model.named_parameters()}
    v = {name: torch.randn(each.shape, generator=generator).bfloat16().double() for name, each in whole.items()}

    def loss(p: Tree) -> Tensor:
        scores = functional_call(model, p, (tokens,))
        return F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), following)

    def autocast(p: Tree) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = functional_call(model, p, (tokens,))
        return F.cross_entropy(scores.float(), following)

    ways: dict[str, tuple[Callable[[Tree], Tensor], torch.dtype]] = {
        "float32": (loss, torch.float32),
        "bfloat16": (loss, torch.bfloat16),
        "mixed": (lambda p: loss(_cast(p, torch.bfloat16)), torch.float32),
        "autocast": (autocast, torch.float32),
    }
    truth, slope = _flat(hodiff.hvp(loss, whole, v)), _flat(torch.func.grad(loss)(whole))
    unit = (_flat(whole).norm() / _flat(v).norm()).item()
    found = {}
    for name, (f, dtype) in ways.items():
        x, w = _cast(whole, dtype), _cast(v, dtype)
        A = hodiff.HessianOperator(f, x)

        def differences(step: float, f: Any = f, dtype: torch.dtype = dtype) -> Tensor:
            ends = [_cast({key: whole[key] + side * step * v[key] for key in v}, dtype) for side in (1, -1)]
            high, low = (_flat(torch.func.grad(f)(each)) for each in ends)
            return (high - low) / (2 * step)

        found[name] = {
            "gradient": _error(_flat(torch.func.grad(f)(x)), slope),
            "`hvp`": _error(_flat(hodiff.hvp(f, x, w)), truth),
            '`hvp`, `"forward-over-reverse"`': _error(_flat(hodiff.hvp(f, x, w, route="forward-over-reverse")), truth),
            "`HessianOperator`": _error(A @ _flat(v).float(), truth),
            "differences": min(_error(differences(each * unit), truth) for each in STEPS),
        }
    return found


def _cast(tree: Tree, dtype: torch.dtype) -> Tree:
    return {name: each.to(dtype) for name, each in tree.items()}


def _flat(tree: Any) -> Tensor:
    return torch.cat([each.detach().double().flatten() for each in tree.values()])


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield the heading, text and data of the page."""
    found = digits()
    header = ["", *next(iter(found.values()))]
    rows = [[name, *(f"{each:.1e}" for each in errors.values())] for name, errors in found.items()]
    yield "Relative errors", f"{TEXT}\n\n{table(header, rows)}", found
