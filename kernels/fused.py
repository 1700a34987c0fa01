"""Fused CPU kernels for float32: elementwise functions, rows of softmax and normalization, and masks, each in one pass.

If `takes` is False, callers use their formula of torch operators.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hodiff.kernels.fused_library import available as available
from hodiff.kernels.fused_library import formulas as formulas
from hodiff.kernels.fused_library import pullbacks as pullbacks
from hodiff.kernels.fused_library import run
from hodiff.kernels.fused_library import suit as suit
from hodiff.kernels.fused_library import takes as takes


def elementwise(formula: str, x: Tensor, by: Tensor | None = None) -> Tensor:
    """Compute a function of `formulas()` elementwise, times a tensor of the same shape if given."""
    out = torch.empty_like(x)
    run("hodiff_elementwise", formulas()[formula], x.data_ptr(), _at(by), out.data_ptr(), x.numel())
    return out


def pullback(formula: str, x: Tensor, by: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    r"""Pull a cotangent back through $b f(x)$: $\bar y f(x)$ for b, and $\bar y\, b f'(x)$ for x."""
    by_by, by_x = torch.empty_like(x), torch.empty_like(x)
    pointers = (x.data_ptr(), by.data_ptr(), cotangent.data_ptr(), by_by.data_ptr(), by_x.data_ptr())
    run("hodiff_pullback", pullbacks()[formula], *pointers, x.numel())
    return by_by, by_x


