"""Vibrations of clusters: two atoms in closed form, an energy from the literature, zero modes, the whole example."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "vibrational_modes.py"))


def test_energy_of_two_atoms_matches_closed_form() -> None:
    """The energy is 4 (d^-12 - d^-6) (1 - (d / 1.7)^2)^3, and zero beyond the cutoff."""
    for d in (0.95, 1.3, 1.699, 1.9):
        x = torch.tensor([0, 0, 0, 0.6 * d, 0, -0.8 * d], dtype=torch.float64)
        gate = max(1 - (d / 1.7) ** 2, 0) ** 3
        found = EXAMPLE["energy"](x, torch.tensor([0]), torch.tensor([1])).item()
        assert found == pytest.approx(4 * (d**-12 - d**-6) * gate, rel=1e-12, abs=1e-15)


def test_two_atoms_vibrate_along_their_bond() -> None:
    """The Hessian has five zero eigenvalues, and 2 φ''(d) with φ'' by differences."""
    x, force = EXAMPLE["relaxed"](torch.tensor([0, 0, 0, 1.1, 0.1, 0.2], dtype=torch.float64))
    assert force < 1e-9
    pairs = EXAMPLE["pairs_within"](x, 1.7)
    H = hodiff.sparse.hessian(EXAMPLE["energy"], format="scipy")(x, *pairs).toarray()
    d = (x[3:] - x[:3]).norm().item()

    def phi(d: float) -> float:
        return float(EXAMPLE["energy"](torch.tensor([0, 0, 0, d, 0, 0], dtype=torch.float64), *pairs))

    h = 1e-4
    curvature = (phi(d + h) - 2 * phi(d) + phi(d - h)) / h**2
    values = np.linalg.eigvalsh(H)
    assert abs(values[:5]).max() < 1e-8
    assert values[5] == pytest.approx(2 * curvature, rel=1e-5)


def test_cluster_is_a_close_packed_crystal() -> None:
    x = EXAMPLE["cluster"](79)
    one, other = EXAMPLE["pairs_within"](x, 1.2)
    places = x.view(-1, 3)
    torch.testing.assert_close(
        (places[one] - places[other]).norm(dim=1), torch.full((len(one),), 2 ** (1 / 6)).double()
    )
    assert np.bincount(torch.cat([one, other]).numpy()).max() == 12


def test_zero_modes_are_translations_and_rotations() -> None:
    x, _ = EXAMPLE["relaxed"](EXAMPLE["cluster"](20))
    H = hodiff.sparse.hessian(EXAMPLE["energy"], format="scipy")(x, *EXAMPLE["pairs_within"](x, 1.7))
    values, vectors = EXAMPLE["low_modes"](H, 10)
    every = np.linalg.eigvalsh(H.toarray())
    np.testing.assert_allclose(values, every[:10], atol=1e-8)
    assert abs(values[:6]).max() < 1e-8 < 0.1 < values[6]
    rigid = EXAMPLE["rigid_motions"](x)
    np.testing.assert_allclose(rigid.T @ rigid, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(rigid @ (rigid.T @ vectors[:, :6]), vectors[:, :6], atol=1e-7)
    assert EXAMPLE["compare"](13) < 1e-14


@pytest.mark.slow
def test_quick_run_prints_and_saves_results(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick")
    products = {name: int(count) for name, count in re.findall(r"^(star|acyclic|dense) +(\d+) ", text, re.MULTILINE)}
    assert products["acyclic"] <= products["star"] < products["dense"] == 180
    zero, apart = re.findall(r"six zero modes +(\S+) at most, (\S+) from", text)[0]
    assert float(zero) < 1e-8
    assert float(apart) < 1e-6
