"""Grouped matrix products, by every route, against products with a mask of the groups."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw

import hodiff

D = torch.float64
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
GROUP = torch.tensor([0, 0, 2, 2, 2])


def masks(dtype=D):
    return F.one_hot(GROUP, 3).to(dtype)


# The operands, and the product as a masked sum over all groups
CASES = {
    "rows": (draw(5, 4), draw(3, 4, 2, seed=1), lambda a, b: torch.einsum("mg,mk,gkn->mn", masks(a.dtype), a, b)),
    "columns": (draw(3, 2, 4), draw(4, 5, seed=1), lambda a, b: torch.einsum("ng,gmk,kn->mn", masks(a.dtype), a, b)),
    "inside": (draw(4, 5), draw(5, 2, seed=1), lambda a, b: torch.einsum("kg,mk,kn->gmn", masks(a.dtype), a, b)),
    "batches": (draw(3, 2, 4), draw(3, 4, 2, seed=1), lambda a, b: torch.einsum("gmk,gkn->gmn", a, b)),
}


def grouped(a, b, **options):
    ends = None if a.dim() == b.dim() == 3 else ENDS
    return F.grouped_mm(a, b, offs=ends, **options)


def curved(function):
    """Return a scalar function of both operands that is nonlinear in each operand."""

    def f(x):
        a, b = x
        return (function(a.sin(), b.cos()) ** 2).sum()

    return f


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("name", CASES)
def test_hvp_matches_masked_products(name, route):
    a, b, reference = CASES[name]
    v = (draw(*a.shape, seed=2), draw(*b.shape, seed=3))
    got = hodiff.hvp(curved(grouped), (a, b), v, route=route)
    expected = hodiff.hvp(curved(reference), (a, b), v)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_third_derivatives_match_differences():
    a, b, _ = CASES["rows"]
    hodiff.assert_differentiable(lambda a, b: grouped(a.sin(), b), (a, b), order=3, scipy=False)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_float32_matches_float64(route):
    a, b = draw(8, 4).float(), draw(3, 4, 4, seed=1).float()
    ends = torch.tensor([4, 4, 8], dtype=torch.int32)

    def f(x):
        return (F.grouped_mm(x[0].sin(), x[1], offs=ends) ** 2).sum()

    v = (draw(8, 4, seed=2).float(), draw(3, 4, 4, seed=3).float())
    double = tuple(x.double() for x in (a, b)), tuple(x.double() for x in v)
    torch.testing.assert_close(
        hodiff.hvp(f, (a, b), v, route=route), tuple(x.float() for x in hodiff.hvp(f, *double)), rtol=2e-4, atol=2e-4
    )


def test_rows_after_the_last_group_are_zero():
    a, b, _ = CASES["rows"]
    with hodiff.corrected():
        value = F.grouped_mm(a, b, offs=torch.tensor([2, 2, 4], dtype=torch.int32))
    assert not value[4:].any()
    torch.testing.assert_close(value[2:4], a[2:4] @ b[2])


def test_torch_alone_is_wrong():
    """The tests above would prove nothing if torch alone were right."""
    with pytest.raises(RuntimeError, match="Float32"):
        grouped(*CASES["rows"][:2])
    a, b = draw(8, 4).float(), draw(3, 4, 4).float()
    ends = torch.tensor([4, 4, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(lambda a: F.grouped_mm(a, b, offs=ends), (a,), (a,))
