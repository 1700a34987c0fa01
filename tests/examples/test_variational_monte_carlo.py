"""Variational Monte Carlo: local energies against closed forms, symmetries, the sampler, errors, and short runs."""

import math
import re
import runpy
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hodiff.checks import scipy_hessian

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "variational_monte_carlo.py"))
SYSTEMS, local_energy = EXAMPLE["SYSTEMS"], EXAMPLE["local_energy"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def points(count: int, electrons: int) -> torch.Tensor:
    return torch.randn(count, electrons, 3, generator=generator(), dtype=torch.float64)


def atom(charge: float, spins: tuple[int, int]) -> Any:
    state = EXAMPLE["Atom"](charge, spins, generator(), width=8).requires_grad_(False)
    state.read.normal_(generator=generator())
    return state


ATOMS = [("helium", (1, 1)), ("lithium", (2, 1))]


@pytest.mark.parametrize(("name", "power"), [("hydrogen", 1), ("oscillator", 2)])
def test_local_energy_of_one_electron_matches_closed_form(name: str, power: int) -> None:
    system, x = SYSTEMS[name], points(50, 1)
    r = x.norm(dim=-1)[:, 0]
    right = local_energy(EXAMPLE["OneParameter"](power, 1.0), system.potential, x)
    torch.testing.assert_close(right, torch.full_like(right, system.exact), rtol=0, atol=1e-12)
    a = 0.7
    other = -(a**2) / 2 + (a - 1) / r if name == "hydrogen" else 3 * a / 2 + (1 - a**2) * r**2 / 2
    torch.testing.assert_close(local_energy(EXAMPLE["OneParameter"](power, a), system.potential, x), other)


def test_local_energy_of_electrons_without_repulsion_is_constant() -> None:
    state, x = atom(3.0, (1, 1)), points(50, 2)
    for parameter, value in ((state.read, 0.0), (state.a, 0.0), (state.log_b, 80.0)):
        parameter.fill_(value)  # both electrons in the orbital exp(-3 r), and no cusp where they meet
    found = local_energy(state, lambda x: -(3 / x.norm(dim=-1)).sum(-1), x)
    torch.testing.assert_close(found, torch.full_like(found, -9.0), rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spins"), ATOMS)
def test_local_energy_of_atoms_matches_scipy_differences(name: str, spins: tuple[int, int]) -> None:
    electrons = sum(spins)
    state, x = atom(float(electrons), spins), points(1, electrons)
    found = local_energy(state, SYSTEMS[name].potential, x)

    def wave(flat: torch.Tensor) -> torch.Tensor:
        logarithm, determinants = state.factors(flat.reshape(1, electrons, 3))
        return (torch.exp(logarithm) * determinants)[0]

    # The derivatives are of psi itself, by the other form of the local energy: -1/2 (Laplacian psi) / psi + V.
    flat = x.flatten()
    kinetic = -scipy_hessian(wave, flat, initial_step=0.05).matrix.trace() / (2 * wave(flat))
    potential = -(electrons / x[0].norm(dim=-1)).sum() + (1 / torch.pdist(x[0])).sum()
    torch.testing.assert_close(found[0], kinetic + potential, rtol=1e-6, atol=1e-6)


def test_atoms_are_antisymmetric_in_equal_spins() -> None:
    x = points(20, 3)
    lithium = atom(3.0, (2, 1))
    logarithm, determinants = lithium.factors(x)
    exchanged = lithium.factors(x[:, [1, 0, 2]])
    torch.testing.assert_close(exchanged[0], logarithm, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(exchanged[1], -determinants, rtol=1e-13, atol=1e-13)
    assert (lithium(x[:, [2, 1, 0]]) - lithium(x)).abs().min() > 1e-6
    helium = atom(2.0, (1, 1))
    for one, other in zip(helium.factors(x[:, :2]), helium.factors(x[:, [1, 0]]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("name", "spins"), ATOMS)
def test_local_energy_of_atoms_is_bounded_where_particles_meet(name: str, spins: tuple[int, int]) -> None:
    electrons = sum(spins)
    state, x = atom(float(electrons), spins), points(1, electrons)
    near = x.repeat(1 + electrons, 1, 1)
    near[0, 0] = torch.tensor([1e-5, 0, 0])  # an electron at the nucleus, where the potential is below -2e5
    for k, (one, other) in enumerate([(0, 1), (0, electrons - 1)], 1):
        near[k, one] = near[k, other]
        near[k, one, 0] += 1e-5  # two electrons at one place, where the potential is 1e5
    assert local_energy(state, SYSTEMS[name].potential, near).abs().max() < 200


def test_walkers_sample_the_squared_wavefunction() -> None:
    state = EXAMPLE["OneParameter"](1, 1.0)
    walkers = EXAMPLE["Walkers"](points(4000, 1), generator())
    for _ in range(30):
        walkers.walk(state, 10)
    r = walkers.x.norm(dim=-1)
    # The density r^2 exp(-2 r) has mean 3/2 and variance 3/4.
    assert r.mean().item() == pytest.approx(1.5, abs=4 * math.sqrt(0.75 / 4000))
    assert r.var().item() == pytest.approx(0.75, rel=0.15)


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_reblocked_error_of_correlated_series_matches(memory: float) -> None:
    noise = torch.randn(4096, 20, generator=generator(), dtype=torch.float64)
    series = [noise[0] / math.sqrt(1 - memory**2)]
    for each in noise[1:]:
        series.append(memory * series[-1] + each)
    found = [EXAMPLE["reblocked"](each) for each in torch.stack(series, 1)]
    # The variance is 1 / (1 - memory^2), and (1 + memory) / (1 - memory) neighbours count as one.
    assert sum(found) / len(found) == pytest.approx(1 / (1 - memory) / math.sqrt(4096), rel=0.1)


@pytest.mark.slow
def test_quick_run_prints_and_saves_results(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick", "--no-progress")
    rows = dict(re.findall(r"^(\w+, \w+) +(-?[\d.]+) ", text, re.MULTILINE))
    assert float(rows["hydrogen, SPRING"]) == pytest.approx(-0.5, abs=5e-3)
    assert float(rows["oscillator, SPRING"]) == pytest.approx(1.5, abs=1e-4)
    for optimizer in ("AdamW", "SPRING"):
        assert -2.93 < float(rows[f"helium, {optimizer}"]) < EXAMPLE["HARTREE_FOCK"]["helium"]
    assert -7.6 < float(rows["lithium, SPRING"]) < -7.2


@pytest.mark.slow
def test_spring_lowers_the_energy_of_lithium() -> None:
    course = EXAMPLE["solve"]("lithium", "SPRING", Namespace(seed=0, walkers=256, steps=40, measurements=10), False)
    assert sum(course.energies[-10:]) / 10 < sum(course.energies[:10]) / 10 - 0.03
    assert -7.6 < course.energy < EXAMPLE["HARTREE_FOCK"]["lithium"] + 0.05
