"""Memory layout of inputs does not matter: elements may share memory, and so may leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hodiff

A = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

INPUTS: dict[str, Tensor] = {
    "unfold": A.unfold(0, 2, 1),
    "as_strided": A.as_strided((2, 3), (1, 1)),
    "as_strided, longer steps first": A.as_strided((2, 2, 2), (2, 1, 1)),
    "expand": A[:3].expand(2, 3),
    "expand of an unfold": A.unfold(0, 2, 1)[:, None].expand(4, 2, 2),
    "transposed": A[:4].reshape(2, 2).T,
    "steps of two": A[::2],
    "negatives in memory": torch.complex(A, -A).conj().imag.view(1, 5),
    "no element": A.as_strided((0, 3), (1, 1)),
}
ROUTES = ("auto", *hodiff.ROUTES)


@pytest.fixture(params=INPUTS.values(), ids=INPUTS.keys())
def x(request: pytest.FixtureRequest) -> Tensor:
    tensor: Tensor = request.param
    return tensor


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def powers(x: Tensor) -> Tensor:
    return torch.cat([x.flatten() ** 2, x.flatten() ** 3, x.flatten()])


def direction(x: Tensor) -> Tensor:
    return torch.arange(1.0, x.numel() + 1, dtype=torch.float64).view(x.shape)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("route", ROUTES)
def test_second_derivatives_match_for_any_layout(x: Tensor, route: str) -> None:
    v = direction(x)
    matrix = (6 * x).flatten().diag()
    torch.testing.assert_close(hodiff.hvp(cubes, x, v, route=route), 6 * x * v)
    torch.testing.assert_close(hodiff.hvp(cubes, v, x, route=route), 6 * x * v)
    torch.testing.assert_close(hodiff.hessian_diagonal(cubes, route=route)(x), 6 * x)
    torch.testing.assert_close(hodiff.hessian_matrix(cubes, x, route=route), matrix)
    torch.testing.assert_close(hodiff.hessian(cubes, route=route)(x), matrix.view(2 * x.shape))
    torch.testing.assert_close(hodiff.HessianOperator(cubes, x, route=route).to_dense(), matrix)


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_jacobian_matches_for_any_layout(x: Tensor, mode: str) -> None:
    wide = x.flatten()
    expected = torch.cat([(2 * wide).diag(), (3 * wide**2).diag(), torch.ones_like(wide).diag()])
    torch.testing.assert_close(hodiff.jacobian(powers, mode=mode)(x), expected.view(3 * x.numel(), *x.shape))


def test_directional_derivatives_match_for_any_layout(x: Tensor) -> None:
    v = direction(x)
    expected = ((x**3).sum(), (3 * x**2 * v).sum(), (6 * x * v**2).sum(), (6 * v**3).sum())
    torch.testing.assert_close(hodiff.directional_derivatives(cubes, x, v, order=3), expected)
    swapped = ((v**3).sum(), (3 * v**2 * x).sum(), (6 * v * x**2).sum(), (6 * x**3).sum())
    torch.testing.assert_close(hodiff.directional_derivatives(cubes, v, x, order=3), swapped)


@pytest.mark.parametrize("route", ROUTES)
def test_views_with_a_negative_bit_match(route: str) -> None:
    z = torch.complex(A[:3], A[2:])
    negative = z.conj().imag
    assert negative.is_neg()

    def f(x):
        return x[0] * x[1] ** 2 * x[2].exp()

    v = direction(negative)
    matrix = torch.autograd.functional.hessian(f, negative.clone().contiguous())
    for x in (negative, negative.clone()):
        torch.testing.assert_close(hodiff.hvp(f, x, v, route=route), matrix @ v)
        torch.testing.assert_close(hodiff.hvp(f, x, negative, route=route), matrix @ negative)
        torch.testing.assert_close(hodiff.hessian(f, route=route)(x), matrix)
    # Complex tensors, with either sign or conjugated.

    def g(z):
        return (z[0] * z[1].conj() * z[2]).abs() ** 2

    for seen in (torch._neg_view(z), z.conj(), torch._neg_view(z).conj()):
        plain = seen.clone().resolve_conj().resolve_neg()
        torch.testing.assert_close(hodiff.hvp(g, seen, seen, route=route), hodiff.hvp(g, plain, plain))


def product_of_three(p: dict[str, Tensor]) -> Tensor:
    return (p["a"] * p["b"] ** 2).sum() * p["c"].sum()


@pytest.mark.parametrize("route", ROUTES)
def test_leaves_may_share_memory(route: str) -> None:
    tied = {"a": A[:3], "b": A[2:], "c": A}
    apart = {name: leaf.clone() for name, leaf in tied.items()}
    a, b, ones = A[:3], A[2:], torch.ones(5, dtype=torch.float64)
    blocks = [
        [torch.zeros(3, 3, dtype=torch.float64), (2 * b).diag() * A.sum(), torch.outer(b**2, ones)],
        [(2 * b).diag() * A.sum(), (2 * a).diag() * A.sum(), torch.outer(2 * a * b, ones)],
        [torch.outer(ones, b**2), torch.outer(ones, 2 * a * b), torch.zeros(5, 5, dtype=torch.float64)],
    ]
    expected = torch.cat([torch.cat(row, 1) for row in blocks])
    torch.testing.assert_close(hodiff.hessian_matrix(product_of_three, tied, route=route), expected)
    torch.testing.assert_close(hodiff.HessianOperator(product_of_three, tied, route=route).to_dense(), expected)
    # Tangents share memory with each other, and with the point.
    flat = expected @ torch.cat([A[:3], A[2:], A])
    found = hodiff.hvp(product_of_three, tied, tied, route=route)
    torch.testing.assert_close(torch.cat(list(found.values())), flat)
    found = hodiff.hvp(product_of_three, apart, tied, route=route)
    torch.testing.assert_close(torch.cat(list(found.values())), flat)


SPARSE = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")
@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_sparse_tensors_are_rejected(layout: torch.layout) -> None:
    dense = torch.eye(3, dtype=torch.float64)
    sparse = dense.to_sparse(layout=layout)
    refusals: list[Callable[[], object]] = [
        lambda: hodiff.hvp(cubes, sparse, sparse),
        lambda: hodiff.hessian(cubes)(sparse),
        lambda: hodiff.jacobian(cubes)(sparse),
        lambda: hodiff.directional_derivatives(cubes, sparse, sparse, order=1),
        lambda: hodiff.HessianOperator(cubes, sparse),
    ]
    for refused in refusals:
        with pytest.raises(hodiff.errors.InputError, match="pass its values, and make the sparse or nested tensor"):
            refused()
    with pytest.raises(hodiff.errors.InputError, match=r"expected \(3, 3\) float64, got \(3, 3\) float64 sparse"):
        hodiff.hvp(cubes, dense, sparse)


def test_jagged_tensors_are_accepted_by_products_only() -> None:
    """Torch differentiates jagged tensors twice in reverse mode only; they have no matrix of second derivatives."""
    offsets, values, v = torch.tensor([0, 1, 3]), torch.randn(3, 2), torch.randn(3, 2)
    x, along = (torch.nested.nested_tensor_from_jagged(each, offsets) for each in (values, v))
    f = lambda x: (x * x * x).values().sum()  # noqa: E731
    torch.testing.assert_close(hodiff.hvp(f, x, along).values(), 6 * values * v)
    value, gradient, product = hodiff.value_grad_hvp(f, x, along)
    torch.testing.assert_close(value, (values**3).sum())
    torch.testing.assert_close(gradient.values(), 3 * values**2)
    torch.testing.assert_close(product.values(), 6 * values * v)
    for refused in (
        lambda: hodiff.hessian_matrix(f, x),
        lambda: hodiff.hessian_diagonal(f)(x),
        lambda: hodiff.jacobian(f)(x),
        lambda: hodiff.HessianOperator(f, x),
        lambda: hodiff.laplacian(f)(x),
        lambda: hodiff.sparse.hessian(f)(x),
        lambda: hodiff.optimize.minimize(f, x),
        lambda: hodiff.check(f, x),
    ):
        with pytest.raises(hodiff.errors.InputError, match=r"got \(2, j\d+, 2\) float32 jagged[;.] .* its values"):
            refused()
