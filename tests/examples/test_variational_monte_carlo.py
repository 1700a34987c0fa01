"""Variational Monte Carlo: local energies against closed forms, the sampler, steps, errors, and a short run."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hodiff.checks import scipy_hessian

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "variational_monte_carlo.py"))
SYSTEMS, local_energy = EXAMPLE["SYSTEMS"], EXAMPLE["local_energy"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def points(count: int, electrons: int) -> torch.Tensor:
    return torch.randn(count, electrons, 3, generator=generator(), dtype=torch.float64)


def helium(width: int = 8) -> torch.nn.Module:
    state = EXAMPLE["Attention"](generator(), width).requires_grad_(False)
    state.read.normal_(generator=generator())
    return state


@pytest.mark.parametrize(("name", "power"), [("hydrogen", 1), ("oscillator", 2)])
def test_local_energy_of_one_electron_matches_closed_form(name: str, power: int) -> None:
    system, x = SYSTEMS[name], points(50, 1)
    r = x.norm(dim=-1)[:, 0]
    right = local_energy(EXAMPLE["OneParameter"](power, 1.0), system.potential, x)
    torch.testing.assert_close(right, torch.full_like(right, system.exact))
    a = 0.7
    other = -(a**2) / 2 + (a - 1) / r if name == "hydrogen" else 3 * a / 2 + (1 - a**2) * r**2 / 2
    torch.testing.assert_close(local_energy(EXAMPLE["OneParameter"](power, a), system.potential, x), other)


@pytest.mark.slow
def test_local_energy_of_helium_matches_scipy_differences() -> None:
    state, x = helium(), points(1, 2)
    found = local_energy(state, SYSTEMS["helium"].potential, x)

    def wave(flat: torch.Tensor) -> torch.Tensor:
        return torch.exp(state(flat.reshape(1, 2, 3))[0])

    (one, two), flat = x[0], x.flatten()
    # The derivatives are of psi itself, by the other form of the local energy: -1/2 (Laplacian psi) / psi + V.
    kinetic = -scipy_hessian(wave, flat, initial_step=0.1).matrix.trace() / (2 * wave(flat))
    potential = -2 / one.norm() - 2 / two.norm() + 1 / (one - two).norm()
    torch.testing.assert_close(found[0], kinetic + potential, rtol=1e-6, atol=1e-6)


def test_helium_state_has_cusps_and_is_symmetric() -> None:
    state, x = helium(), points(1, 2)
    torch.testing.assert_close(state(x), state(x.flip(1)))
    near = torch.cat([x, x, x])
    near[1, 0] = near[2, 0] = 0
    near[1, 0, 0] = 1e-5  # an electron at the nucleus, where the potential is -2e5
    near[2, 0] = near[2, 1]
    near[2, 0, 0] += 1e-5  # both electrons at one place, where the potential is 1e5
    assert local_energy(state, SYSTEMS["helium"].potential, near).abs().max() < 100


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
    for optimizer in ("Adam", "SPRING"):
        assert -2.93 < float(rows[f"helium, {optimizer}"]) < EXAMPLE["HARTREE_FOCK"]
