"""Plot of a loss along one or two directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from hodiff.common.options import name_of, require_amount, require_bool, require_callable, require_int
from hodiff.common.trees import PyTree, describe, flatten_primals, flatten_tangents
from hodiff.errors import InputError
from hodiff.estimators.spectra.eigsh import Eigenpairs
from hodiff.plot.shared import axes_or_new, one_number
from hodiff.taylor import directional_derivatives

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def loss_landscape(
    f: Callable[[PyTree], Tensor],
    x: PyTree,
    directions: Eigenpairs | Tensor | Sequence[PyTree],
    span: float = 1.0,
    points: int = 41,
    ax: Axes | None = None,
    *,
    progress: bool = False,
) -> Axes:
    r"""Draw a loss along one direction with its quadratic model, or its contours in the plane of two.

    $$ f(x + t v) \quad\text{and}\quad f(x) + t\, \nabla f(x)^T v + \tfrac{t^2}{2}\, v^T \nabla^2 f(x)\, v $$

    Args:
        f: Maps x to a tensor with one number.
        x: The point, a tensor or a pytree of tensors.
        directions: One or two directions: a tensor (n,) or (n, k), k = 1 or 2, a list of pytrees like x, or what
            `hodiff.estimators.eigsh` returned for one or two eigenvectors, whose eigenvalues then label the axes.
        span: Distance to both sides, in lengths of the directions.
        points: Points of each axis, 2 or more.
        ax: The matplotlib axes to draw in; new ones by default.
        progress: Whether to show a progress bar.

    Returns:
        The axes.

    Raises:
        InputError: If f does not return one number, or the directions do not match x.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> ax = loss_landscape(lambda x: x.cos().sum(), torch.zeros(2), torch.tensor([1.0, 0.0]))
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['$f(x + t v)$', 'quadratic model']

    Source: Li, Xu, Taylor, Studer, Goldstein, "Visualizing the loss landscape of neural nets", NeurIPS 2018, section 3.
    """
    require_callable("loss_landscape", f=f)
    require_bool("loss_landscape", "progress", progress)
    require_amount("loss_landscape", "span", span, positive=True)
    require_int("loss_landscape", "points", points, 2)
    leaves, spec = flatten_primals(x, "loss_landscape", "x")
    eigenvalues = directions.eigenvalues.tolist() if isinstance(directions, Eigenpairs) else None
    given = directions.eigenvectors if isinstance(directions, Eigenpairs) else directions
    tangents = [_direction(each, leaves, spec) for each in _split(given)]
    grid = torch.linspace(-span, span, points, dtype=torch.float64)

    def value(*distances: float) -> float:
        moved = list(leaves)
        for distance, tangent in zip(distances, tangents, strict=True):
            moved = [leaf + distance * step for leaf, step in zip(moved, tangent, strict=True)]
        with torch.no_grad():
            return one_number("loss_landscape", f(pytree.tree_unflatten(moved, spec))).item()

    with tqdm(total=points ** len(tangents), unit=" points", disable=not progress) as bar:
        heights = []
        for place in torch.cartesian_prod(*[grid] * len(tangents)).reshape(-1, len(tangents)).tolist():
            heights.append(value(*place))
            bar.update()
    ax = axes_or_new(ax, "loss_landscape")
    if len(tangents) == 1:
        v = pytree.tree_unflatten(list(tangents[0]), spec)
        height, slope, curvature = (
            each.item() for each in directional_derivatives(lambda p: one_number("loss_landscape", f(p)), x, v, order=2)
        )
        ax.plot(grid.numpy(), heights, label="$f(x + t v)$")
        ax.plot(grid.numpy(), (height + slope * grid + curvature * grid**2 / 2).numpy(), "--", label="quadratic model")
        ax.plot([0], [height], "o", color="black")
        ax.set_xlabel(_axis("t", "v", eigenvalues, 0))
        ax.set_ylabel("value of f")
        ax.set_title(
            f"{name_of(f)} along {'a direction' if eigenvalues is None else 'an eigenvector'}", fontsize="medium"
        )
        ax.legend()
    else:
        levels = torch.tensor(heights).reshape(points, points)
        contours = ax.contourf(grid.numpy(), grid.numpy(), levels.T.numpy(), levels=30)
        ax.figure.colorbar(contours, ax=ax, label="$f(x + t_1 v_1 + t_2 v_2)$")
        ax.plot([0], [0], "o", color="white")
        ax.set_xlabel(_axis("t_1", "v_1", eigenvalues, 0))
        ax.set_ylabel(_axis("t_2", "v_2", eigenvalues, 1))
        kind = "directions" if eigenvalues is None else "eigenvectors"
        ax.set_title(f"{name_of(f)} in the plane of two {kind}", fontsize="medium")
    return ax


def _axis(length: str, direction: str, eigenvalues: Sequence[float] | None, index: int) -> str:
    """Return the label of an axis: the unit and, for an eigenvector, its eigenvalue."""
    told = f"${length}$, in lengths of ${direction}$"
    if eigenvalues is None:
        return told
    which = f", {index + 1} of {len(eigenvalues)} from below" if len(eigenvalues) > 1 else ""
    return f"{told}\neigenvector of $\\lambda = {eigenvalues[index]:.4g}$" + which


def _split(directions: Any) -> list[Any]:
    if isinstance(directions, Tensor) and directions.dim() == 2:
        parts = list(directions.unbind(1))
    elif isinstance(directions, Tensor):
        parts = [directions]
    else:
        parts = list(directions) if isinstance(directions, (list, tuple)) else []
    if len(parts) not in (1, 2):
        raise InputError(
            "loss_landscape: directions: expected a tensor (n,) or (n, 2), a list of one or two pytrees like x, or one "
            f"or two eigenvectors of eigsh, got {describe(directions)}."
        )
    return parts


def _direction(direction: Any, leaves: tuple[Tensor, ...], spec: pytree.TreeSpec) -> tuple[Tensor, ...]:
    """Split a flat vector into leaves, or return the leaves of a pytree."""
    sizes = [leaf.numel() for leaf in leaves]
    if isinstance(direction, Tensor) and direction.shape == (sum(sizes),):
        pieces = direction.detach().split(sizes)
        return tuple(piece.reshape(leaf.shape).to(leaf) for piece, leaf in zip(pieces, leaves, strict=True))
    return flatten_tangents(direction, leaves, spec, "loss_landscape")
