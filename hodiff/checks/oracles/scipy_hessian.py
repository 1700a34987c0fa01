"""SciPy's adaptive finite differences as an oracle that shares no code with automatic differentiation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from tqdm.auto import tqdm

from hodiff.common.module_state import at_another_point
from hodiff.common.options import require_bool
from hodiff.errors import InputError

POINTS = 100  # points per element, about


@dataclass(frozen=True)
class HessianEstimate:
    """Hessian by finite differences.

    Attributes:
        matrix: Shape (n, n), float64: the leaves of ``x`` flattened and joined in pytree order.
        error: Shape (n, n), float64: SciPy's estimate of each element's absolute error.
        success: True if every element met SciPy's tolerances. An element whose true value is zero seldom
            meets a relative one; look at ``error`` before distrusting ``matrix``.
        evaluations: Number of points at which ``f`` was evaluated.
    """

    matrix: Tensor
    error: Tensor
    success: bool
    evaluations: int


@at_another_point
def scipy_hessian(
    f: Callable[[Any], Any],
    x: Any,
    *,
    initial_step: float = 0.5,
    order: int = 8,
    maxiter: int = 10,
    tolerances: Mapping[str, float] | None = None,
    progress: bool = False,
) -> HessianEstimate:
    r"""Compute a Hessian by adaptive finite differences, without automatic differentiation.

    .. math:: H_{ij} = \frac{\partial^2 f}{\partial x_i \, \partial x_j}

    ``f`` is called on one float64 point at a time under ``torch.no_grad()``, so it may detach, use NumPy, or
    call code that has no derivative at all. Each of the n (n + 1) / 2 elements takes about 100 points, and some
    hundreds if the tolerances cannot be reached; points shared by several elements are evaluated once.

    Args:
        f: Maps ``x`` to a float64 scalar: a tensor of one element, a NumPy scalar or a Python float.
        x: Tensor or pytree of real tensors, n elements in all; cast to float64.
        initial_step: First absolute step. Lower it near the edge of f's domain.
        order: Order of the difference formula.
        maxiter: Largest number of refinements of the step.
        tolerances: ``{"atol": ..., "rtol": ...}``, at which SciPy stops refining.
        progress: Whether to show a progress bar of the evaluated points and their expected number.

    Returns:
        The matrix, an error estimate for each element, and the number of evaluations.

    Raises:
        InputError: If ``x`` has no elements or is not real, or ``f`` does not return a float64 scalar.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> estimate = scipy_hessian(lambda x: x[0] ** 2 * x[1] ** 2, x)
        >>> estimate.matrix.round(decimals=6)
        tensor([[8., 8.],
                [8., 2.]], dtype=torch.float64)

    Source:
        ``scipy.differentiate.derivative`` (SciPy 1.15 and later), nested. Unlike ``scipy.differentiate.hessian``, each
        element is refined only as far as necessary.
    """
    from scipy.differentiate import derivative

    require_bool("scipy_hessian", "progress", progress)
    leaves, structure = tree_flatten(x)
    _require_real(x)
    sizes = [leaf.numel() for leaf in leaves]
    flat = torch.cat([leaf.detach().to("cpu", torch.float64).reshape(-1) for leaf in leaves]).numpy()
    rows, columns = np.tril_indices(len(flat))
    known: dict[tuple[tuple[int, float], ...], float] = {}
    options: Any = {"initial_step": initial_step, "order": order, "maxiter": maxiter}
    outer = {"rtol": np.finfo(float).eps ** 0.5, **(tolerances or {})}
    # Inner slopes are more exact, so that their errors do not count.
    inner = {**outer, "rtol": outer["rtol"] / 100}

    def value(step: float, other: float, element: int) -> float:
        offsets = {rows[element]: step}
        offsets[columns[element]] = offsets.get(columns[element], 0.0) + other
        moved = {place: flat[place] + offset for place, offset in offsets.items()}
        # Several elements may share a point, which is evaluated once.
        key = tuple(sorted((place, to) for place, to in moved.items() if to != flat[place]))
        if key not in known:
            point = flat.copy()
            for place, to in key:
                point[place] = to
            parts = torch.from_numpy(point).split(sizes)
            placed = [p.reshape(a.shape).to(a.device) for p, a in zip(parts, leaves, strict=True)]
            known[key] = _scalar(f(tree_unflatten(placed, structure)))
            bar.update()
        return known[key]

    def slope(other: np.ndarray, element: np.ndarray) -> np.ndarray:
        other, element = np.broadcast_arrays(other, element)
        found = derivative(
            np.vectorize(value, otypes=[float]),
            np.zeros(other.shape),
            args=(other, element),
            tolerances=inner,
            **options,
        )
        return np.asarray(found.df)

    with torch.no_grad(), np.errstate(all="ignore"), tqdm(total=POINTS * len(rows), disable=not progress) as bar:
        found = derivative(slope, np.zeros(len(rows)), args=(np.arange(len(rows)),), tolerances=outer, **options)
    matrix, error = np.empty((2, len(flat), len(flat)))
    matrix[rows, columns] = matrix[columns, rows] = found.df
    error[rows, columns] = error[columns, rows] = found.error
    return HessianEstimate(
        matrix=torch.from_numpy(matrix),
        error=torch.from_numpy(error),
        success=bool(np.all(found.success)),
        evaluations=len(known),
    )


def _require_real(x: Any) -> None:
    leaves, _ = tree_flatten_with_path(x)
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.is_complex():
            got = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InputError(f"scipy_hessian: x{keystr(path)}: expected a real tensor, got {got}.")
    if not sum(leaf.numel() for _, leaf in leaves):
        raise InputError("scipy_hessian: x: expected at least one element, got none.")


def _scalar(value: Any) -> float:
    """Return the value as a float; refuse lower precision, whose second differences have no correct digit."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype != np.float64 or array.size != 1:
        raise InputError(
            f"scipy_hessian: f(x): expected a float64 scalar, got {array.dtype} of shape {array.shape}. "
            "Convert the tensors in f to float64 (module.double(), tensor.double()) and reduce its output."
        )
    return float(array.reshape(()))
