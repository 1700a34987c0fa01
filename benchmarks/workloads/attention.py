"""Attention against torch's own kernels: time and memory of gradients and of products with the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from benchmarks.memory import Peak, peak_bytes
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error
from benchmarks.targets import Target
from benchmarks.workloads.functions import gradient, product
from hodiff.functions import attention, flex_attention

HEADS, SIZE = 8, 64
SLOPES = 2.0 ** -torch.arange(1.0, HEADS + 1)  # the slopes of ALiBi
LENGTHS = (2048, 4096)
# Shorter sequences: with a bias torch's math path also keeps the bias matrices.
BIASED_LENGTHS = (1024, 2048)
FLASH, OURS, MATH = "torch's flash kernel, one gradient", "hodiff", "torch's math path"
PEAKS = "Peak of a product, MiB: what torch hands out at once beyond the inputs, results included"
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[Way, tuple[Tensor, ...]], tuple[Tensor, ...]]


def inputs(length: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values that require gradients."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, HEADS, length, SIZE, generator=generator).requires_grad_() for _ in range(3))


def problems(quick: bool) -> Iterator[Problem]:
    """Yield problems of gradients, of causal gradients and of products."""
    for length in (256,) if quick else LENGTHS:
        yield _problem(f"gradient-{length}", "Gradient", length, gradient, False, 1.05)
        yield _problem(f"causal-{length}", "Gradient, causal", length, gradient, True, None)
        yield _problem(f"product-{length}", "Product with the Hessian", length, product, False, 3.5)
        yield _causal(length)
    for length in (256,) if quick else BIASED_LENGTHS:
        yield _biased(length)


def _problem(name: str, title: str, length: int, step: Step, is_causal: bool, bound: float | None) -> Problem:
    x = inputs(length)
    flash: Way = partial(F.scaled_dot_product_attention, is_causal=is_causal)
    contestants = [
        Contestant(FLASH, "unit", partial(gradient, flash, x)),
        Contestant(OURS, "hodiff", partial(step, partial(attention, is_causal=is_causal), x)),
    ]
    if step is product:
        contestants.append(Contestant(MATH, "torch", partial(step, math, x)))
    return Problem(
        name=name,
        title=f"{title}: {length:,} queries and keys, {HEADS} heads of {SIZE}",
        contestants=contestants,
        error=partial(_error, _first_head(step, x, is_causal)),
        tolerance=1e-3,
        targets=[] if bound is None or length not in LENGTHS else [Target(OURS, FLASH, bound)],
    )


def _causal(length: int) -> Problem:
    """Compare causal attention with attention to all keys."""
    x = inputs(length)
    whole = "hodiff, all keys"
    return Problem(
        name=f"causal-of-full-{length}",
        title=f"Gradient, causal beside all keys: {length:,} queries and keys, {HEADS} heads of {SIZE}",
        contestants=[
            Contestant(whole, "unit", partial(gradient, attention, x)),
            Contestant(OURS, "hodiff", partial(gradient, partial(attention, is_causal=True), x)),
        ],
        error=partial(_error, _first_head(gradient, x, True)),
        tolerance=1e-3,
        targets=[Target(OURS, whole, 0.6)] if length in LENGTHS else [],
    )


def _biased(length: int) -> Problem:
    """Compare products under ALiBi: a score function in hodiff, and a mask for torch's math path."""
    x = inputs(length)
    return Problem(
        name=f"alibi-product-{length}",
        title=f"Product with the Hessian, ALiBi: {length:,} queries and keys, {HEADS} heads of {SIZE}",
        contestants=[
            Contestant(MATH, "unit", partial(product, _math_alibi, x)),
            Contestant("hodiff, flex_attention", "hodiff", partial(product, _flex_alibi, x)),
        ],
        error=partial(_error, _first_head(product, x, False, SLOPES[0])),
        tolerance=1e-3,
    )


def _flex_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda score, b, h, i, j: score - SLOPES[h] * (i - j).abs())


def _math_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distances = (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])).abs()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, -SLOPES[:, None, None] * distances)


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by torch's math path, which can be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def _first_head(step: Step, x: tuple[Tensor, ...], is_causal: bool, slope: Tensor | None = None) -> tuple[Tensor, ...]:
    """Compute the first head by primitives in float64: heads are independent."""
    seen = torch.ones(x[0].shape[-2], x[1].shape[-2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    distances = (torch.arange(x[0].shape[-2])[:, None] - torch.arange(x[1].shape[-2])).abs()
    bias = 0.0 if slope is None else -slope.double() * distances

    def primitives(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / SIZE**0.5 + bias).masked_fill(~seen, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return step(primitives, tuple(each.detach()[:, 0].double().requires_grad_() for each in x))


def _error(exact: tuple[Tensor, ...], found: Any) -> float:
    return max(relative_error(x[:, 0].flatten(), y.flatten()) for x, y in zip(found, exact, strict=True))


def products(length: int) -> dict[str, Callable[[], Any]]:
    """Return ways to compute a product along the inputs, by name."""
    x = inputs(length)
    v = tuple(each.detach() for each in x)
    return {
        "`hodiff.hvp`": lambda: hodiff.hvp(lambda y: 0.5 * attention(*y).square().sum(), v, v),
        "hodiff, double backward": partial(product, attention, x),
        "math path, double backward": partial(product, math, x),
    }


# The longest sequences of the ways: the math path keeps about eleven weight matrices.
LONGEST = {"`hodiff.hvp`": 16384, "hodiff, double backward": 8192, "math path, double backward": 4096}


def peaks(quick: bool) -> list[Peak]:
    """Measure the peak memory of products, by length."""
    return [
        Peak(f"{length:,} queries and keys", name, peak_bytes(run) / 2**20)
        for length in ((256,) if quick else (1024, 2048, 4096, 8192, 16384))
        for name, run in products(length).items()
        if length <= LONGEST[name]
    ]
