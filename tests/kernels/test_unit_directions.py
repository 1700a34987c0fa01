"""Tests of products with unit directions, which select columns, against ordinary products."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hodiff
from hodiff.kernels import narrow
from hodiff.kernels.narrow import NARROW, batched_product
from hodiff.kernels.unit_directions import UnitRows, picked_columns

sizes = st.integers(1, NARROW + 2)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def directions(p: int, n: int, first: int, stop: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.eye(p * n, dtype=dtype)[first:stop].view(stop - first, p, n)


@given(m=sizes, p=sizes, n=sizes, data=st.data(), transposed=st.booleans(), dtype=dtypes)
def test_picked_products_match_ordinary_products(m, p, n, data, transposed, dtype):
    first = data.draw(st.integers(0, p * n - 1))
    stop = data.draw(st.integers(first + 1, p * n))
    rows = directions(p, n, first, stop, dtype)
    b = rows.mT if transposed else rows
    a = torch.randn(m, b.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype).expand(stop - first, -1, -1)
    found = batched_product(a, b, UnitRows(rows, first))
    assert torch.equal(found, torch.bmm(a, b))
    # The following kernels are fast with these layouts.
    if stop - first > 1:
        assert found.mT.is_contiguous() if b.shape[2] < NARROW else found.is_contiguous()


def test_only_views_of_all_rows_are_recognized():
    rows = directions(3, 4, 0, 12)
    unit = UnitRows(rows, 0)
    others = [
        rows[:6],
        rows[6:],
        rows.view(6, 6, 4),
        rows[:, :2],
        rows.view(12, 2, 6)[:, :1],
        rows.clone(),
        rows.flip(0),
    ]
    assert [unit.places(other) for other in others] == [None] * len(others)
    # Other shapes of the same rows are accepted.
    row, column = unit.places(rows.view(12, 2, 6))
    assert (rows.view(12, 2, 6)[range(12), row, column] == 1).all()


def test_modified_rows_are_multiplied():
    rows = directions(2, 3, 0, 6)
    unit = UnitRows(rows, 0)
    rows.mul_(2)
    a = torch.ones(4, 2, dtype=torch.float64).expand(6, 4, 2)
    assert unit.places(rows) is None
    assert torch.equal(batched_product(a, rows, unit), torch.bmm(a, rows))


@pytest.mark.parametrize("width", [5, NARROW + 1])
@pytest.mark.parametrize("chunk_size", ["auto", 40])
def test_hessian_uses_picked_columns(width, chunk_size, monkeypatch):
    picked = []

    def spied(a, *args, **options):
        picked.append(a.shape)
        return picked_columns(a, *args, **options)

    monkeypatch.setattr(narrow, "picked_columns", spied)
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((30, 16), (width, 16)))

    def f(weight):
        return (inputs @ weight.T).tanh().square().sum()

    found = hodiff.hessian_matrix(f, weight, chunk_size=chunk_size)
    t = (inputs @ weight.T).tanh()
    curvature = 2 * (1 - t**2) * (1 - 3 * t**2)
    expected = torch.einsum("sc,si,sj->cij", curvature, inputs, inputs)
    torch.testing.assert_close(found, torch.block_diag(*expected), rtol=1e-10, atol=1e-12)
    assert picked
    assert set(picked) == {(30, 16)}
