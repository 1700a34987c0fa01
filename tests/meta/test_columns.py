"""Tests of lists of tensors as columns of a matrix, and of linear systems of many tasks, against torch.linalg."""

import torch
from torch import Tensor

from hodiff.meta.inverse_products import Columns, solve_tasks

GENERATOR = torch.Generator().manual_seed(0)


def leaves(tasks: int) -> list[Tensor]:
    shapes = ((tasks, 2, 2), (tasks,), (tasks, 1))
    return [torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for shape in shapes]


def test_columns_round_trip() -> None:
    given = leaves(3)
    given[1] = given[1].float()
    layout = Columns(given, 3)
    columns = layout.join(given)
    assert columns.shape == (6, 3)
    torch.testing.assert_close(columns[:4, 1], given[0][1].flatten())
    torch.testing.assert_close(layout.split(columns), given)
    one = [torch.randn(2, 3), torch.randn(())]
    torch.testing.assert_close(Columns(one, 1).split(Columns(one, 1).join(one)), one)


def test_tasks_are_solved_by_their_own_matrices() -> None:
    R = torch.randn(3, 6, 6, generator=GENERATOR, dtype=torch.float64)
    matrices = R @ R.mT + torch.eye(6, dtype=torch.float64)
    matrices[2] = torch.eye(6)
    b = leaves(3)
    layout = Columns(b, 3)

    def product(v: list[Tensor]) -> list[Tensor]:
        return layout.split(torch.einsum("kij,jk->ik", matrices, layout.join(v)))

    solved, residual = solve_tasks(product, b, steps=50, tolerance=1e-12)
    expected = torch.linalg.solve(matrices, layout.join(b).T[..., None])[..., 0].T
    torch.testing.assert_close(layout.join(solved), expected)
    assert bool((residual <= 1e-12).all())
    few, left = solve_tasks(product, b, steps=1, tolerance=1e-12)
    torch.testing.assert_close(
        left, (layout.join(b) - layout.join(product(few))).norm(dim=0) / layout.join(b).norm(dim=0)
    )
