"""Elastic constants of crystals: closed forms of central forces and of a chain, and differences of relaxed stress."""

import numpy as np
import pytest
import torch
from atoms.crystals import SHIFTS, crystal_energy, face_centred
from scipy.optimize import minimize
from torch import Tensor

import hodiff

VOIGT = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]


def test_central_forces_under_stress() -> None:
    """The constants are Σ 4 φ''(s) d d d d / (2 V), as strain η changes the squared length s of a pair d by 2 d·η·d."""
    side = 1.4
    x, cell = face_centred(side)
    found = hodiff.atoms.elastic_constants(crystal_energy, x, cell)
    d = (SHIFTS @ cell).numpy()
    s = (d**2).sum(1)
    near = (s > 0) & (s < 4)
    d, s = d[near], s[near]
    # φ = 4 (s⁻⁶ - s⁻³) g⁴ with g = 1 - s/4.
    u, u1, u2 = s**-6 - s**-3, -6 * s**-7 + 3 * s**-4, 42 * s**-8 - 12 * s**-5
    g = 1 - s / 4
    second = 4 * (u2 * g**4 - 2 * u1 * g**3 + u * 0.75 * g**2)
    volume = side**3 / 4
    full = 2 / volume * np.einsum("p,pi,pj,pk,pl->ijkl", second, d, d, d, d)
    expected = np.array([[full[(*a, *b)] for b in VOIGT] for a in VOIGT])
    np.testing.assert_allclose(found.clamped.numpy(), expected, atol=1e-11 * abs(expected).max())
    # Every atom is a centre of symmetry, so nothing relaxes.
    assert found.relaxed is not None
    torch.testing.assert_close(found.relaxed, found.clamped)
    assert found.stress.diagonal().max() < -1
    C = found.clamped
    assert C[0, 1].item() == pytest.approx(C[3, 3].item())  # Cauchy's relation
    alone = hodiff.atoms.elastic_constants(crystal_energy, x, cell, relaxed=False)
    torch.testing.assert_close(alone.clamped, found.clamped)
    assert alone.relaxed is alone.hessian is alone.internal_strain is None


def test_chain_of_two_springs_relaxes() -> None:
    """Springs k and K in series along x, with stiff sides."""
    k, K, side = 2.0, 5.0, 0.7
    x = torch.tensor([[0.1, 0, 0], [0.6, 0, 0]], dtype=torch.float64)
    cell = torch.diag(torch.tensor([1.2, 1.0, 1.0], dtype=torch.float64))

    def energy(x: Tensor, cell: Tensor) -> Tensor:
        one, other = x[1] - x[0], x[0] + cell[0] - x[1]
        stretch = k * (one[0] - 0.5) ** 2 / 2 + K * (other[0] - 0.7) ** 2 / 2
        return stretch + side * (one[1:].square().sum() + other[1:].square().sum()) / 2

    found = hodiff.atoms.elastic_constants(energy, x, cell)
    assert found.clamped[0, 0].item() == pytest.approx((k * 0.5**2 + K * 0.7**2) / 1.2)
    assert found.relaxed is not None
    assert found.relaxed[0, 0].item() == pytest.approx(1.2**2 / (1 / k + 1 / K) / 1.2)
    assert found.internal_strain is not None
    assert found.internal_strain[1, 0, 0].item() == pytest.approx(k * 0.5 - K * 0.7)


def zincblende(x: Tensor, cell: Tensor) -> Tensor:
    """Quartic springs of the four bonds and between next neighbours; the cell's side at rest is 2."""
    shifts = SHIFTS.abs().amax(1) <= 1
    d = x[:, None, None] - x[None, :, None] + (SHIFTS[shifts] @ cell)[None, None]
    squared = d.square().sum(-1)
    bonds = (squared[0, 1] - 0.75)[squared[0, 1] < 1.3]
    nexts = torch.stack([(squared[i, i] - 2)[(squared[i, i] > 0.1) & (squared[i, i] < 2.9)] for i in range(2)])
    return bonds.square().sum() + 0.1 * nexts.square().sum()


def test_relaxed_constants_are_curvatures_of_the_relaxed_energy() -> None:
    x, cell = face_centred(2.0)
    x = torch.cat([x, x + 0.5])

    def relaxed_energy(cell: Tensor, x: Tensor) -> float:
        def f(flat: np.ndarray) -> tuple[float, np.ndarray]:
            place = torch.from_numpy(flat).view(-1, 3).requires_grad_()
            value = zincblende(place, cell)
            return value.item(), torch.autograd.grad(value, place)[0].numpy().reshape(-1)

        options = {"gtol": 1e-10}
        return minimize(f, x.reshape(-1).numpy(), jac=True, method="BFGS", options=options).fun

    found = hodiff.atoms.elastic_constants(zincblende, x, cell)
    assert found.relaxed is not None
    volume, step = torch.linalg.det(cell).item(), 1e-3
    curvatures = []
    for i, j in VOIGT[2:4]:
        energies = []
        for sign in (1, 0, -1):
            eta = np.zeros((3, 3))
            eta[i, j] += sign * step / 2
            eta[j, i] += sign * step / 2
            # The root of I + 2 η, exactly. In Voigt's notation, a shear is twice the component.
            values, vectors = np.linalg.eigh(np.eye(3) + 2 * eta)
            stretch = torch.from_numpy(vectors * np.sqrt(values) @ vectors.T)
            energies.append(relaxed_energy(cell @ stretch, x @ stretch))
        curvatures.append((energies[0] - 2 * energies[1] + energies[2]) / step**2 / volume)
    assert found.relaxed.diagonal()[2:4].tolist() == pytest.approx(curvatures, rel=1e-4)
    assert found.clamped[3, 3] > 1.2 * found.relaxed[3, 3]


def test_positions_that_are_no_minimum() -> None:
    x, cell = face_centred(1.85)
    apart = torch.cat([x, x + torch.tensor([[0.45, 0.5, 0.2]], dtype=torch.float64)])
    with (
        pytest.warns(hodiff.HodiffWarning, match="positions at a minimum")
        if _stable(apart, cell)
        else pytest.raises(hodiff.InputError, match="positions: expected a minimum")
    ):
        hodiff.atoms.elastic_constants(crystal_energy, apart, cell)


def _stable(x: Tensor, cell: Tensor) -> bool:
    H = hodiff.atoms.hessian(lambda x: crystal_energy(x, cell), x).reshape(6, 6)
    return bool(torch.linalg.eigvalsh(H)[0] > -1e-9)
