"""Plots of eigenvalues, one by one and as a density."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_number
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.estimators.spectra.eigsh import Eigenpairs
from hodiff.estimators.spectra.spectral_density import SpectralDensity
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.plot.shared import axes_or_new, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 1000
DECADES = 6  # shown below the peak of a density, or below the largest eigenvalue


def spectral_density(
    density: SpectralDensity,
    ax: Axes | None = None,
    *,
    of: LinearOperator | str | None = None,
    log: bool = False,
    sigma: float | None = None,
) -> Axes:
    r"""Draw the density of eigenvalues that `hodiff.estimators.spectral_density` estimated.

    The density axis is logarithmic, so that a few eigenvalues far from the bulk are visible.

    Args:
        density: The estimate.
        ax: The matplotlib axes to draw in; new ones by default.
        of: The operator of the eigenvalues, or words for it, for the title.
        log: Whether to draw the density of $\log_{10} |\lambda|$.
        sigma: Width of the Gaussians, in units of the horizontal axis.

    Returns:
        The axes.

    Raises:
        InputError: If `density` is no such estimate, `of` is neither operator nor words, or `sigma` is not positive.

    Example:
        >>> import matplotlib as mpl, torch
        >>> from hodiff.estimators import spectral_density as estimate
        >>> mpl.use("Agg")
        >>> ax = spectral_density(estimate(torch.diag(torch.linspace(-1, 1, 30)), method="exact"), of="30 points")
        >>> ax.get_xlabel(), ax.get_title()
        ('eigenvalue $\\lambda$', 'density of 30 eigenvalues of 30 points')

    Source: Ghorbani, Krishnan, Xiao, "An investigation into neural net optimization via Hessian eigenvalue density",
    ICML 2019, figure 1.
    """
    if not isinstance(density, SpectralDensity):
        raise InputError(
            "spectral_density: density: expected the result of hodiff.estimators.spectral_density, got "
            f"{type(density).__name__}."
        )
    require_bool("spectral_density", "log", log)
    require_number("spectral_density", "sigma", sigma, positive=True, finite=True, optional=True)
    title = titled("spectral_density", f"density of {_counted(density.n)}", of)
    nodes = density.nodes(log=log)
    low, high = nodes.min().item(), nodes.max().item()
    margin = 3 * sigma if sigma is not None else (high - low) / 20 or abs(high) / 20 or 0.05
    grid = torch.linspace(low - margin, high + margin, POINTS, dtype=torch.float64)
    heights = density.density(grid, sigma=sigma, log=log)
    ax = axes_or_new(ax, "spectral_density")
    ax.plot(grid.numpy(), heights.numpy())
    ax.set_yscale("log")
    peak = heights.max().item()
    ax.set_ylim(peak * 10.0**-DECADES, 2 * peak)
    ax.set_xlabel(r"size of an eigenvalue, $\log_{10} |\lambda|$" if log else r"eigenvalue $\lambda$")
    ax.set_ylabel("share of eigenvalues per decade" if log else r"share of eigenvalues per unit of $\lambda$")
    ax.set_title(title, fontsize="medium")
    return ax


def eigenvalues(
    values: LinearOperator | Eigenpairs | Tensor, ax: Axes | None = None, *, of: LinearOperator | str | None = None
) -> Axes:
    r"""Draw eigenvalues in descending order, negative ones in another colour.

    The axis is logarithmic on both sides of zero where signs differ, logarithmic where eigenvalues of one sign differ
    by more than two decades, and linear otherwise.

    Args:
        values: Eigenvalues, (k,), as of `torch.linalg.eigvalsh`; what `hodiff.estimators.eigsh` returned, whose
            residuals are drawn as bars; or a symmetric operator, whose eigenvalues are all computed, by its `to_dense`.
        ax: The matplotlib axes to draw in; new ones by default.
        of: The operator of the eigenvalues, or words for it, for the title; `values` by default if it is an operator.

    Returns:
        The axes.

    Raises:
        InputError: If `values` are no vector of finite numbers and no symmetric operator, or `of` neither operator nor
            words.

    Example:
        >>> import matplotlib as mpl, torch
        >>> from hodiff.operators import DiagonalOperator
        >>> mpl.use("Agg")
        >>> ax = eigenvalues(DiagonalOperator(torch.tensor([3.0, -0.1, 100.0])))
        >>> ax.get_yscale(), ax.get_title()
        ('symlog', 'all 3 eigenvalues of DiagonalOperator, 3 × 3')
    """
    ordered, errors = _descending(values)
    of = values if of is None and isinstance(values, LinearOperator) else of
    title = titled("eigenvalues", _how_many(len(ordered), of), of)
    index = torch.arange(len(ordered))
    ax = axes_or_new(ax, "eigenvalues")
    for colour, mask in (("C0", ordered >= 0), ("C3", ordered < 0)):
        if bool(mask.any()):
            ax.scatter(index[mask].numpy(), ordered[mask].numpy(), s=12, color=colour)
    if errors is not None:
        ax.errorbar(index.numpy(), ordered.numpy(), errors.numpy(), fmt="none", ecolor="gray", linewidth=0.8)
    largest, smallest = ordered.abs().max().item(), ordered.abs().min().item()
    wide = largest > 100 * smallest > 0
    if wide and ordered[-1] > 0:
        ax.set_yscale("log")
    else:
        if wide or ordered[0] > 0 > ordered[-1]:
            ax.set_yscale("symlog", linthresh=max(smallest, largest * 10.0**-DECADES))
        ax.axhline(0, color="gray", linewidth=0.5)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("index $i$, from the largest on")
    ax.set_ylabel(r"eigenvalue $\lambda_i$")
    ax.set_title(title, fontsize="medium")
    return ax


def _descending(values: object) -> tuple[Tensor, Tensor | None]:
    """Return eigenvalues in descending order, with their errors if known."""
    errors = None
    if isinstance(values, LinearOperator):
        if not values.symmetric:
            raise InputError(
                f"eigenvalues: values: expected an operator that is known to be symmetric, got {values}; pass the "
                "eigenvalues as a tensor."
            )
        found = torch.linalg.eigvalsh(values.to_dense())
    elif isinstance(values, Eigenpairs):
        found, errors = values.eigenvalues, values.residual
    elif isinstance(values, Tensor) and values.dim() == 1 and len(values) and not values.is_complex():
        found = values
    else:
        raise InputError(
            "eigenvalues: values: expected a real tensor (k,), a result of eigsh or a symmetric operator, got "
            f"{describe(values)}."
        )
    if not bool(torch.isfinite(found).all()):
        raise InputError("eigenvalues: values: expected finite numbers, got inf or nan among them.")
    ordered, order = found.detach().to("cpu", torch.float64).sort(descending=True)
    return ordered, None if errors is None else errors.detach().to("cpu", torch.float64)[order]


def _how_many(count: int, of: object) -> str:
    if not isinstance(of, LinearOperator):
        return _counted(count)
    n = of.shape[0]
    return f"{'all ' * (n > 1)}{_counted(n)}" if count == n else f"{count:,} of {_counted(n)}"


def _counted(n: int) -> str:
    return f"{n:,} eigenvalue{'s' * (n != 1)}"
