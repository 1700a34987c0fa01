"""A Hessian as a picture, with the parameters that its rows belong to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe, leaf_names
from hodiff.errors import InputError
from hodiff.plot.shared import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def hessian(matrix: Tensor, parameters: PyTree | Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    r"""Draw a Hessian, zero in white, positive entries in red and negative ones in blue.

    Args:
        matrix: The Hessian (n, n), as of `hodiff.hessian_matrix`.
        parameters: What rows belong to: the pytree that was differentiated, whose leaves are named and separated by
            lines, or n names.
        ax: The matplotlib axes to draw in; new ones by default.

    Returns:
        The axes.

    Raises:
        InputError: If the matrix is not square and finite, or the parameters do not have n numbers.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> ax = hessian(torch.eye(3), {"weight": torch.ones(2), "bias": torch.ones(1)})
        >>> [text.get_text() for text in ax.get_xticklabels()]
        ['weight', 'bias']
    """
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise InputError(f"hessian: matrix: expected a tensor (n, n), got {describe(matrix)}.")
    values = matrix.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise InputError("hessian: matrix: expected finite numbers, got inf or nan among them.")
    n = len(values)
    names, sizes = _blocks(parameters, n) if parameters is not None else ([], [])
    ax = axes_or_new(ax, "hessian")
    limit = values.abs().max().item() or 1.0
    image = ax.imshow(values.numpy(), cmap="bwr", vmin=-limit, vmax=limit, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax)
    if names:
        edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
        centres = [(low + high - 1) / 2 for low, high in pairwise(edges)]
        ax.set_xticks(centres, names, rotation=90)
        ax.set_yticks(centres, names)
        if len(names) < n:
            for edge in edges[1:-1]:
                ax.axhline(edge - 0.5, color="black", linewidth=0.5)
                ax.axvline(edge - 0.5, color="black", linewidth=0.5)
    return ax


def _blocks(parameters: Any, n: int) -> tuple[list[str], list[int]]:
    """A name and a size for each block of rows."""
    leaves = pytree.tree_leaves(parameters)
    if leaves and all(isinstance(leaf, str) for leaf in leaves):
        names, sizes = list(leaves), [1] * len(leaves)
    elif leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
        names = [_plain(name) for name in leaf_names(parameters)]
        sizes = [leaf.numel() for leaf in leaves]
    else:
        raise InputError(
            f"hessian: parameters: expected a pytree of tensors or a list of names, got {describe(parameters)}."
        )
    if sum(sizes) != n:
        raise InputError(f"hessian: parameters: expected {n} rows in all, got {sum(sizes)}; pass what f was given.")
    return names, sizes


def _plain(name: str) -> str:
    """A dict's key without brackets where it is the whole path."""
    inner = name[2:-2]
    return inner if name.startswith("['") and name.endswith("']") and "'" not in inner else name or "x"
