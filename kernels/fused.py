"""Fused CPU kernels for float32: elementwise functions, rows of softmax and masks, each in one pass over memory.

`fused.cpp` is compiled when hodiff is installed, if there is a C++ compiler. Where it is not, or tensors are not plain
float32 on a CPU, `takes` says so, and the caller's formula of torch operators does the work.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

_POINTER, _LONG, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_double
_SIGNATURES = {
    "hodiff_elementwise": (_LONG, _POINTER, _POINTER, _POINTER, _LONG),
    "hodiff_pullback": (_LONG, *(_POINTER,) * 5, _LONG),
    "hodiff_gate_curvature": (*(_POINTER,) * 8, _LONG),
    "hodiff_logsumexp": (_POINTER, _POINTER, _LONG, _LONG),
    "hodiff_softmax": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT),
    "hodiff_softmax_product": (*(_POINTER,) * 5, _LONG, _LONG, _FLOAT),
    "hodiff_weighted": (*(_POINTER,) * 3, _LONG, _LONG),
    "hodiff_weighted_pullback": (*(_POINTER,) * 5, _LONG, _LONG),
    "hodiff_softmax_curvature": (*(_POINTER,) * 7, _LONG, _LONG),
    "hodiff_normalization_curvature": (*(_POINTER,) * 9, _LONG, _LONG, _LONG, _DOUBLE, _LONG),
    "hodiff_add_relu": (*(_POINTER,) * 4, _LONG),
    "hodiff_masked": (*(_POINTER,) * 3, _LONG),
    "hodiff_average_float": (_POINTER, _LONG, _LONG, _POINTER),
    "hodiff_average_double": (_POINTER, _LONG, _LONG, _POINTER),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built or their OpenMP is not the one that torch brought."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"_fused{suffix}"
        if path.exists():
            try:
                found = ctypes.CDLL(str(path))
                for name, arguments in _SIGNATURES.items():
                    getattr(found, name).argtypes, getattr(found, name).restype = arguments, None
            except (OSError, AttributeError):
                return None
            return found
    return None


@cache
def formulas() -> dict[str, int]:
    """The functions that `elementwise` knows, by name."""
    return _names("hodiff_formula", "hodiff_formulas")


@cache
def pullbacks() -> dict[str, int]:
    """The functions that `pullback` knows, by name."""
    return _names("hodiff_pullback_formula", "hodiff_pullbacks")


def _names(name: str, count: str) -> dict[str, int]:
    found = library()
    if found is None:
        return {}
    name_of = getattr(found, name)
    name_of.restype = ctypes.c_char_p
    return {name_of(i).decode(): i for i in range(getattr(found, count)())}


def suit(*tensors: Tensor) -> bool:
    """Whether there are kernels for tensors of such dtypes and devices, which `takes` then may still refuse.

    Args:
        *tensors: What a kernel would read; a batch or a level of differentiation around them does not matter.

    Returns:
        Whether all are float32 on a CPU and of one shape, outside compiled code.
    """
    if torch.compiler.is_compiling() or library() is None:
        return False
    shape = tensors[0].shape
    return all(x.dtype is torch.float32 and x.device.type == "cpu" and x.shape == shape for x in tensors)


def takes(*tensors: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the kernels may read these tensors, which then are plain memory that nothing watches.

    Args:
        *tensors: What a kernel would read.
        mask: A boolean tensor that it would read as well.

    Returns:
        False where a tensor is not contiguous float32 on a CPU, or is differentiated, batched, traced or intercepted by
        a dispatch mode, or where there are no kernels.

    Example:
        >>> takes(torch.ones(2, dtype=torch.float64))
        False
    """
    if torch.compiler.is_compiling() or library() is None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        return False
    return all(map(_is_plain, tensors)) and (mask is None or _is_plain(mask, torch.bool))


def _is_plain(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return (
        x.dtype is dtype
        and x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x) or x._is_zerotensor() or x.is_neg())
        and x.is_contiguous()
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def elementwise(formula: str, x: Tensor, by: Tensor | None = None) -> Tensor:
    """A function of each element, times another tensor if given.

    Args:
        formula: One of `formulas()`.
        x: The argument.
        by: Tensor of the same shape, or None.

    Returns:
        $f(x)$ or $b f(x)$.

    Example:
        >>> x = torch.zeros(2)
        >>> elementwise("sigmoid", x) if takes(x) else torch.sigmoid(x)
        tensor([0.5000, 0.5000])
    """
    out = torch.empty_like(x)
    _run("hodiff_elementwise", formulas()[formula], x.data_ptr(), _at(by), out.data_ptr(), x.numel())
    return out


