"""Density of eigenvalues, by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_amount, require_choice, require_int
from hodiff.common.trees import describe
from hodiff.displays import curve, element, facts, number, page
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.checkpoints import Checkpoint
from hodiff.estimators.probes import generator_or_default
from hodiff.estimators.results import Estimate, cost_of, mean_and_error
from hodiff.estimators.spectra.quadrature import exact_rule, lanczos_rules, truncation_of

CURVE = 120  # number of points of the curve in a notebook
DECADES = 6.0  # decades of the curve below its peak


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    r"""Distribution $\mu$ of the n eigenvalues with weights 1/n, as a quadrature rule for each probe.

    Attributes:
        ritz_values: Nodes, ascending, (samples, steps) float64 on the CPU; all eigenvalues, (1, n), if exact.
        weights: Weights of the nodes, (samples, steps), with sum 1 in each row; rows that ended early are padded by 0.
        short_ritz_values: Nodes of the rules with a tenth fewer steps, for the error of stopping early.
        short_weights: Weights of the short rules.
        n: Size of the operator.
        products: Number of products.
        method: "slq" or "exact".
    """

    ritz_values: Tensor
    weights: Tensor
    short_ritz_values: Tensor
    short_weights: Tensor
    n: int
    products: int
    method: str

    def _repr_html_(self) -> str:
        nodes = self.ritz_values[self.weights > 0]
        low, high = nodes.min().item(), nodes.max().item()
        grid = torch.linspace(low, high, CURVE, dtype=torch.float64, device="cpu")
        known = [("range", f"{number(low)} to {number(high)}"), ("mean", number(self.mean)), *cost_of(self)]
        heights = self.density(grid).clamp_min(torch.finfo(torch.float64).tiny).log10()
        return page(element("b", f"density of {self.n:,} eigenvalues"), curve(heights.tolist(), DECADES), facts(known))

    def integrate(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        r"""Integral $\int f \, d\mu = \frac{1}{n} \mathrm{tr} f(A)$; n times it is the trace of $f(A)$.

        Args:
            function: Maps a tensor of eigenvalues to a tensor of the same shape, element by element.

        Returns:
            An `Estimate`, whose `truncation` compares the rules with shorter ones.

        Raises:
            InputError: If the function does not keep the shape.

        Example:
            >>> import torch
            >>> A = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
            >>> round(spectral_density(A, method="exact").integrate(torch.square).value, 6)
            4.666667
        """
        samples, short = (
            self._row_sums(function, nodes, weights)
            for nodes, weights in (
                (self.ritz_values, self.weights),
                (self.short_ritz_values, self.short_weights),
            )
        )
        if self.method == "exact":
            return Estimate(samples.item(), 0.0, self.products, self.method)
        value, error = mean_and_error(samples)
        return Estimate(value, error, self.products, self.method, truncation_of(samples, short))

    def moment(self, order: int) -> Estimate:
        r"""Moment $\int \lambda^k d\mu = \frac{1}{n} \mathrm{tr} A^k$, for each probe exact up to k = 2 steps - 1.

        Args:
            order: The k, 0 or more.

        Returns:
            An `Estimate`.
        """
        require_int("moment", "order", order, 0)
        return self.integrate(lambda values: values**order)

    @property
    def mean(self) -> float:
        """Mean eigenvalue."""
        return self.moment(1).value

    def density(self, grid: Tensor, *, sigma: float | None = None, log: bool = False) -> Tensor:
        r"""Evaluate the density on a grid, with each node widened to a Gaussian.

        $$ \phi_\sigma(t) = \sum_i w_i \, \mathcal{N}(t \mid \theta_i, \sigma^2) $$

        Args:
            grid: Points, of any shape: eigenvalues, or $\log_{10} |\lambda|$ if `log`.
            sigma: Standard deviation of each Gaussian, in the grid's units; by default a hundredth of the nodes' range.
            log: Whether to return the density of $\log_{10} |\lambda|$. Eigenvalues within rounding of zero count as
                rounding times the largest.

        Returns:
            Tensor like `grid`, in float64 on the CPU.

        Raises:
            InputError: If `sigma` is not positive.

        Example:
            >>> import torch
            >>> density = spectral_density(torch.eye(4), method="exact")
            >>> density.density(torch.tensor([1.0]), sigma=0.5) * 0.5 * (2 * torch.pi) ** 0.5
            tensor([1.], dtype=torch.float64)

        Source: Ghorbani, Krishnan, Xiao, "An investigation into neural net optimization via Hessian eigenvalue
        density", ICML 2019, eq. 4.
        """
        nodes = self.nodes(log=log)
        if sigma is None:
            low, high = nodes.min().item(), nodes.max().item()
            # If all eigenvalues are equal, any width works; choose one in proportion to the value.
            sigma = (high - low) / 100 or abs(high) / 100 or 0.01
        require_amount("density", "sigma", sigma, positive=True)
        weights = self.weights.reshape(-1) / len(self.weights)
        points = torch.as_tensor(grid).detach().to("cpu", torch.float64)
        scaled = nodes.reshape(-1) / sigma
        sums = [
            torch.exp(-((group[:, None] / sigma - scaled) ** 2) / 2) @ weights
            for group in points.reshape(-1).split(1024)
        ]
        return torch.cat(sums).reshape(points.shape) / (sigma * math.sqrt(2 * math.pi))

    def nodes(self, *, log: bool = False) -> Tensor:
        r"""Return the nodes, or $\log_{10}$ of their absolute values, with a floor at rounding.

        Args:
            log: Whether to take the logarithm.

        Returns:
            Tensor (samples, steps).
        """
        if not log:
            return self.ritz_values
        size = self.ritz_values.abs()
        floor = torch.finfo(torch.float64).eps * size.max().clamp(min=torch.finfo(torch.float64).tiny)
        return size.clamp(min=floor.item()).log10()

    def _row_sums(self, function: Callable[[Tensor], Tensor], nodes: Tensor, weights: Tensor) -> Tensor:
        values = function(nodes)
        if not isinstance(values, Tensor) or values.shape != nodes.shape:
            raise InputError(
                f"integrate: function: expected a tensor of shape {tuple(nodes.shape)}, got {describe(values)}; "
                "map eigenvalues element by element."
            )
        # Nodes with weight 0 do not count, even if the function returns NaN there.
        return torch.where(weights > 0, values * weights, 0).sum(1)


def spectral_density(
    A: Any,
    *,
    method: str = "slq",
    samples: int = 10,
    steps: int = 50,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
) -> SpectralDensity:
    r"""Density of the eigenvalues of a symmetric operator, by stochastic Lanczos quadrature.

    $$ \frac{1}{n} \mathrm{tr} f(A) = \mathbb{E}\, q^T f(A) q \approx \frac{1}{p} \sum_{j=1}^p \sum_{i=1}^m
    w_{ij} f(\theta_{ij}), \qquad w_{ij} = (e_1^T y_{ij})^2 $$

    $\theta$ and $y$ are eigenvalues and eigenvectors of the tridiagonal matrix of m Lanczos steps from a random unit
    vector q. All Lanczos vectors are re-orthogonalized, so that no eigenvalue appears twice. `chunk_size` times `steps`
    vectors of size n are in memory at a time.

    Args:
        A: A symmetric operator (n, n), as for `trace`. Symmetry is checked.
        method: "slq", or "exact" for all eigenvalues by n products and a dense decomposition.
        samples: Number of random vectors, 2 or more.
        steps: Lanczos steps for each vector, at most n.
        probes: "rademacher" (signs), "gaussian" or "sphere"; only their direction matters.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Chains that run together: a positive int, None for all, or "auto" within a memory budget.
        checkpoint: A folder, or a `Checkpoint`, in which "slq" saves its state, and from which it resumes.
        progress: Whether to show a progress bar.

    Returns:
        A `SpectralDensity`, to evaluate (`density`), integrate (`integrate`) or plot (`hodiff.plot`).

    Raises:
        InputError: If A is no symmetric real operator, an option is out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.linspace(0, 1, 500, dtype=torch.float64))
        >>> density = spectral_density(A, samples=4, steps=20)
        >>> density.products, tuple(density.ritz_values.shape)
        (80, (4, 20))
        >>> round(density.mean, 2)
        0.5

    Source: Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
    Appl. 38 (2017), algorithm 1; Ghorbani, Krishnan, Xiao, ICML 2019.
    """
    view = view_of(A, "spectral_density", chunk_size=chunk_size, sharded_too=True)
    require_choice("spectral_density", "method", method, ["slq", "exact"])
    generator = generator_or_default("spectral_density", generator)
    if method == "exact":
        if checkpoint is not None:
            raise InputError('spectral_density: checkpoint: expected None for method="exact"; it is for "slq".')
        with view.counting(view.total, progress):
            rule = exact_rule(view)
        return SpectralDensity(*rule, *rule, view.total, view.products, method)
    rules, short = lanczos_rules(view, samples, steps, probes, generator, progress, checkpoint)
    return SpectralDensity(*rules, *short, view.total, view.products, method)
