"""Reductions and normalizations along dimensions, and the smooth absolute value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_bool
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.logistic import Bell
from hodiff.functions.softmax.logsumexp import LogSumExp
from hodiff.functions.softmax.softmax import LogSoftmax, Softmax
from hodiff.rules.arguments import require_dims, require_floating
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction

Dims = int | tuple[int, ...]

# Beyond this bound, log cosh differs from a line by less than the precision of float64.
_LINEAR = 20.0


class LogCosh(ElementwiseFunction):
    """The Function behind `log_cosh`. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $log(1 + 2 sinh(x/2)^2)$, which does not cancel near zero, and is continued linearly far from it."""
        near = x.clamp(-_LINEAR, _LINEAR)
        return torch.log1p(2 * torch.sinh(0.5 * near).square()) + (x - near).abs()

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $tanh(x)$."""
        return Tanh.call(x)


class Tanh(ElementwiseFunction):
    """tanh(x), whose derivatives keep all digits in both tails. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $tanh(x)$."""
        return torch.tanh(x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $4 b(2x)$, with b the derivative of σ."""
        return 4 * Bell.call(2 * x)


class AMax(SavingFunction):
    """The Function behind `amax`; the dimension is negative and kept. Saves its input and output.

    Both are detached before they are compared, so the zero second derivative costs nothing.
    """

    reads_output = True
    broadcasts = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        """Compute the maximum."""
        return x.amax(dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None]:
        """Share the cotangent equally among the maximal elements."""
        if cotangent is None or not ctx.needs_input_grad[0]:
            return None, None
        x, y = ctx.saved_tensors
        (dim,) = ctx.rest
        largest, count = _ties(x.detach(), y.detach(), dim)
        return torch.where(largest, cotangent / count, 0), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Compute the mean of the tangent over the maximal elements."""
        x = ctx.saved_tensors[0].detach()
        (dim,) = ctx.rest
        largest, count = _ties(x, x.amax(dim, keepdim=True), dim)
        return torch.where(largest, tangent, 0).sum(dim, keepdim=True) / count


def _ties(x: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    # NaN is its own maximum.
    largest = (x == y) | (x.isnan() & y.isnan())
    return largest, largest.sum(dim, keepdim=True)


@overridable
def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    r"""Logarithm of a sum of exponentials, $\log \sum_c e^{x_c}$.

    Nothing overflows, and the derivative is the softmax. Infinities are limits: if all elements are $-\infty$ (or there
    is none), the result is $-\infty$ and all derivatives are 0; if some are $+\infty$, the result is $+\infty$, and
    these elements share the derivative equally.

    Args:
        x: Floating-point tensor.
        dim: One dimension, or several.
        keepdim: Whether to keep the dimensions with size 1.

    Returns:
        Tensor without the dimensions, or with size 1 there.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> logsumexp(torch.tensor([[100.0, 100.0], [-float("inf"), 0.0]]), dim=1)
        tensor([100.6931,   0.0000])

    Source: P. Blanchard, D. Higham & N. Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.
    """
    dims = _dims("logsumexp", x, dim)
    require_bool("logsumexp", "keepdim", keepdim)
    return _reduced(LogSumExp.call, x, dims, keepdim)


@overridable
def softmax(x: Tensor, dim: Dims) -> Tensor:
    r"""Normalized exponentials, $p_c = e^{x_c} / \sum_k e^{x_k}$.

    Elements that are $-\infty$ get 0. If all are $-\infty$, or one is $+\infty$, there is no limit and the result is
    NaN, as in torch.

    Args:
        x: Floating-point tensor.
        dim: One dimension, or several that are normalized together.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> softmax(torch.tensor([[1000.0, 1000.0], [-float("inf"), 0.0]]), dim=1)
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])

    Source: P. Blanchard, D. Higham & N. Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.
    """
    return _normalized(Softmax.call, x, _dims("softmax", x, dim))


@overridable
def log_softmax(x: Tensor, dim: Dims) -> Tensor:
    r"""Logarithm of normalized exponentials, $x_c - \log \sum_k e^{x_k}$.

    Elements that are $-\infty$ remain so. If all are $-\infty$, or one is $+\infty$, the result is NaN, as in torch.

    Args:
        x: Floating-point tensor.
        dim: One dimension, or several that are normalized together.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> log_softmax(torch.tensor([0.0, 1000.0]), dim=0)
        tensor([-1000.,     0.])

    Source: P. Blanchard, D. Higham & N. Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.
    """
    return _normalized(LogSoftmax.call, x, _dims("log_softmax", x, dim))


@overridable
def log_cosh(x: Tensor) -> Tensor:
    r"""Smooth absolute value, $\log \cosh x$: $x^2/2$ near zero and $|x| - \log 2$ far from it.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape, accurate relative to itself at any size.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> log_cosh(torch.tensor([1e-10, 1.0, 1000.0]))
        tensor([5.0000e-21, 4.3378e-01, 9.9931e+02])

    Source: P. Green, "Bayesian reconstructions from emission tomography data using a modified EM algorithm", 1990.
    """
    require_floating("log_cosh", x=x)
    return LogCosh.call(x)


@overridable
def amax(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    r"""Maximum along dimensions, $\max_c x_c$.

    Equal maxima share the derivative equally, as in `torch.amax` (`torch.max(x, dim)` gives it all to one). The second
    derivative is 0 and costs nothing. NaN is larger than any number.

    Args:
        x: Floating-point tensor.
        dim: One dimension, or several; none may be empty.
        keepdim: Whether to keep the dimensions with size 1.

    Returns:
        Tensor without the dimensions, or with size 1 there.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 3.0, 3.0])
        >>> amax(x, 0)
        tensor(3.)
        >>> torch.func.grad(lambda x: amax(x, 0))(x)
        tensor([0.0000, 0.5000, 0.5000])

    Source: F. Clarke, "Optimization and nonsmooth analysis", 1983, section 2.3: a point of the subdifferential.
    """
    dims = _dims("amax", x, dim)
    require_bool("amax", "keepdim", keepdim)
    if x.dim() and any(x.shape[each] == 0 for each in dims):
        raise InputError(f"amax: x: expected elements along dimensions {dims}, got the shape {tuple(x.shape)}.")
    return _reduced(AMax.call, x, dims, keepdim)


def _dims(name: str, x: Any, dim: Any) -> tuple[int, ...]:
    require_floating(name, x=x)
    if not isinstance(dim, (int, tuple, list)) or dim == () or dim == []:
        raise InputError(f"{name}: dim: expected an int or a tuple of ints, got {dim!r}.")
    return require_dims(name, x, dim)


def _one_dimension(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, int]:
    """Join the dimensions to one, as a view if possible; return the tensor and the negative index of that dimension."""
    if len(dims) == 1:
        return x, dims[0] - x.dim()
    if dims == tuple(range(dims[0], dims[-1] + 1)):
        return x.flatten(dims[0], dims[-1]), dims[-1] - x.dim()
    last = tuple(range(x.dim() - len(dims), x.dim()))
    return x.movedim(dims, last).flatten(last[0]), -1


def _reduced(function: Callable[..., Tensor], x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    if x.dim() == 0:
        return function(x.reshape(1), -1).squeeze(-1)
    joined, at = _one_dimension(x, dims)
    y = function(joined, at)
    if keepdim and len(dims) == 1:
        return y
    y = y.squeeze(at)
    for each in dims if keepdim else ():
        y = y.unsqueeze(each)
    return y


def _normalized(function: Callable[..., Tensor], x: Tensor, dims: tuple[int, ...]) -> Tensor:
    if x.dim() == 0:
        return function(x.reshape(1), -1).reshape(())
    joined, at = _one_dimension(x, dims)
    y = function(joined, at)
    if len(dims) == 1:
        return y
    y = y.unflatten(at, [x.shape[k] for k in dims])
    if dims == tuple(range(dims[0], dims[-1] + 1)):
        return y
    return y.movedim(tuple(range(x.dim() - len(dims), x.dim())), dims)
