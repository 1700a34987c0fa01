"""Eigenvalues, one by one and as a density."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.estimators.spectral_density import SpectralDensity
from hodiff.plot.shared import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 1000
DECADES = 6  # below the peak of a density, or the largest eigenvalue, that are shown


def spectral_density(
    density: SpectralDensity,
    ax: Axes | None = None,
    *,
    log: bool = False,
    sigma: float | None = None,
) -> Axes:
    r"""Draw the density of eigenvalues that `hodiff.estimators.spectral_density` estimated.

    The density axis is logarithmic: a few eigenvalues far from the bulk are what one looks for.

    Args:
        density: The estimate.
        ax: The matplotlib axes to draw in; new ones by default.
        log: Whether to draw the density of $\log_{10} |\lambda|$.
        sigma: Width of the Gaussians, in units of the horizontal axis.

    Returns:
        The axes.

    Raises:
        InputError: If `density` is no such estimate, or `sigma` is not positive.

    Example:
        >>> import matplotlib as mpl, torch
        >>> from hodiff.estimators import spectral_density as estimate
        >>> mpl.use("Agg")
        >>> spectral_density(estimate(torch.diag(torch.linspace(-1, 1, 30)), method="exact")).get_xlabel()
        '$\\lambda$'

    Source: Ghorbani, Krishnan, Xiao, "An investigation into neural net optimization via Hessian eigenvalue density",
    ICML 2019, figure 1.
    """
    if not isinstance(density, SpectralDensity):
        raise InputError(
            "spectral_density: density: expected what hodiff.estimators.spectral_density returns, got "
            f"{type(density).__name__}."
        )
    nodes = density.nodes(log=log)
    low, high = nodes.min().item(), nodes.max().item()
    margin = 3 * sigma if sigma is not None and sigma > 0 else (high - low) / 20 or abs(high) / 20 or 0.05
    grid = torch.linspace(low - margin, high + margin, POINTS, dtype=torch.float64)
    heights = density.density(grid, sigma=sigma, log=log)
    ax = axes_or_new(ax, "spectral_density")
    ax.plot(grid.numpy(), heights.numpy())
    ax.set_yscale("log")
    peak = heights.max().item()
    ax.set_ylim(peak * 10.0**-DECADES, 2 * peak)
    ax.set_xlabel(r"$\log_{10} |\lambda|$" if log else r"$\lambda$")
    ax.set_ylabel("density")
    return ax


def eigenvalues(values: Tensor, ax: Axes | None = None) -> Axes:
    r"""Draw eigenvalues in descending order, negative ones in another colour.

    The axis is logarithmic on both sides of zero where signs differ, logarithmic where eigenvalues of one sign differ
    by more than two decades, and linear otherwise.

    Args:
        values: Eigenvalues, (k,), as of `hodiff.estimators.eigsh` or `torch.linalg.eigvalsh`.
        ax: The matplotlib axes to draw in; new ones by default.

    Returns:
        The axes.

    Raises:
        InputError: If `values` is no vector of finite numbers.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> eigenvalues(torch.tensor([3.0, -0.1, 100.0])).get_yscale()
        'symlog'
    """
    if not isinstance(values, Tensor) or values.dim() != 1 or not len(values) or values.is_complex():
        raise InputError(f"eigenvalues: values: expected a real tensor (k,), got {describe(values)}.")
    if not bool(torch.isfinite(values).all()):
        raise InputError("eigenvalues: values: expected finite numbers, got inf or nan among them.")
    ordered = values.detach().to("cpu", torch.float64).sort(descending=True).values
    index = torch.arange(len(ordered))
    ax = axes_or_new(ax, "eigenvalues")
    for colour, mask in (("C0", ordered >= 0), ("C3", ordered < 0)):
        if bool(mask.any()):
            ax.scatter(index[mask].numpy(), ordered[mask].numpy(), s=12, color=colour)
    largest, smallest = ordered.abs().max().item(), ordered.abs().min().item()
    wide = largest > 100 * smallest > 0
    if wide and ordered[-1] > 0:
        ax.set_yscale("log")
    else:
        if wide or ordered[0] > 0 > ordered[-1]:
            ax.set_yscale("symlog", linthresh=max(smallest, largest * 10.0**-DECADES))
        ax.axhline(0, color="gray", linewidth=0.5)
    ax.set_xlabel("index")
    ax.set_ylabel(r"$\lambda$")
    return ax
