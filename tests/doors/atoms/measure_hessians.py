"""Print time and memory of Hessians beside the loops of MACE and TorchANI, as the table of docs/guides/atoms.md.

    python tests/doors/atoms/measure_hessians.py

Clusters of water, float64, random weights. The ways take turns in one process. The first run of each counts
the memory of live tensors, in one thread; the next ones seconds with one and with two threads, of which the least
counts. Other programs should not run.
"""

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ase.build import molecule
from ase.units import Hartree

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from doors.atoms.potentials import mace_calculator, torchani_model

import hodiff
from hodiff.atoms.ase import energy_of
from hodiff.common.chunks import LivePeak


def water(molecules: int) -> Any:
    box = molecule("H2O")
    box.set_cell([2.9, 2.9, 2.9])
    grid = box.repeat((-(-molecules // 4), 2, 2))[: 3 * molecules]
    grid.set_cell(None)
    grid.pbc = False
    grid.rattle(0.05, seed=0)
    return grid


def ways_of_mace(atoms: Any) -> dict[str, Callable[[], torch.Tensor]]:
    from mace.modules.utils import compute_hessians_loop

    calculator = mace_calculator()
    bound = energy_of(calculator, atoms)

    def loop() -> torch.Tensor:
        batch = calculator._atoms_to_batch(atoms).to_dict()
        forces = calculator.models[0](batch, training=True)["forces"]
        return compute_hessians_loop(forces, batch["positions"])

    return {
        "MACE, `get_hessian` (`compute_hessians_vmap`)": lambda: torch.from_numpy(calculator.get_hessian(atoms)),
        "MACE, `compute_hessians_loop`": loop,
        "MACE, `hodiff.atoms.hessian`": lambda: hodiff.atoms.hessian(bound.energy, bound.positions),
    }


def ways_of_torchani(atoms: Any) -> dict[str, Callable[[], torch.Tensor]]:
    from torchani.grad import energies_forces_and_hessians

    model = torchani_model()
    bound = energy_of(model, atoms)
    species, places = torch.from_numpy(atoms.numbers)[None], torch.from_numpy(atoms.positions)[None]
    return {
        "TorchANI, `energies_forces_and_hessians`": lambda: (
            Hartree * energies_forces_and_hessians(model, species, places.clone()).hessians.detach()
        ),
        "TorchANI, `hodiff.atoms.hessian`": lambda: hodiff.atoms.hessian(bound.energy, bound.positions),
    }


def measure(ways: dict[str, Callable[[], torch.Tensor]], size: int) -> None:
    seconds = {(name, threads): float("inf") for name in ways for threads in (1, 2)}
    found: dict[str, torch.Tensor] = {}
    peaks = {}
    for name, way in ways.items():
        with LivePeak() as live:
            found[name] = way().reshape(3 * size, 3 * size)
        peaks[name] = live.peak / 2**20
    for threads in (1, 2) * (4 if size < 50 else 3):
        torch.set_num_threads(threads)
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            seconds[name, threads] = min(seconds[name, threads], time.perf_counter() - begun)
    torch.set_num_threads(1)
    last = found[list(ways)[-1]]
    for name in ways:
        gap = ((found[name] - last).abs().max() / last.abs().max()).item()
        assert gap < 1e-9, (name, gap)
        one, two = seconds[name, 1], seconds[name, 2]
        sys.stdout.write(f"| {name} | {size} | {one:.2f} | {two:.2f} | {peaks[name]:.0f} |\n")
        sys.stdout.flush()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for molecules in (7, 16, 32):
        for ways in (ways_of_mace, ways_of_torchani):
            measure(ways(water(molecules)), 3 * molecules)


if __name__ == "__main__":
    main()
