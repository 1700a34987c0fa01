"""Sampling modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hodiff.common.options import require_number
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
