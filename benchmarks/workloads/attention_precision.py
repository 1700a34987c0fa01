"""Errors of attention in 16 and 32 bits: values, gradients and products with the Hessian of long sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.reference import relative_error
from benchmarks.report import number, table
from benchmarks.workloads.attention import Step, Way, math
from benchmarks.workloads.functions import gradient, product
from hodiff.functions import attention

LENGTHS, SIZE = (512, 2048, 8192), 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The float64 reference processes this many rows at a time, so that it fits into memory.
ROWS = 512
TEXT = """\
One head of {size}, standard normal numbers that are rounded to the dtype first. Errors are norms of the difference from
float64 over the norm of that, the largest of those by q, k and v; the loss is the sum of squares, and the product is
along the inputs. Nothing stands where torch has no such derivative."""


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by torch's flash kernel, which can be differentiated once."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def value(way: Way, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute the value, with the signature of `gradient` and `product`."""
    return (way(*x).detach(),)


STEPS: dict[str, Step] = {"value": value, "gradients": gradient, "Hessian product": product}
# Whether a way has a second derivative.
WAYS: dict[str, tuple[Way, bool]] = {
    "hodiff": (attention, True),
    "torch, math": (math, True),
    "torch, flash": (flash, False),
}


def inputs(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, keys and values that require gradients."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, 1, length, SIZE, generator=generator) for _ in range(3))
    return tuple(each.to(dtype).requires_grad_() for each in drawn)


def exact(step: Step, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute a step by primitives in float64; query rows are independent, so gradients in k and v are sums."""
    q, k, v = (each.detach().double() for each in x)
    parts = [
        step(_primitives, (rows.clone().requires_grad_(), k.requires_grad_(), v.requires_grad_()))
        for rows in q.split(ROWS, -2)
    ]
    by_rows, *sums = zip(*parts, strict=True)
    return (torch.cat(by_rows, -2), *(torch.stack(each).sum(0) for each in sums))


def _primitives(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / SIZE**0.5, -1) @ v


def errors(length: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Return relative errors by way and step."""
    x = inputs(length, dtype)
    truth = {name: exact(step, x) for name, step in STEPS.items()}
    return {
        way: {
            name: max(relative_error(a, b) for a, b in zip(step(function, x), truth[name], strict=True))
            for name, step in STEPS.items()
            if step is not product or twice
        }
        for way, (function, twice) in WAYS.items()
    }


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield a table for every length."""
    for length in (128,) if quick else LENGTHS:
        found = {str(dtype).removeprefix("torch."): errors(length, dtype) for dtype in DTYPES}
        rows = [
            [f"{dtype}, {way}", *(number(steps.get(name), ".1e") for name in STEPS)]
            for dtype, ways in found.items()
            for way, steps in ways.items()
        ]
        text = f"{TEXT.format(size=SIZE)}\n\n" if length == LENGTHS[0] or quick else ""
        yield f"{length:,} queries and keys", text + table(["", *STEPS], rows), found