def pullback(formula: str, x: Tensor, by: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    r"""What pulls back through $b f(x)$: $\bar y f(x)$ to b, and $\bar y\, b f'(x)$ to x.

    Args:
        formula: One of `pullbacks()`.
        x: The argument.
        by: The factor, of the same shape.
        cotangent: That of the product.

    Returns:
        The two cotangents.
    """
    by_by, by_x = torch.empty_like(x), torch.empty_like(x)
    pointers = (x.data_ptr(), by.data_ptr(), cotangent.data_ptr(), by_by.data_ptr(), by_x.data_ptr())
    _run("hodiff_pullback", pullbacks()[formula], *pointers, x.numel())
    return by_by, by_x


def gate_curvature(u: Tensor, w: Tensor, c: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""What pulls $(u, w)$ back through $(c f(z), c x b(z))$, with b the derivative of σ and $f = (z σ)'$.

    Args:
        u: Cotangent of the first.
        w: Cotangent of the second.
        c: Factor of both, like all of the same shape.
        x: Factor of the second.
        z: The argument.

    Returns:
        The cotangents of c, x and z.
    """
    by_c, by_x, by_z = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    _run("hodiff_gate_curvature", *(each.data_ptr() for each in (u, w, c, x, z, by_c, by_x, by_z)), x.numel())
    return by_c, by_x, by_z


def logsumexp(x: Tensor) -> Tensor:
    r"""$\log \sum e^x$ over the last dimension.

    Args:
        x: Tensor (..., columns).

    Returns:
        Tensor (..., 1).
    """
    out = x.new_empty((*x.shape[:-1], 1))
    _run("hodiff_logsumexp", x.data_ptr(), out.data_ptr(), *_rows(x))
    return out


def softmax(x: Tensor, scale: Tensor | None, *, bounded: bool) -> Tensor:
    """Softmax over the last dimension, each row times a factor.

    Args:
        x: Tensor (..., columns).
        scale: Tensor (..., 1), or None for 1.
        bounded: Whether to take infinities for the largest finite numbers.

    Returns:
        Tensor of the shape of `x`.
    """
    out = torch.empty_like(x)
    _run("hodiff_softmax", x.data_ptr(), _at(scale), out.data_ptr(), *_rows(x), _bound(bounded))
    return out


def softmax_product(x: Tensor, scale: Tensor | None, v: Tensor, *, bounded: bool) -> tuple[Tensor, Tensor]:
    r"""$s (p \circ v - p \langle p, v \rangle)$ and $\langle p, v \rangle$ for the softmax p of each row.

    Args:
        x: Tensor (..., columns).
        scale: Tensor (..., 1), or None for 1.
        v: Tensor of the shape of `x`.
        bounded: As in `softmax`.

    Returns:
        Tensors of the shape of `x`, and (..., 1).
    """
    out, mean = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    pointers = (x.data_ptr(), _at(scale), v.data_ptr(), out.data_ptr(), mean.data_ptr())
    _run("hodiff_softmax_product", *pointers, *_rows(x), _bound(bounded))
    return out, mean


def weighted(p: Tensor, v: Tensor) -> Tensor:
    r"""$p \circ (v - \langle p, v \rangle)$ along the last dimension.

    Args:
        p: Probabilities (..., columns).
        v: Tensor of the same shape.

    Returns:
        Tensor of that shape.
    """
    out = torch.empty_like(p)
    _run("hodiff_weighted", p.data_ptr(), v.data_ptr(), out.data_ptr(), *_rows(p))
    return out


def weighted_pullback(p: Tensor, v: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """What pulls a cotangent back through `weighted`.

    Args:
        p: Probabilities (..., columns).
        v: Tensor of the same shape.
        cotangent: That of the result.

    Returns:
        The cotangents of p and v.
    """
    by_p, by_v = torch.empty_like(p), torch.empty_like(p)
    pointers = (p.data_ptr(), v.data_ptr(), cotangent.data_ptr(), by_p.data_ptr(), by_v.data_ptr())
    _run("hodiff_weighted_pullback", *pointers, *_rows(p))
    return by_p, by_v


def softmax_curvature(p: Tensor, s: Tensor, c: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""$p \circ s'$, $p \circ c'$ and $p \circ w'$ with $x' = x - \langle p, x \rangle$ and $w = e + s' \circ c'$.

    With the tangent s of the scores, the cotangent c of their softmax p and its tangent e, these are the tangent of p,
    the cotangent of the scores, and its tangent.

    Args:
        p: Probabilities (..., columns).
        s: Tensor of the same shape.
        c: Tensor of the same shape.
        e: Tensor of the same shape.

    Returns:
        Three tensors of that shape.
    """
    found = torch.empty_like(p), torch.empty_like(p), torch.empty_like(p)
    _run("hodiff_softmax_curvature", *(each.data_ptr() for each in (p, s, c, e, *found)), *_rows(p))
    return found


def normalization_curvature(
    x: Tensor, g: Tensor, u: Tensor, w: Tensor, a: Tensor, c: Tensor, *, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r"""What pulls the cotangents of a normalization's gradients back, where each row has statistics of its own.

    With $\hat x = r (x - m(x))$, $P t = t - m(t) - \hat x\, m(t \hat x)$ and $p = g w$ these are

    $$ w\, r P u + a \hat x + c, \qquad
       -r^2 \left( \hat x\, m(u P p) + m(p \hat x) P u + m(u \hat x) P p \right) + r P (g a), \qquad
       \sum_\text{rows} g\, r P u. $$

    Args:
        x: The input (..., columns).
        g: The cotangent of $\hat x w + b$, of the same shape.
        u: The cotangent of the gradient by x, of the same shape.
        w: The weight (columns,).
        a: The cotangent of the gradient by w (columns,).
        c: The cotangent of the gradient by b (columns,).
        eps: Added to the variance.
        centered: Whether means are subtracted.

    Returns:
        The cotangents of g, x and w.
    """
    rows, columns = _rows(x)
    by_g, by_x = torch.empty_like(x), torch.empty_like(x)
    by_w = torch.zeros(max(1, min(rows, torch.get_num_threads())), columns, dtype=torch.float64)
    pointers = (each.data_ptr() for each in (x, g, u, w, a, c, by_g, by_x, by_w))
    _run("hodiff_normalization_curvature", *pointers, len(by_w), rows, columns, eps, centered)
    return by_g, by_x, by_w.sum(0).to(w.dtype)


def add_relu(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""$\max(x + y, 0)$ and where the sum is positive or NaN.

    Args:
        x: The one tensor.
        y: The other, of the same shape, or None for zero.

    Returns:
        The value and a boolean mask.
    """
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    _run("hodiff_add_relu", x.data_ptr(), _at(y), out.data_ptr(), mask.data_ptr(), x.numel())
    return out, mask


def masked(v: Tensor, mask: Tensor) -> Tensor:
    """A tensor where a mask is set, and zero elsewhere.

    Args:
        v: The tensor.
        mask: Contiguous boolean tensor of the same shape.

    Returns:
        Tensor of that shape.
    """
    out = torch.empty_like(v)
    _run("hodiff_masked", v.data_ptr(), mask.data_ptr(), out.data_ptr(), v.numel())
    return out


def average_with_transpose(square: Tensor) -> tuple[float, float] | None:
    """Replace a square matrix by the mean of itself and its transpose, in place.

    Args:
        square: Matrix (n, n) in row-major order, a part of a larger one or not; float32 or float64.

    Returns:
        The largest difference of the two and the largest magnitude of either, both NaN if not all numbers are finite;
        or None, where no kernel takes the matrix and nothing has happened.

    Example:
        >>> square = torch.tensor([[1.0, 2.0], [4.0, 3.0]], dtype=torch.float64)
        >>> average_with_transpose(square) in ((2.0, 4.0), None)
        True
    """
    kernel = {torch.float32: "hodiff_average_float", torch.float64: "hodiff_average_double"}.get(square.dtype)
    if library() is None or kernel is None or square.device.type != "cpu" or square.stride(1) != 1:
        return None
    report = square.new_empty(3)
    _run(kernel, square.data_ptr(), square.shape[0], square.stride(0), report.data_ptr())
    gap, size, poison = report.tolist()
    return gap + poison, size + poison


def _run(kernel: str, *arguments: int | float | None) -> None:
    getattr(library(), kernel)(*arguments)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(x: Tensor) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


def _bound(bounded: bool) -> float:
    return torch.finfo(torch.float32).max if bounded else float("inf")
