"""Second derivatives of energies by the positions of atoms: Hessians, and products with them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.atoms.columns import columns_in, first_columns, in_groups, multiply_columns, unit_columns
from hodiff.atoms.systems import Atoms, Energy, MovingAtoms, atom_indices, require_positions
from hodiff.common.chunks import LivePeak
from hodiff.common.options import require_bool, require_bools, require_chunk_size
from hodiff.common.randomness import RandomState
from hodiff.common.trees import describe
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import HodiffError, HodiffWarning, InputError, levels_to_the_caller
from hodiff.operators import HessianOperator


@leave_inference_mode
def hessian(
    energy: Energy,
    positions: Tensor,
    *,
    free: Atoms = None,
    rows: Atoms = None,
    systems: Tensor | None = None,
    batched: bool = False,
    chunk_size: int | str | None = "auto",
    compile: bool = False,
    progress: bool = False,
) -> Any:
    r"""Compute the Hessian of an energy with respect to the positions of atoms.

    $$ H_{ia,jb} = \frac{\partial^2 E}{\partial r_{ia}\, \partial r_{jb}} $$

    The energy and its gradient are recorded once, and every column is one pullback through that recording. Columns are
    pulled back in groups. The result carries no graph, also if the model's weights require gradients.

    Args:
        energy: Function of the positions that returns the energy: a tensor of shape () or (1,). Neighbour lists,
            species and cells that it closes over are constants.
        positions: Positions of shape (N, 3), or (B, N, 3) for B systems of which `energy` returns (B,).
        free: Atoms that move, as indices or as a mask; the others are constants, and only the columns of free atoms
            are computed. By default all atoms move.
        rows: Atoms whose rows are computed, among the free atoms; by default all of them.
        systems: The number of each atom's system, (N,), if the positions are those of several systems one after
            another. `energy` returns their energies (S,) or the sum. All systems share the pullbacks.
        batched: Whether `energy` takes positions (B, N, 3) of any number B of systems and returns (B,). For positions
            (N, 3), columns are then computed in copies of the system, and need no batching rules (`vmap`) of custom
            Functions. By default, a function without batching rules is pulled back column by column.
        chunk_size: Number of columns that are computed together: a positive int, None for all, or "auto" for as many as
            fit 16 MiB on a CPU and 1 GiB on a GPU, by the measured memory of a column. If memory runs out, smaller
            groups are tried. On a CPU, "auto" computes a group in each of torch's threads, unless the model calls
            custom Functions written in Python.
        compile: Whether to compile the product of the Hessian with columns, in groups of 8 by default. It takes a
            minute or more, and pays for thousands of columns; see `hodiff.HessianOperator`. Not with `batched`.
        progress: Whether to show a progress bar.

    Returns:
        Tensor (F, 3, F, 3) in the dtype of the positions, at least float32, symmetric, with F free atoms:
        `.reshape(3 * F, 3 * F)` is the matrix, and `.transpose(1, 2)` the force constants (F, F, 3, 3) of phonopy. It
        has the shape (R, 3, F, 3) with
        `rows`, (B, F, 3, F, 3) for positions (B, N, 3), and is a list of tensors with `systems`.

    Raises:
        InputError: If an argument is invalid, if `energy` returns something else, does not depend on the positions or
            is not deterministic, or if systems interact.
        RouteError: If a second derivative does not exist.

    Example:
        >>> import torch, hodiff
        >>> def spring(x):  # two atoms at distance 1
        ...     return ((x[1] - x[0]).norm() - 1) ** 2 / 2
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        >>> H = hodiff.atoms.hessian(spring, x)
        >>> H.shape, H[0, 0, :, 0]
        (torch.Size([2, 3, 2, 3]), tensor([ 1., -1.]))

    Source: B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994), eq. 2.4.
    """
    positions = require_positions("atoms.hessian", positions, batches=True)
    require_bool("atoms.hessian", "batched", batched)
    require_bools("atoms.hessian", progress=progress, compile=compile)
    require_chunk_size("atoms.hessian", "chunk_size", chunk_size)
    atoms = positions.shape[-2]
    moving = atom_indices("atoms.hessian", "free", free, atoms)
    wanted = _among("atoms.hessian", atom_indices("atoms.hessian", "rows", rows, atoms), moving)
    several = positions.ndim == 3 or systems is not None
    if several and wanted is not None:
        raise InputError("atoms.hessian: rows: expected None for several systems, got atoms; call it for each system.")
    if batched and compile:
        raise InputError("atoms.hessian: compile: expected False with batched=True, got True; omit one of them.")
    if batched and not several:
        try:
            return _by_copies(energy, positions, moving, wanted, chunk_size, progress)
        except Exception as error:
            if isinstance(error, (HodiffError, torch.OutOfMemoryError)) or not _accepts(energy, positions):
                raise
            raise InputError(
                "atoms.hessian: batched: expected an energy of positions (B, N, 3), got one that takes (N, 3) and "
                f"raises {type(error).__name__} for (B, N, 3): {error}; omit batched."
            ) from error
    place = MovingAtoms.of("atoms.hessian", energy, positions, moving, systems)
    A = HessianOperator(place.energy, place.point, chunk_size=None, progress=False, compile=compile)
    if several:
        found = _of_systems(A, place, chunk_size, compile)
        return found if systems is not None else torch.stack(found)
    n = place.point.numel()
    if wanted is None and compile:
        return _symmetric(multiply_columns(A, first_columns(A, n), chunk_size, compiled=True))
    if wanted is None:
        matrix = in_groups(A, n, chunk_size, partial(A.to_dense, progress=progress))
        return matrix.view(n // 3, 3, n // 3, 3)
    unit = unit_columns(wanted, place.point)
    columns = multiply_columns(A, unit, chunk_size, compiled=compile)
    return columns.t().reshape(len(wanted), 3, n // 3, 3)


@leave_inference_mode
def hvp(energy: Energy, positions: Tensor, v: Tensor, *, free: Atoms = None) -> Tensor:
    r"""Multiply the Hessian of an energy with displacements of atoms, without computing the Hessian.

    $$ (H v)_{ia} = \sum_{jb} \frac{\partial^2 E}{\partial r_{ia}\, \partial r_{jb}} v_{jb} $$

    The result carries no graph. `hodiff.hvp` and `hodiff.value_grad_hvp` return products that a loss of training can
    differentiate.

    Args:
        energy: As in `hessian`.
        positions: Positions of shape (N, 3).
        v: One displacement of the free atoms, (F, 3), or several, (k, F, 3), which share one recording.
        free: As in `hessian`.

    Returns:
        Tensor with the shape of `v`, in the dtype of the positions, at least float32.

    Raises:
        InputError: As in `hessian`, or if `v` does not match.
        RouteError: If a second derivative does not exist.

    Example:
        >>> import torch, hodiff
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        >>> v = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> hodiff.atoms.hvp(lambda x: ((x[1] - x[0]).norm() - 1) ** 2 / 2, x, v)
        tensor([[ 1.,  0.,  0.],
                [-1.,  0.,  0.]])

    Source: as `hessian`.
    """
    positions = require_positions("atoms.hvp", positions)
    place = MovingAtoms.of("atoms.hvp", energy, positions, atom_indices("atoms.hvp", "free", free, len(positions)))
    shape = tuple(place.point.shape)
    if not isinstance(v, Tensor) or tuple(v.shape[-2:]) != shape or v.ndim not in (2, 3) or v.dtype != positions.dtype:
        raise InputError(
            f"atoms.hvp: v: expected a tensor of shape {shape} or (k, {shape[0]}, 3) and dtype {positions.dtype}, "
            f"got {describe(v)}; pass displacements of the free atoms."
        )
    block = v.detach().to(positions.device).reshape(-1, place.point.numel()).t()
    if block.shape[1] < 2:
        # One evaluation is enough unless random numbers are drawn.
        draw = RandomState([place.point])
        once = HessianOperator(place.energy, place.point, chunk_size=None, check_deterministic=False) @ block
        if not draw.advanced:
            return once.t().reshape(v.shape)
        draw.rewind()
    A = HessianOperator(place.energy, place.point, chunk_size=None)
    return multiply_columns(A, block, "auto").t().reshape(v.shape)


def _among(caller: str, rows: Tensor | None, free: Tensor | None) -> Tensor | None:
    """Return the places of rows among the free atoms."""
    if rows is None or free is None:
        return rows
    at = {atom: place for place, atom in enumerate(free.tolist())}
    if any(atom not in at for atom in rows.tolist()):
        raise InputError(f"{caller}: rows: expected free atoms, got fixed atoms among them; add them to free.")
    return torch.tensor([at[atom] for atom in rows.tolist()])


def _of_systems(A: HessianOperator, place: MovingAtoms, chunk_size: int | str | None, compiled: bool) -> list[Tensor]:
    """Compute the Hessians of systems that do not interact, which share the unit directions."""
    members = [each.to(place.point.device) for each in place.members()]
    _require_independent(A, members)
    width = max(map(len, members))
    block = place.point.new_zeros(place.point.numel(), width)
    for each in members:
        block[each, torch.arange(len(each), device=each.device)] = 1
    columns = multiply_columns(A, block, chunk_size, compiled=compiled)
    return [_symmetric(columns[each, : len(each)]) for each in members]


def _require_independent(A: HessianOperator, members: list[Tensor]) -> None:
    """Raise if the forces of one system depend on the positions of another."""
    if len(members) < 2:
        return
    draw = torch.Generator().manual_seed(0)
    n = A.shape[0]
    v = torch.randn(n, generator=draw, dtype=torch.float64).to(A.device, A.dtype)
    weights = torch.empty_like(v)
    for each in members:
        weights[each] = 0.5 + torch.rand((), generator=draw).item()
    products = A @ torch.stack([v, weights * v], 1)
    gaps, sizes = (products[:, 1] - weights * products[:, 0]).abs(), products.abs().amax(1)
    eps = torch.finfo(A.dtype).eps
    for number, each in enumerate(members):
        if not len(each):
            continue
        # A soft system next to a stiff one is compared with its own size.
        gap = gaps[each].max()
        if gap > eps**0.5 * sizes[each].max() + 100 * eps * sizes.max():
            raise InputError(
                f"atoms.hessian: energy: expected systems that do not interact, got forces on system {number} that "
                f"depend on the positions of another, by {gap:.1e} in a product of size {sizes[each].max():.1e}; "
                "compute their Hessian as that of one system."
            )


def _by_copies(
    energy: Energy,
    positions: Tensor,
    free: Tensor | None,
    rows: Tensor | None,
    chunk_size: int | str | None,
    progress: bool,
) -> Tensor:
    """Compute each column in a copy of the system, so that a group of columns is one ordinary pullback."""
    one = MovingAtoms.of("atoms.hessian", energy, positions[None], free)
    n = one.point.numel()
    places = torch.arange(n // 3) if rows is None else rows
    unit = unit_columns(places, one.point)
    bytes_each = 0
    if chunk_size == "auto":
        with LivePeak() as live:
            HessianOperator(one.energy, one.point) @ unit[:, :1]
        bytes_each = live.peak
    size = columns_in(bytes_each, unit.shape[1], chunk_size, positions.device)
    copies = MovingAtoms.of("atoms.hessian", energy, positions.expand(size, -1, -1).contiguous(), free)
    A = HessianOperator(copies.energy, copies.point)
    _require_independent(A, [each.to(positions.device) for each in copies.members()])
    columns = positions.new_zeros(-(-unit.shape[1] // size) * size, n)
    columns[: unit.shape[1]] = unit.t()
    found = [A @ group.reshape(-1) for group in columns.split(size)]
    result = torch.cat(found).view(-1, n)[: unit.shape[1]]
    return _symmetric(result) if rows is None else result.view(len(places), 3, n // 3, 3)


def _accepts(energy: Energy, positions: Tensor) -> bool:
    """Whether an energy takes the positions of a single system."""
    try:
        energy(positions.clone().requires_grad_() * 1)
    except Exception:
        return False
    return True


def _symmetric(matrix: Tensor) -> Tensor:
    """Average a matrix with its transpose, and warn if they differ by more than rounding; return (F, 3, F, 3)."""
    if not len(matrix):
        return matrix.view(0, 3, 0, 3)
    gap, largest = (matrix - matrix.t()).abs().max(), matrix.abs().max()
    if not gap <= torch.finfo(matrix.dtype).eps ** 0.5 * largest:
        warnings.warn(
            f"atoms.hessian: the Hessian is not symmetric: |H - Hᵀ| reaches {gap / largest:.1e} of the largest entry. "
            "Either the energy is not twice differentiable here, or a derivative is wrong: run hodiff.check.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )
    return ((matrix + matrix.t()) / 2).view(len(matrix) // 3, 3, len(matrix) // 3, 3)
