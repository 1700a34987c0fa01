"""torch-sim: Hessians of all systems of a state at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hodiff.atoms.hessian import hessian as hessian_of_energies
from hodiff.common.options import name_of
from hodiff.errors import InputError


def hessian(
    model: Any, state: Any, *, chunk_size: int | str | None = "auto", progress: bool = False
) -> list[torch.Tensor]:
    """Compute the Hessians of all systems of a state of torch-sim, which share the pullbacks.

    Two products with random vectors check that systems do not interact.

    Args:
        model: A model of torch-sim, a `ModelInterface` of eager torch, such as `LennardJonesModel` or `MaceModel`.
        state: A `SimState` of one or more systems.
        chunk_size: As in `hodiff.atoms.hessian`.
        progress: As in `hodiff.atoms.hessian`.

    Returns:
        A tensor (N, 3, N, 3) for each system, in its order in the state.

    Raises:
        InputError: If the model's energy does not depend on the positions by torch's operators, as that of compiled
            models; or as in `hodiff.atoms.hessian`.

    Example:
        >>> import hodiff.atoms.torch_sim, torch, torch_sim
        >>> from ase.build import bulk
        >>> from torch_sim.models.lennard_jones import LennardJonesModel
        >>> model = LennardJonesModel(sigma=3.4, epsilon=0.0104, cutoff=8.5, dtype=torch.float64)
        >>> argon = [bulk("Ar", a=a, cubic=True) for a in (5.2, 5.3)]
        >>> state = torch_sim.io.atoms_to_state(argon, torch.device("cpu"), torch.float64)
        >>> [tuple(H.shape) for H in hodiff.atoms.torch_sim.hessian(model, state)]
        [(4, 3, 4, 3), (4, 3, 4, 3)]

    Source: as `hodiff.atoms.hessian`.
    """
    energies = energies_of("atoms.torch_sim.hessian", model, state)
    found: list[torch.Tensor] = hessian_of_energies(
        lambda x: energies(x, state.cell.mT),
        state.positions,
        systems=state.system_idx,
        chunk_size=chunk_size,
        progress=progress,
    )
    return found


def energies_of(caller: str, model: Any, state: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the energies of a state's systems, as a function of positions and cells with vectors as rows."""
    for name in ("positions", "cell"):
        if not getattr(state, name).isfinite().all():
            raise InputError(
                f"{caller}: state: expected finite {name}, got NaN or Inf among them; repair the structure."
            )

    def energies(positions: Tensor, cells: Tensor) -> Tensor:
        moved = state.clone()
        moved.positions, moved.cell = positions, cells.mT
        with _without_derivatives(model), _outputs_of_parts(model) as outputs:
            result = model(moved)["energy"]
        # Many models return the detached energy of a network of another package.
        for energy in (result, *reversed(outputs)):
            if isinstance(energy, Tensor) and energy.requires_grad:
                return energy.reshape(-1)
        if not positions.requires_grad:
            found: Tensor = result.reshape(-1)
            return found
        raise InputError(
            f"{caller}: model: expected a model whose energy torch can differentiate, got {name_of(model)}, whose "
            "energy has no graph; use the eager model, not a compiled one."
        )

    return energies


@contextmanager
def _without_derivatives(model: Any) -> Iterator[None]:
    """Switch off the model's own forces, which would free the graph."""
    names = [name for name in ("_compute_forces", "_compute_stress") if hasattr(model, name)]
    before = {name: getattr(model, name) for name in names}
    for name in names:
        setattr(model, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


@contextmanager
def _outputs_of_parts(model: Any) -> Iterator[list[Any]]:
    """Collect the energies that the model's parts return."""
    found: list[Any] = []

    def note(module: Any, arguments: Any, output: Any) -> None:
        if isinstance(output, dict):
            found.extend(output[name] for name in ("energy", "total_energy") if name in output)

    # Scripted modules take no hooks.
    parts = [part for part in model.children() if not isinstance(part, torch.jit.ScriptModule)]
    handles = [part.register_forward_hook(note) for part in parts]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
