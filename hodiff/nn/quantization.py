"""Modules whose gradients are chosen: quantization, sampling, and changes of the gradient alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.common.options import require_bool, require_bools, require_int, require_number
from hodiff.errors import InputError
from hodiff.functions.gradients.control import reverse_gradient, scale_gradient
from hodiff.functions.gradients.quantization import quantize_ste
from hodiff.functions.sampling import gumbel_softmax


class GumbelSoftmax(nn.Module):
    r"""Relaxed one-hot samples; see `hodiff.functions.gumbel_softmax`.

    Args:
        temperature: Positive number $\tau$.
        hard: Whether the values are one-hot.
        dim: The dimension of the classes.
        learnable: Whether the temperature is a parameter, `log_temperature`, whose exponential stays positive.

    Raises:
        InputError: If the temperature is not a positive number.

    Example:
        >>> import torch
        >>> sample = GumbelSoftmax(temperature=0.5, hard=True)
        >>> sample(torch.zeros(4, 3), torch.Generator().manual_seed(0)).sum(1)
        tensor([1., 1., 1., 1.])

    Source: E. Jang, S. Gu & B. Poole, "Categorical reparameterization with Gumbel-softmax", 2017.
    """

    def __init__(self, temperature: float = 1.0, hard: bool = False, dim: int = -1, learnable: bool = False):
        super().__init__()
        require_number("GumbelSoftmax", "temperature", temperature, positive=True)
        require_bools("GumbelSoftmax", hard=hard, learnable=learnable)
        require_int("GumbelSoftmax", "dim", dim)
        self.initial_temperature = temperature
        self.hard = hard
        self.dim = dim
        self.log_temperature = nn.Parameter(torch.tensor(float(temperature)).log()) if learnable else None

    @property
    def temperature(self) -> Tensor | float:
        """The current temperature."""
        return self.initial_temperature if self.log_temperature is None else self.log_temperature.exp()

    def forward(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a sample.

        Args:
            logits: Unnormalized log-probabilities.
            generator: Source of the noise; torch's own if None.

        Returns:
            Tensor of the shape of `logits`.
        """
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.to(logits.dtype)
        return gumbel_softmax(logits, temperature, self.hard, self.dim, generator)

    def extra_repr(self) -> str:
        """Return the settings."""
        learnable = ", learnable=True" if self.log_temperature is not None else ""
        return f"temperature={self.initial_temperature}, hard={self.hard}, dim={self.dim}{learnable}"


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


class FakeQuantize(nn.Module):
    r"""Uniform quantization by `hodiff.functions.quantize_ste`, with a learned step size.

    The gradient of the step size is scaled by $1 / \sqrt{N q_+}$ for N numbers in the input, so that the step size
    changes at the pace of the weights.

    Args:
        bits: Number of bits.
        symmetric: Whether the integers lie around zero, as for weights; else they start from zero, as for nonnegative
            activations.
        scale: Initial step size; `initialize_` sets it from data.
        learnable: Whether the step size is a parameter; else it is a buffer.
        device: Device of the step size.
        dtype: Dtype of the step size.

    Attributes:
        scale: The step size.

    Raises:
        InputError: If `bits` or `scale` is invalid.

    Example:
        >>> import torch
        >>> quantize = FakeQuantize(bits=3)
        >>> weights = torch.tensor([-2.0, -0.3, 0.4, 0.9])
        >>> quantize.initialize_(weights)
        FakeQuantize(bits=3, symmetric=True)
        >>> quantize(weights)
        tensor([-2.0785,  0.0000,  0.0000,  1.0392], grad_fn=<QuantizeSTEBackward>)

    Source: S. K. Esser, J. L. McKinstry, D. Bablani, R. Appuswamy & D. S. Modha, "Learned step size quantization",
    2020, sections 2.1 and 2.2.
    """

    scale: Tensor

    def __init__(
        self,
        bits: int,
        *,
        symmetric: bool = True,
        scale: float = 1.0,
        learnable: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        quantize_ste(torch.zeros(()), bits, scale=scale, symmetric=symmetric)  # raises on bad arguments
        require_bool("FakeQuantize", "learnable", learnable)
        self.bits, self.symmetric = bits, symmetric
        initial = torch.tensor(float(scale), device=device, dtype=dtype or torch.get_default_dtype())
        if learnable:
            self.scale = nn.Parameter(initial)
        else:
            self.register_buffer("scale", initial)

    @property
    def highest(self) -> int:
        """The highest integer, $q_+$."""
        return 2 ** (self.bits - self.symmetric) - 1

    @torch.no_grad()
    def initialize_(self, x: Tensor) -> FakeQuantize:
        r"""Set the step size to $2 \overline{|x|} / \sqrt{q_+}$.

        Args:
            x: Sample of the numbers to be quantized, not all zero.

        Returns:
            This module.

        Raises:
            InputError: If the step size is not a positive number.
        """
        scale = 2 * x.abs().mean() / math.sqrt(self.highest)
        if not 0 < float(scale) < math.inf:
            raise InputError(f"FakeQuantize: x: expected finite numbers that are not all zero, got mean |x| {scale}.")
        self.scale.copy_(scale)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input."""
        if torch.compiler.is_compiling():
            # A symbolic size has no numeric square root, and most sizes exceed the range of float16.
            wide = torch.promote_types(self.scale.dtype, torch.float32)
            factor = torch.full((), x.numel(), dtype=wide, device=self.scale.device).clamp(min=1).mul(self.highest)
            scale = scale_gradient(self.scale.to(wide), factor.rsqrt()).to(self.scale.dtype)
        else:
            scale = scale_gradient(self.scale, 1 / math.sqrt(max(x.numel(), 1) * self.highest))
        return quantize_ste(x, self.bits, scale=scale, symmetric=self.symmetric)

    def extra_repr(self) -> str:
        """Return the grid."""
        return f"bits={self.bits}, symmetric={self.symmetric}"
