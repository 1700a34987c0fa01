"""phonopy: force constants of a supercell from exact second derivatives, without displacements."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.atoms.hessian import hessian
from hodiff.atoms.models import bind_model
from hodiff.errors import InputError


def force_constants(
    phonon: Any, model: Any, *, chunk_size: int | str | None = "auto", progress: bool = False
) -> torch.Tensor:
    r"""Compute the force constants of a supercell, and store them in the object of phonopy.

    $$ \Phi_{ij} = \frac{\partial^2 E}{\partial r_i\, \partial r_j},
       \qquad i \text{ in the primitive cell},\; j \text{ in the supercell} $$

    Only the rows of the atoms of one primitive cell are computed, 3 products for each of them. They replace
    `generate_displacements`, the forces of the displaced supercells and `produce_force_constants`.

    Args:
        phonon: A `phonopy.Phonopy` with its supercell; its `force_constants` are set.
        model: A model as in `hodiff.atoms.ase.calculator`. Its energies are in eV and its lengths in Å, so the units of
            `phonon` must be those of its default calculator.
        chunk_size: As in `hodiff.atoms.hessian`.
        progress: As in `hodiff.atoms.hessian`.

    Returns:
        The force constants (P, N, 3, 3), float64, for P atoms in the primitive cell and N in the supercell: those that
        phonopy calls compact.

    Raises:
        InputError: If `phonon` is something else, the model is none that hodiff knows, or an option is invalid.

    Example:
        >>> import hodiff.atoms.phonopy, phonopy, torch
        >>> from phonopy.structure.atoms import PhonopyAtoms
        >>> def chain(positions, cell, atoms):  # springs of 1 eV / Å² between neighbours along z
        ...     steps = positions.roll(-1, 0) - positions
        ...     ends = torch.zeros(len(positions), 1, dtype=cell.dtype)
        ...     ends[-1] = 1
        ...     return (steps + ends * cell[2] - cell[2] / len(positions)).square().sum() / 2
        >>> atom = PhonopyAtoms(["C"], cell=[[4, 0, 0], [0, 4, 0], [0, 0, 1.5]], positions=[[0, 0, 0]])
        >>> phonon = phonopy.Phonopy(atom, [1, 1, 6])
        >>> hodiff.atoms.phonopy.force_constants(phonon, chain)[0, :, 2, 2]
        tensor([ 2., -1.,  0.,  0.,  0., -1.], dtype=torch.float64)
        >>> f"{phonon.run_qpoints([[0, 0, 0.5]]).frequencies[0, -1]:.2f}"  # in THz
        '9.02'

    Source: A. Togo & I. Tanaka, "First principles phonon calculations in materials science", Scripta Materialia 108
    (2015).
    """
    from ase import Atoms

    if not all(hasattr(phonon, name) for name in ("supercell", "primitive", "force_constants")):
        raise InputError(
            f"atoms.phonopy.force_constants: phonon: expected a phonopy.Phonopy, got {type(phonon).__name__}; create "
            "Phonopy(unitcell, supercell_matrix)."
        )
    supercell = phonon.supercell
    atoms = Atoms(supercell.numbers, supercell.positions, cell=supercell.cell, pbc=True)
    bound = bind_model("atoms.phonopy.force_constants", model, atoms)
    rows = torch.as_tensor(phonon.primitive.p2s_map).long()
    found = hessian(bound.energy, bound.positions, rows=rows, chunk_size=chunk_size, progress=progress)
    result: torch.Tensor = found.transpose(1, 2).double().cpu().contiguous()
    phonon.force_constants = result.numpy()
    return result
