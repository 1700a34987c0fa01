"""Sparse Hessians against dense ones, pairs of periodic crystals against all images, and ranges that are too short."""

import numpy as np
import pytest
import torch
from atoms.crystals import SHIFTS, crystal_energy
from torch import Tensor

import hodiff
from hodiff.atoms.sparse_hessian import pairs_within
from hodiff.operators import HessianOperator

CELL = torch.tensor([[6.2, 0.0, 0.0], [0.9, 5.8, 0.0], [-0.4, 1.1, 6.0]], dtype=torch.float64)
SITES = torch.cartesian_prod(*[torch.arange(5.0)] * 3).double() / 5
X = SITES @ CELL + 0.1 * torch.randn(125, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
RANGE = 2.0
IMAGES = SHIFTS[SHIFTS.abs().amax(1) <= 1] @ CELL
DISTANCES = (X[:, None, None] - X[None, :, None] + IMAGES).norm(dim=-1)
ONE, OTHER, IMAGE = ((DISTANCES < RANGE) & (DISTANCES > 0)).nonzero(as_tuple=True)


def crystal(x: Tensor) -> Tensor:
    """The potential of `crystal_energy`, from a list of neighbours."""
    squared = (x[ONE] - x[OTHER] + IMAGES[IMAGE]).square().sum(-1)
    cube = squared**-3
    return (2 * (cube**2 - cube) * (1 - squared / 4).clamp_min(0) ** 4).sum()


@pytest.fixture(scope="module")
def dense() -> Tensor:
    return hodiff.atoms.hessian(crystal, X).reshape(375, 375)


@pytest.mark.parametrize("method", ["star", "acyclic"])
def test_crystal(dense: Tensor, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    multiply = HessianOperator.multiply

    def counted(self: HessianOperator, block: Tensor) -> Tensor:
        widths.append(block.shape[1])
        return multiply(self, block)

    monkeypatch.setattr(HessianOperator, "multiply", counted)
    H = hodiff.atoms.sparse_hessian(crystal, X, RANGE, CELL, method=method)
    assert H.layout == torch.sparse_csr
    assert H.values().numel() < 0.4 * 375**2
    torch.testing.assert_close(H.to_dense(), dense, rtol=1e-11, atol=1e-11 * dense.abs().max().item())
    # The products of the colors, one with a random vector, and two groups to measure memory.
    assert sum(widths) < (0.6 if method == "star" else 0.4) * 375


def test_free_atoms_and_formats(dense: Tensor) -> None:
    free = [100, 3, 4, 77]
    expected = dense.view(125, 3, 125, 3)[free][:, :, free].reshape(12, 12)
    found = hodiff.atoms.sparse_hessian(crystal, X, RANGE, CELL, free=free, format="scipy")
    np.testing.assert_allclose(found.toarray(), expected.numpy(), atol=1e-11 * dense.abs().max().item())
    coo = hodiff.atoms.sparse_hessian(crystal, X, RANGE, CELL, free=free, format="coo", chunk_size=1)
    torch.testing.assert_close(coo.to_dense(), expected, rtol=1e-11, atol=1e-11 * dense.abs().max().item())


def test_many_body_forces_have_twice_the_range() -> None:
    """A force through an atom between two others, as in models of atomic energies."""
    x = torch.arange(40.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    x = x + 0.05 * torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def energy(x: Tensor) -> Tensor:
        density = torch.zeros(40, dtype=x.dtype)
        bonds = torch.exp(-(x[1:] - x[:-1]).square().sum(1))
        return (density.index_add(0, torch.arange(39), bonds).index_add(0, torch.arange(1, 40), bonds) ** 1.5).sum()

    expected = hodiff.atoms.hessian(energy, x).reshape(120, 120)
    found = hodiff.atoms.sparse_hessian(energy, x, 2.6)
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-12, atol=1e-13)
    with pytest.raises(hodiff.InputError, match="interaction_range: expected at least"):
        hodiff.atoms.sparse_hessian(energy, x, 1.3)


@pytest.mark.parametrize(("distance", "cell"), [(1.5, CELL), (2.0, None), (RANGE, CELL[[0, 2, 1]] * 1.1)])
def test_ranges_that_are_too_short_are_refused(distance: float, cell: Tensor | None) -> None:
    with pytest.raises(hodiff.InputError, match="interaction_range: expected at least the largest distance"):
        hodiff.atoms.sparse_hessian(crystal, X, distance, cell)


def test_missing_interactions_name_a_free_atom() -> None:
    x = torch.tensor([[0.0, 0, 0], [1, 0, 0], [9, 0, 0]], dtype=torch.float64)
    with pytest.raises(hodiff.InputError, match="such as on atom 1\\."):
        hodiff.atoms.sparse_hessian(lambda x: x[1].prod() + (x[1] * x[2]).sum() ** 2, x, 2.0, free=[1, 2])


@pytest.mark.parametrize("periodic", [(1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 0, 0)])
def test_pairs_of_all_images(periodic: tuple[int, ...]) -> None:
    """Also where the range exceeds the cell, and atoms lie outside of it."""
    lattice = CELL.numpy() * np.array(periodic)[:, None] / 2
    x = 1.5 * np.random.default_rng(0).standard_normal((10, 3))
    steps = np.stack(np.meshgrid(*[np.arange(-6, 7) * each for each in periodic]), -1).reshape(-1, 3)
    images = np.unique(steps, axis=0) @ lattice
    apart = x[:, None, None] - x[None, :, None] + images
    for distance in (1.0, 3.7):
        expected = (np.linalg.norm(apart, axis=-1) <= distance).any(-1)
        assert (pairs_within(x, distance, lattice).toarray() == expected).all()


def test_one_system_of_crystal_energy() -> None:
    """A cell that is smaller than the range, in which all atoms are neighbours."""
    x, cell = torch.tensor([[0.0, 0, 0], [0.7, 0.8, 0.6]], dtype=torch.float64), 1.5 * torch.eye(3).double()
    found = hodiff.atoms.sparse_hessian(lambda x: crystal_energy(x, cell), x, RANGE, cell)
    expected = hodiff.atoms.hessian(lambda x: crystal_energy(x, cell), x).reshape(6, 6)
    torch.testing.assert_close(found.to_dense(), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"interaction_range": 0.0}, "interaction_range"), ({"interaction_range": float("inf")}, "interaction_range"),
     ({"cell": CELL[:2]}, "cell: expected lattice vectors"), ({"cell": CELL[[0, 0, 1]]}, "cell"),
     ({"method": "columns"}, "method"), ({"format": "dense"}, "format"), ({"chunk_size": 0}, "chunk_size"),
     ({"free": [200]}, "free")],
)  # fmt: skip
def test_wrong_arguments(options: dict, message: str) -> None:
    with pytest.raises(hodiff.InputError, match=rf"atoms\.sparse_hessian: {message}"):
        hodiff.atoms.sparse_hessian(crystal, X, **({"interaction_range": RANGE, "cell": CELL} | options))
