"""Logarithms of probabilities, accurate at extreme arguments at every order of derivative."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.common.overriding import overridable
from hodiff.functions.logistic import Logistic
from hodiff.rules.arguments import require_broadcastable, require_floating
from hodiff.rules.elementwise import ElementwiseFunction


class LogSigmoid(ElementwiseFunction):
    """The Function behind `log_sigmoid`. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $log σ(x)$."""
        return F.logsigmoid(x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $σ(-x)$."""
        return Logistic.call(-x)


class Log1mExp(ElementwiseFunction):
    """The Function behind `log1mexp`. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $log(1 - e^{-x})$ by the more accurate of two formulas."""
        far = torch.log1p(-torch.exp(-x.clamp(min=0.5)))
        return torch.where(x < math.log(2), torch.log(-torch.expm1(-x)), far)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $1 / (e^x - 1)$."""
        return Occupation.call(x)


class Occupation(ElementwiseFunction):
    """$n(x) = 1 / (e^x - 1)$, the mean occupation number of Bose and Einstein. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $n(x)$."""
        return 1 / torch.expm1(x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $-n (1 + n)$, which neither cancels nor overflows too early."""
        n = Occupation.call(x)
        return -(n * (1 + n))


class Logit(ElementwiseFunction):
    """The Function behind `logit`. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $log(x / (1 - x))$."""
        return torch.logit(x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $1 / (x (1 - x))$."""
        return LogitSlope.call(x)


class LogitSlope(ElementwiseFunction):
    """The derivative of `logit`. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $1 / (x (1 - x))$, and NaN where the logit is NaN."""
        return torch.where((x < 0) | (x > 1), math.nan, 1 / (x * (1 - x)))

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $(2x - 1) y^2$ from the value y, which overflows to the right infinity."""
        y = LogitSlope.call(x)
        return (2 * x - 1) * (y * y)


class XLogY(ElementwiseFunction):
    """The Function behind `xlogy`. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        """Compute $x log(y)$."""
        return torch.xlogy(x, y)

    @staticmethod
    def slope(index: int, x: Tensor, y: Tensor) -> Tensor:
        """Compute $log(y)$ for x and $x / y$ for y, and zero where the function is the constant zero."""
        constant = (x == 0) & (y <= 0)
        y = torch.where(constant, 1, y)  # derivatives of the branch not taken would be 0 · ∞ otherwise
        return torch.log(y) if index == 0 else torch.where(constant, 0, x / y)


@overridable
def log_sigmoid(x: Tensor) -> Tensor:
    r"""Logarithm of the logistic function, $\log \sigma(x) = -\log(1 + e^{-x})$.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> log_sigmoid(torch.tensor([-1000.0, 0.0, 50.0]))
        tensor([-1.0000e+03, -6.9315e-01, -1.9287e-22])

    Source: M. Mächler, "Accurately computing log(1 - exp(-|a|))", 2012, equation 10.
    """
    require_floating("log_sigmoid", x=x)
    return LogSigmoid.call(x)


@overridable
def log1mexp(x: Tensor) -> Tensor:
    r"""Logarithm of one minus an exponential, $\log(1 - e^{-x})$ for $x > 0$.

    The argument is positive and its sign is reversed inside: for log-probabilities $\ell < 0$, `log1mexp(-l)` is the
    log-probability of the complement. It is $-\infty$ at 0 and NaN below.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> log1mexp(torch.tensor([1e-30, 1.0, 50.0]))
        tensor([-6.9078e+01, -4.5868e-01, -1.9287e-22])

    Source: M. Mächler, "Accurately computing log(1 - exp(-|a|))", 2012, equation 7.
    """
    require_floating("log1mexp", x=x)
    return Log1mExp.call(x)


@overridable
def logit(x: Tensor) -> Tensor:
    r"""Log-odds, $\log \frac{x}{1 - x}$ for $0 \le x \le 1$.

    It is $\mp\infty$ at 0 and 1, and NaN outside.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> logit(torch.tensor([1e-30, 0.5, 0.75]))
        tensor([-69.0776,   0.0000,   1.0986])

    Source: J. Berkson, "Application of the logistic function to bio-assay", 1944.
    """
    require_floating("logit", x=x)
    return Logit.call(x)


@overridable
def xlogy(x: Tensor, y: Tensor) -> Tensor:
    r"""$x \log y$, and 0 where $x = 0$ and $y$ is not NaN.

    Where $x = 0$ and $y \le 0$ it is the constant zero: all derivatives are 0 there.

    Args:
        x: Floating-point tensor of any shape.
        y: Floating-point tensor that broadcasts with `x`.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> p = torch.tensor([0.0, 0.5, 0.5])
        >>> -xlogy(p, p).sum()
        tensor(0.6931)

    Source: the convention of information theory, e.g. T. Cover & J. Thomas, "Elements of information theory", 2.1.
    """
    require_floating("xlogy", x=x, y=y)
    require_broadcastable("xlogy", x=x, y=y)
    return XLogY.call(x, y)
