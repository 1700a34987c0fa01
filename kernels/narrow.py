"""CPU kernels for batches of narrow matrices, for which torch's kernels run far below the machine's speed.

A Hessian's directions go through a network together, so `X @ V` with one `X` and many `V` reaches the batched matrix
product as an expanded operand, and a softmax over ten classes is differentiated for hundreds of directions at once.
All were measured (AMD EPYC with AVX-512, MKL, two threads, float32): the batched product runs at 20 to 30
GFLOP/s when its results have fewer than 16 columns and at 170 from 16 on, the same numbers as one large product at
about 115; a plain product of 32,768 x 32 with 32 x 10 takes as long as its transpose and the copy back into order, and
three times as long as by oneDNN; the softmax derivatives take six times as long over 10 classes as the same formula in
four elementwise operations, and less from 16 on. If the directions are unit vectors, the first product only picks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.kernels.unit_directions import UnitRows, picked_columns
from hodiff.torch_internals.interception import EagerDispatchMode, run_operator
from hodiff.torch_internals.operators import has_onednn_products, log_softmax_gradient, onednn_product, softmax_gradient

aten = torch.ops.aten

# Below this many columns (classes) the vectorised kernels of MKL and torch fall back to slow paths.
NARROW = 16
# Below this many columns, a plain product is the fastest again.
LEAST = 4

_EXACT = (torch.float32, torch.float64)


def batched_product(a: Tensor, b: Tensor, units: UnitRows | None = None) -> Tensor:
    """Compute `torch.bmm(a, b)`, (k, m, p) and (k, p, n), as one product if `a` is shared and `b` is narrow."""
    # `a` is shared if it is expanded, with stride 0 along the batch. The product is then in column-major order, so that
    # later sums over few classes run along the many samples. Views of `units` only pick columns of `a`.
    batch, inner, columns = b.shape
    if not (batch > 1 and a.stride(0) == 0 and a.device.type == "cpu"):
        return aten.bmm.default(a, b)
    places = units.places(b) if units is not None else None
    if places is not None:
        return picked_columns(a[0], *places, columns, samples_inside=columns < NARROW)
    if columns >= NARROW:
        return aten.bmm.default(a, b)
    rows = b.transpose(1, 2).reshape(batch * columns, inner)
    return (rows @ a[0].t()).view(batch, columns, a.shape[1]).transpose(1, 2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b`, (m, p) and (p, n), contiguous; by oneDNN or transposed if `b` is narrow and `a` is long."""
    suits = LEAST <= b.shape[1] < NARROW <= a.shape[0] // NARROW and a.device.type == "cpu" and a.dtype in _EXACT
    if not suits:
        return aten.mm.default(a, b)
    if a.dtype is torch.float32 and a.shape[1] and has_onednn_products():  # oneDNN rejects empty sums
        return onednn_product(a, b)
    return aten.mm.default(b.t(), a.t()).t().contiguous()


def log_softmax_derivative(cotangent: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Compute `cotangent - exp(output) * sum(cotangent)`, the pullback of `output = log_softmax(x, dim)`."""
    if not _narrow_classes(cotangent, output, dim, dtype):
        return log_softmax_gradient(cotangent, output, dim, dtype)
    return cotangent - _unexpanded(output).exp() * cotangent.sum(dim, keepdim=True)


def softmax_derivative(cotangent: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Compute `output * (cotangent - sum(output * cotangent))`, the pullback of `output = softmax(x, dim)`."""
    if not _narrow_classes(cotangent, output, dim, dtype):
        return softmax_gradient(cotangent, output, dim, dtype)
    weighted = output * cotangent
    return weighted - output * weighted.sum(dim, keepdim=True)


def _narrow_classes(cotangent: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> bool:
    # Torch's kernel accumulates half precision in float32, so use it there.
    exact = cotangent.dtype == output.dtype == dtype and dtype in _EXACT
    return exact and cotangent.device.type == "cpu" and cotangent.dim() > 1 and cotangent.shape[dim] < NARROW


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return one copy of a tensor that repeats along the first dimension."""
    return tensor[:1] if tensor.stride(0) == 0 and tensor.shape[0] > 1 else tensor


KERNELS: dict[Any, Callable[..., Tensor]] = {
    aten.bmm.default: batched_product,
    aten.mm.default: product,
    log_softmax_gradient: log_softmax_derivative,
    softmax_gradient: softmax_derivative,
}


class NarrowKernels(EagerDispatchMode):
    """Runs this file's kernels instead of torch's while active, below autograd and `torch.func`."""

    def __init__(self, units: UnitRows | None = None):
        super().__init__()
        of_units = {aten.bmm.default: partial(KERNELS[aten.bmm.default], units=units)}
        self._kernels = KERNELS if units is None else KERNELS | of_units

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run this file's kernel for an operator, or torch's if there is none."""
        own = self._kernels.get(func)
        return run_operator(func, args, kwargs) if own is None else own(*args, **(kwargs or {}))
