"""Riemannian Hamiltonian Monte Carlo: its energy in NumPy, properties of its integrator, and the marginal of v."""

import re
import runpy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "riemannian_hmc.py"))
D = torch.float64


def points(count: int = 4, coordinates: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(count, 1 + coordinates, generator=generator, dtype=D)
    return q, EXAMPLE["momenta"](q, generator)


def energy(q: np.ndarray, p: np.ndarray) -> float:
    """Compute the Hamiltonian from the funnel's Hessian by hand."""
    v, x = q[0], q[1:]
    H = np.diag(np.r_[1 / 9 + x @ x * np.exp(-v) / 2, np.full(len(x), np.exp(-v))])
    H[0, 1:] = H[1:, 0] = -x * np.exp(-v)
    values, vectors = np.linalg.eigh(H)
    G = vectors @ np.diag(values / np.tanh(1e6 * values)) @ vectors.T
    potential = v**2 / 18 + len(x) * v / 2 + x @ x * np.exp(-v) / 2
    return potential + p @ np.linalg.solve(G, p) / 2 + np.linalg.slogdet(G)[1] / 2


def test_energy_and_its_derivatives_match_closed_forms() -> None:
    q, p = points()
    expected = [energy(*each) for each in zip(q.numpy(), p.numpy(), strict=True)]
    np.testing.assert_allclose(EXAMPLE["hamiltonian"](q, p).numpy(), expected, rtol=1e-12)
    forces, velocities = EXAMPLE["forces"](q, p)[0].numpy(), EXAMPLE["velocities"](q, p)[0].numpy()
    at, momentum, step = q[0].numpy(), p[0].numpy(), 1e-5
    for k, unit in enumerate(step * np.eye(4)):
        slope = (energy(at + unit, momentum) - energy(at - unit, momentum)) / (2 * step)
        assert forces[k] == pytest.approx(slope, rel=1e-6, abs=1e-6)
        slope = (energy(at, momentum + unit) - energy(at, momentum - unit)) / (2 * step)
        assert velocities[k] == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_softabs_is_smooth_at_zero() -> None:
    z = np.array([0.0, 1e-3, 0.0999, 0.1001, -0.3, 2.0, 30.0, -800.0])
    expected = np.where(z == 0, 1.0, z / np.tanh(np.where(z == 0, 1.0, z)))
    found = EXAMPLE["softabs"](torch.from_numpy(z / 1e6))
    np.testing.assert_allclose(1e6 * found.numpy(), expected, rtol=1e-13)


@pytest.mark.slow
def test_leapfrog_is_reversible_and_of_second_order() -> None:
    q, p = points(3)
    end, turned = EXAMPLE["leapfrog"](q, p, 0.05, 6, tolerance=1e-11)
    assert ((end - q).abs().amax(1) > 0.1).all()
    back, momentum = EXAMPLE["leapfrog"](end, -turned, 0.05, 6, tolerance=1e-11)
    torch.testing.assert_close(back, q, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(momentum, -p, rtol=1e-9, atol=1e-9)
    errors = []
    for size in (0.02, 0.01):
        ends = EXAMPLE["leapfrog"](q, p, size, round(0.2 / size), tolerance=1e-11)
        errors.append((EXAMPLE["hamiltonian"](*ends) - EXAMPLE["hamiltonian"](q, p)).abs())
    torch.testing.assert_close(errors[0] / errors[1], torch.full((3,), 4.0, dtype=D), rtol=0.1, atol=0)


@pytest.mark.slow
def test_leapfrog_preserves_volume() -> None:
    q, p = points(1, 2)
    z, step = torch.cat([q, p], 1), 1e-5
    shifts = step * torch.eye(6, dtype=D)
    ends = torch.cat(EXAMPLE["leapfrog"](*torch.cat([z + shifts, z - shifts]).split(3, 1), 0.3, 2, tolerance=1e-11), 1)
    jacobian = (ends[:6] - ends[6:]) / (2 * step)
    assert (jacobian - torch.eye(6, dtype=D)).norm() > 0.5
    assert torch.linalg.det(jacobian).item() == pytest.approx(1, abs=1e-6)


def test_chains_without_solutions_are_rejected() -> None:
    q, p = points(2)
    end, _ = EXAMPLE["leapfrog"](q, torch.stack([p[0], 1e4 * p[1]]), 0.2, 2)
    assert end[0].isfinite().all()
    assert end[1].isnan().all()


@pytest.mark.slow
def test_marginal_distribution_matches_the_exact_one() -> None:
    (mean, square), (off, away) = EXAMPLE["sample"](40, 8, 4, 0.25, 8).moments()
    assert abs(mean) < 4 * off < 2.5
    assert abs(square - 9) < 4 * away < 9
    # A constant metric does not reach the neck, which has the probability 0.023.
    plain = EXAMPLE["sample_plainly"](40, 60, 20, 0.1, 50)
    assert (plain.v < -6).double().mean() < 0.003


@pytest.mark.slow
def test_quick_run_prints_and_saves_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figures" / "riemannian_hmc.png"
    EXAMPLE["main"](["--quick", "--output", str(figure)])
    text = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    errors = [float(each) for each in re.findall(r"energy error (\S+)", text)]
    assert all(2.5 < coarse / fine < 6 for coarse, fine in pairwise(errors))
    assert "constant metric" in text
