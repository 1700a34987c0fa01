"""Estimates have no derivatives: inside a transform, which would treat them as constants, they raise."""

import pytest
import torch
from estimators.matrices import decaying, symmetric
from estimators.test_view import EACH, numbers

from hodiff import InputError
from hodiff.estimators import eigsh, sharpness, solve
from hodiff.operators import MatrixOperator

MATRIX = symmetric(decaying(40))
SIZE = torch.tensor(1.5, dtype=torch.float64)


class OfTheUsers:
    def __init__(self, matrix):
        self.matrix, self.shape, self.dtype, self.device = matrix, matrix.shape, matrix.dtype, matrix.device

    @property
    def T(self):  # noqa: N802
        return OfTheUsers(self.matrix.T)

    def __matmul__(self, block):
        return self.matrix @ block


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("wrap", [lambda matrix: matrix, OfTheUsers, MatrixOperator])
def test_differentiated_matrices_are_rejected(name, wrap):
    def f(size):
        return numbers(EACH[name](wrap(size * MATRIX))).sum()

    with pytest.raises(InputError, match="estimates have no derivative"):
        torch.func.grad(f)(SIZE)
    with pytest.raises(InputError, match="estimates have no derivative"):
        torch.func.jvp(f, (SIZE,), (SIZE,))
    with pytest.raises(InputError, match="estimates have no derivative"):
        torch.func.vmap(f, randomness="same")(torch.stack([SIZE, SIZE]))


@pytest.mark.parametrize(
    "f",
    [
        lambda b: solve(MATRIX, b, damping=0.1).value,
        lambda b: solve(MATRIX, torch.ones_like(MATRIX[0]), x0=b, damping=0.1).value,
        lambda b: solve(MATRIX, torch.ones_like(MATRIX[0]), preconditioner=b, damping=0.1).value,
        lambda b: eigsh(MATRIX, 1, start=b).eigenvalues,
        lambda b: sharpness(MATRIX, start=b).vector,
    ],
)
def test_differentiated_vectors_are_rejected(f):
    b = torch.linspace(1, 2, 40, dtype=torch.float64)
    with pytest.raises(InputError, match="estimates have no derivative"):
        torch.func.jacrev(f)(b)
    with pytest.raises(InputError, match="estimates have no derivative"):
        torch.func.jvp(f, (b,), (b,))


@pytest.mark.parametrize("name", EACH)
def test_constant_matrices_are_accepted_inside_transforms(name):
    expected = numbers(EACH[name](MATRIX)).sum().item()

    def f(size):
        found = numbers(EACH[name](MATRIX)).sum()
        assert found.item() == pytest.approx(expected)
        return size**2

    assert torch.func.grad(f)(SIZE) == 2 * SIZE
