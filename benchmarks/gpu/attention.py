"""Attention: value, gradient, tangent and Hessian product, beside torch's kernels and jvp_flash_attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.measure import compare, drawn, skipped
from hodiff.functions import attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BF16, FP32 = torch.bfloat16, torch.float32
# Dtype, batch, heads, length, size of heads, causal. Formulas with all weights are measured up to 8,192 positions.
PROBLEMS = (
    (BF16, 2, 12, 2048, 64, False),
    (BF16, 2, 12, 2048, 64, True),
    (FP32, 2, 12, 2048, 64, False),
    (BF16, 1, 8, 8192, 64, True),
    (BF16, 1, 8, 8192, 128, True),
    (BF16, 1, 8, 16384, 64, True),
)
SMALL = ((BF16, 1, 2, 48, 64, True), (FP32, 1, 2, 48, 64, False))
# The exact answer needs some float64 tensors of length x length.
LONGEST_EXACT = 2048


def measure(small: bool) -> None:
    """Measure all problems."""
    if find_spec("jvp_flash_attention") is None:
        skipped("jvp_flash_attention", "not installed")
    for dtype, batch, heads, length, size, causal in SMALL if small else PROBLEMS:
        shape = batch, heads, length, size
        title = f"{str(dtype).removeprefix('torch.')} {' x '.join(map(str, shape))}{' causal' if causal else ''}"
        x = tuple(drawn(*shape, dtype=dtype, seed=seed) for seed in range(3))
        directions = tuple(drawn(*shape, dtype=dtype, seed=3 + seed) for seed in range(3))
        _one(title, x, directions, causal, length <= LONGEST_EXACT)


def _one(title: str, x: tuple[Tensor, ...], directions: tuple[Tensor, ...], causal: bool, exact: bool) -> None:
    ours: Attention = partial(attention, is_causal=causal)
    fused: Attention = partial(scaled_dot_product_attention, is_causal=causal)
    by_formula: Attention = partial(math, is_causal=causal)
    wide = tuple(each.double() for each in x), tuple(each.double() for each in directions)
    every = {"torch": fused, "hodiff": ours} | ({"torch, math": by_formula} if x[0].shape[-2] <= 8192 else {})
    compare(
        f"value, {title}",
        {name: partial(value, f, x) for name, f in every.items()},
        partial(value, by_formula, wide[0]) if exact else None,
        list(every),
    )
    compare(
        f"gradient, {title}",
        {name: partial(gradient, f, x) for name, f in every.items()},
        partial(gradient, by_formula, wide[0]) if exact else None,
        list(every),
    )
    tangents: dict[str, Any] = {"hodiff": partial(tangent, ours, x, directions)}
    if find_spec("jvp_flash_attention") is not None:
        from jvp_flash_attention.jvp_attention import JVPAttn

        tangents["jvp_flash_attention"] = partial(tangent, partial(JVPAttn.fwd_dual, causal=causal), x, directions)
    products: dict[str, Any] = {"hodiff": partial(product, ours, x, directions)}
    if "torch, math" in every:
        tangents["torch, math"] = partial(tangent, by_formula, x, directions)
        products["torch, math"] = partial(product, by_formula, x, directions)
    compare(f"tangent, {title}", tangents, partial(tangent, by_formula, *wide) if exact else None, list(tangents))
    compare(f"product, {title}", products, partial(product, by_formula, *wide) if exact else None, list(products))


def math(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Compute attention by torch's formula, which has second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def value(f: Attention, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute the value, as a tuple like the other results."""
    return (f(*x),)


def gradient(f: Attention, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute the gradient of the sum of squares."""
    leaves = tuple(each.detach().requires_grad_() for each in x)
    return torch.autograd.grad(f(*leaves).square().sum(), leaves)


def tangent(f: Attention, x: tuple[Tensor, ...], directions: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute the value and its tangent."""
    return tuple(torch.func.jvp(f, x, directions))


def product(f: Attention, x: tuple[Tensor, ...], directions: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute a product with the Hessian of the sum of squares, by backward of backward."""
    leaves = tuple(each.detach().requires_grad_() for each in x)
    first = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(first, leaves, directions)
