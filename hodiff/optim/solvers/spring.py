"""Stochastic reconfiguration in sample space, with momentum, for wavefunctions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.optim.settings import settings_in
from hodiff.optim.solvers.sample_space import SampleSpaceOptimizer


class SPRING(SampleSpaceOptimizer):
    r"""Stochastic reconfiguration with momentum, in sample space: natural gradients for wavefunctions.

    $$ \bar O_i = \frac{1}{\sqrt N} \big(\nabla_\theta \log \psi(x_i) - \text{mean}\big), \qquad
       \bar\epsilon_i = \frac{1}{\sqrt N} \big(E(x_i) - \text{mean}\big) $$

    $$ \phi \leftarrow \alpha \phi + \bar O^\top (\bar O \bar O^\top + \mu I)^{-1} (\bar\epsilon - \alpha \bar O \phi),
       \qquad \theta \leftarrow \theta - \min\Big(\gamma, \frac{\sqrt C}{\|\phi\|}\Big)\, \phi $$

    for variational Monte Carlo, with local energies $E(x_i)$ at walkers $x_i$ drawn from $|\psi|^2$. At momentum 0 this
    is stochastic reconfiguration in sample space (MinSR). A complex $\log \psi$ of real parameters has a row for its
    real and one for its imaginary part. Where parameters are fewer than walkers, the equivalent equations in the
    parameters are solved. Gradients are set to $\bar O^\top \bar\epsilon$, half that of the mean energy.

    Args:
        model: Module whose parameters are trained.
        lr: $\gamma$, a number or a tensor with one number.
        damping: $\mu$.
        momentum: $\alpha$.
        norm_constraint: C, the largest squared norm of a step; None for no bound.
        chunk_size: Number of walkers that are differentiated together; None for all.

    Raises:
        InputError: If an argument is invalid, or a parameter complex or a DTensor over several ranks.

    Example:
        >>> import torch, hodiff
        >>> class Gaussian(torch.nn.Module):  # the ground state of an oscillator, for a = 1
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        ...     def forward(self, x):
        ...         return -self.a * x.square().sum(-1) / 2
        >>> psi = Gaussian()
        >>> optimizer = hodiff.optim.SPRING(psi, lr=0.5, momentum=0.0, norm_constraint=None)
        >>> generator = torch.Generator().manual_seed(0)
        >>> for _ in range(40):
        ...     walkers = torch.randn(100, 1, generator=generator, dtype=torch.float64) / (2 * psi.a.detach()) ** 0.5
        ...     value, slope, laplacian = hodiff.taylor.value_grad_laplacian(psi, batched=True)(walkers)
        ...     energies = -(laplacian + slope.square().sum(-1)) / 2 + walkers.square().sum(-1) / 2
        ...     energy = optimizer.step(psi, walkers, energies.detach())
        >>> round(psi.a.item(), 3), round(energy.item(), 3)
        (1.0, 0.5)

    Source: G. Goldshlager, N. Abrahamsen & L. Lin, "A Kaczmarz-inspired approach to accelerate the optimization of
    neural network wavefunctions", Journal of Computational Physics 516 (2024), section 3; A. Chen & M. Heyl,
    "Empowering deep neural quantum states through efficient optimization", Nature Physics 20 (2024), for momentum 0.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        damping: float = 1e-3,
        momentum: float = 0.99,
        *,
        norm_constraint: float | None = 1e-3,
        chunk_size: int | None = None,
    ):
        super().__init__(model, settings_in(locals()), chunk_size)

    # A step needs a function of one walker, where torch's takes a closure.
    @torch.no_grad()
    def step(self, log_psi: Callable[[Any], Tensor], walkers: PyTree, energies: Tensor) -> Tensor:  # type: ignore[override]
        r"""Take one step, within `hodiff.corrected()`, and set gradients.

        Args:
            log_psi: Function of one walker that returns $\log \psi$, or $\log |\psi|$: one number, real or complex. It
                may be the model, and else calls it.
            walkers: Tensors, or pytrees of them, with N walkers along their first dimension.
            energies: Local energies (N,), real or complex; clip outliers before.

        Returns:
            The real part of the mean of the local energies, a real number also for complex energies.

        Raises:
            InputError: If an argument is invalid, or numbers are not finite. Nothing has changed then.
        """
        self.require_dtypes()
        count = self._require_function(log_psi, walkers)
        if not isinstance(energies, Tensor) or energies.shape != (count,):
            got = describe(energies) if isinstance(energies, Tensor) else type(energies).__name__
            raise InputError(f"SPRING: step: energies: expected a tensor of shape ({count},), got {got}.")
        values = self._values(log_psi, walkers)
        width = values.shape[1]
        if width > 2:
            raise InputError(
                f"SPRING: step: log_psi: expected a function of one walker that returns one number, got {width} "
                "numbers; return log|psi| of the walker without a batch dimension."
            )
        rows = [(each - each.mean(0)) / math.sqrt(count) for each in self._rows(log_psi, walkers, width)]
        mean = energies.mean()
        noise = energies - mean
        parts = torch.view_as_real(noise.resolve_conj()) if noise.is_complex() else noise[:, None]
        # The energies' imaginary parts have no rows if log psi is real.
        right = torch.zeros_like(values)
        right[:, : parts.shape[1]] = parts[:, :width] / math.sqrt(count)
        direction = self._descend(rows, right, mean.real)
        bound = self.setting("norm_constraint")
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in direction])))
        steps = [-each for each in direction]
        rate = float(self.setting("lr"))
        if bound is not None and rate * norm > math.sqrt(bound):
            steps = [each * (math.sqrt(bound) / (rate * norm)) for each in steps]
        self.add(steps, self.parameters())
        return mean.real
