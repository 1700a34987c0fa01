"""Modules that change only the gradient."""

from __future__ import annotations

from torch import Tensor, nn

from hodiff.functions.gradients.control import reverse_gradient, scale_gradient


class GradientReversal(nn.Module):
    r"""The identity with Jacobian $-\lambda I$, for domain-adversarial training.

    `strength` is a plain attribute, which a schedule may raise.

    Args:
        strength: $\lambda$.

    Example:
        >>> import torch
        >>> torch.func.grad(lambda x: GradientReversal(0.5)(x) ** 2)(torch.tensor(3.0))
        tensor(-3.)

    Source: Y. Ganin & V. Lempitsky, "Unsupervised domain adaptation by backpropagation", 2015, section 3.2.
    """

    def __init__(self, strength: float = 1.0):
        super().__init__()
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.reverse_gradient`."""
        return reverse_gradient(x, self.strength)

    def extra_repr(self) -> str:
        """Return the strength."""
        return f"strength={self.strength}"


class ScaleGradient(nn.Module):
    r"""The identity with Jacobian $c\,I$.

    Args:
        factor: $c$.

    Example:
        >>> import torch
        >>> torch.func.grad(lambda x: ScaleGradient(0.5)(x) ** 2)(torch.tensor(3.0))
        tensor(3.)
    """

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.scale_gradient`."""
        return scale_gradient(x, self.factor)

    def extra_repr(self) -> str:
        """Return the factor."""
        return f"factor={self.factor}"