def gate_curvature(u: Tensor, w: Tensor, c: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pull $(u, w)$ back through $(c f(z), c x b(z))$ to c, x and z, with $b = σ'$ and $f = (z σ)'$."""
    by_c, by_x, by_z = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    run("hodiff_gate_curvature", *(each.data_ptr() for each in (u, w, c, x, z, by_c, by_x, by_z)), x.numel())
    return by_c, by_x, by_z


def logsumexp(x: Tensor) -> Tensor:
    r"""Compute $\log \sum e^x$ over the last dimension, (..., columns) to (..., 1)."""
    out = x.new_empty((*x.shape[:-1], 1))
    run("hodiff_logsumexp", x.data_ptr(), out.data_ptr(), *_rows(x))
    return out


def softmax(x: Tensor, scale: Tensor | None, *, bounded: bool) -> Tensor:
    """Softmax over the last dimension times `scale` (..., 1); `bounded` replaces infinities by the largest numbers."""
    out = torch.empty_like(x)
    run("hodiff_softmax", x.data_ptr(), _at(scale), out.data_ptr(), *_rows(x), _bound(bounded))
    return out


def softmax_product(x: Tensor, scale: Tensor | None, v: Tensor, *, bounded: bool) -> tuple[Tensor, Tensor]:
    r"""Compute $s (p \circ v - p \langle p, v \rangle)$ and $\langle p, v \rangle$ for the softmax p of each row."""
    out, mean = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    pointers = (x.data_ptr(), _at(scale), v.data_ptr(), out.data_ptr(), mean.data_ptr())
    run("hodiff_softmax_product", *pointers, *_rows(x), _bound(bounded))
    return out, mean


def weighted(p: Tensor, v: Tensor) -> Tensor:
    r"""Compute $p \circ (v - \langle p, v \rangle)$ along the last dimension."""
    out = torch.empty_like(p)
    run("hodiff_weighted", p.data_ptr(), v.data_ptr(), out.data_ptr(), *_rows(p))
    return out


def weighted_pullback(p: Tensor, v: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """Pull a cotangent back through `weighted`, to p and v."""
    by_p, by_v = torch.empty_like(p), torch.empty_like(p)
    pointers = (p.data_ptr(), v.data_ptr(), cotangent.data_ptr(), by_p.data_ptr(), by_v.data_ptr())
    run("hodiff_weighted_pullback", *pointers, *_rows(p))
    return by_p, by_v


def softmax_curvature(p: Tensor, s: Tensor, c: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""$p \circ s'$, $p \circ c'$ and $p \circ w'$ with $x' = x - \langle p, x \rangle$ and $w = e + s' \circ c'$."""
    # For the tangent s of the scores, the cotangent c of their softmax p and its tangent e, these are the tangent of p,
    # the cotangent of the scores, and its tangent.
    found = torch.empty_like(p), torch.empty_like(p), torch.empty_like(p)
    run("hodiff_softmax_curvature", *(each.data_ptr() for each in (p, s, c, e, *found)), *_rows(p))
    return found


def normalization_curvature(
    x: Tensor, g: Tensor, u: Tensor, w: Tensor, a: Tensor, c: Tensor, *, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Pull cotangents u, a, c of a normalization's gradients of x, w, b back to g, x and w, row by row."""
    # With xh = r (x - m(x)), P t = t - m(t) - xh m(t xh), p = g w and g the cotangent of xh w + b, these are
    # w r P u + a xh + c,  -r² (xh m(u P p) + m(p xh) P u + m(u xh) P p) + r P (g a),  and the sum over rows of g r P u.
    rows, columns = _rows(x)
    by_g, by_x = torch.empty_like(x), torch.empty_like(x)
    by_w = torch.zeros(max(1, min(rows, torch.get_num_threads())), columns, dtype=torch.float64)
    pointers = (each.data_ptr() for each in (x, g, u, w, a, c, by_g, by_x, by_w))
    run("hodiff_normalization_curvature", *pointers, len(by_w), rows, columns, eps, centered)
    return by_g, by_x, by_w.sum(0).to(w.dtype)


def add_relu(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Compute $\max(x + y, 0)$, and a boolean mask of where the sum is positive or NaN."""
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    run("hodiff_add_relu", x.data_ptr(), _at(y), out.data_ptr(), mask.data_ptr(), x.numel())
    return out, mask


def masked(v: Tensor, mask: Tensor) -> Tensor:
    """Return a tensor where a contiguous boolean mask is set, and zero elsewhere."""
    out = torch.empty_like(v)
    run("hodiff_masked", v.data_ptr(), mask.data_ptr(), out.data_ptr(), v.numel())
    return out


def collapsed(a: Tensor, b: Tensor, u: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    r"""$a u_r$ for each direction r, and $a w + b \sum_r u_r^2$: (R, n) to (R, n) and (n,); w may be None for zero."""
    first, last = torch.empty_like(u), torch.empty_like(a)
    pointers = (a.data_ptr(), b.data_ptr(), u.data_ptr(), _at(w), first.data_ptr(), last.data_ptr())
    run(f"hodiff_collapsed_{'float' if a.dtype is torch.float32 else 'double'}", *pointers, len(u), a.numel())
    return first, last


def turned(x: Tensor) -> Tensor:
    """Return the contiguous transpose of a matrix with few columns."""
    out = x.new_empty(x.shape[1], x.shape[0])
    run("hodiff_turn", x.data_ptr(), out.data_ptr(), *x.shape)
    return out


def average_with_transpose(square: Tensor) -> tuple[float, float] | None:
    """Replace a square matrix by the mean of itself and its transpose, in place, if a kernel supports it."""
    # Return the largest difference of the two and the largest magnitude, NaN if not all numbers are finite.
    kernel = {torch.float32: "hodiff_average_float", torch.float64: "hodiff_average_double"}.get(square.dtype)
    if not available() or kernel is None or square.device.type != "cpu" or square.stride(1) != 1:
        return None
    report = square.new_empty(3)
    run(kernel, square.data_ptr(), square.shape[0], square.stride(0), report.data_ptr())
    gap, size, poison = report.tolist()
    return gap + poison, size + poison


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(x: Tensor) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


def _bound(bounded: bool) -> float:
    return torch.finfo(torch.float32).max if bounded else float("inf")
