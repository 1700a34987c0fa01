"""Activations with exact derivatives of every order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.arguments import require_broadcastable, require_floating, require_number_or_floating
from hodiff.functions.elementwise import ElementwiseFunction


class Swish(ElementwiseFunction):
    """The Function behind `swish`. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, beta: Any) -> Tensor:
        """Compute $x σ(βx)$."""
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def slope(index: int, x: Tensor, beta: Any) -> Tensor:
        """$σ + βx σ(1 - σ)$ by x, and $x^2 σ(1 - σ)$ by β."""
        z = beta * x
        s = torch.sigmoid(z)
        bell = s * torch.sigmoid(-z)  # not s * (1 - s), which loses all digits for large z
        return s + z * bell if index == 0 else x * (x * bell)


def swish(x: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    r"""Swish, $x\,\sigma(\beta x)$ with $\sigma(z) = 1 / (1 + e^{-z})$.

    Args:
        x: Floating-point tensor of any shape.
        beta: Number, or floating-point tensor that broadcasts with `x` and may require a gradient.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is not what it should be.

    Example:
        >>> import torch
        >>> swish(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.2689,  0.0000,  0.7311])

    Source: P. Ramachandran, B. Zoph & Q. V. Le, "Searching for activation functions", 2017, section 3.
    """
    require_floating("swish", x=x)
    require_number_or_floating("swish", beta=beta)
    require_broadcastable("swish", x=x, beta=beta)
    return Swish.apply(x, beta)
