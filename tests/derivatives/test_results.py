"""Results are ordinary tensors: they own their memory, and can be changed in place, saved and converted to NumPy."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import hodiff

D = torch.float64
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
V = torch.tensor([1.0, 2.0, -1.0], dtype=D)
C = torch.tensor([1.0, -1.0, 2.0], dtype=D)
GIVEN = {"a": X, "b": C}
DIRECTION = {"a": V, "b": torch.ones(3, dtype=D)}
ROUTES = ["auto", *hodiff.ROUTES]

# Autograd's gradients of these functions are zeros without memory, or expanded, conjugated, sliced or shared.
SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "kinks": lambda x: x.abs().sum(),
    "linear": lambda x: (x * C).sum(),
    "square of a sum": lambda x: x.sum() ** 2,
    "dot": lambda x: torch.dot(x, x),
    "conjugated": lambda x: torch.fft.rfft(x).conj().abs().pow(2).sum(),
    "imaginary": lambda x: (torch.complex(x, x**2).conj().imag ** 2).sum(),
    "first": lambda x: x[0] ** 2,
}
OF_TREES: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "of a sum": lambda p: ((p["a"] + p["b"]) ** 3).sum(),
    "bilinear": lambda p: (p["a"] * p["b"]).sum(),
    "one ignored": lambda p: (p["a"] ** 3).sum(),
    "kinks": lambda p: p["a"].sum() * p["b"].abs().sum(),
}
VECTORS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x.view(3, 1),
    "twice": lambda x: (x, x),
    "expanded": lambda x: x.sum().expand(4),
    "constant": lambda x: {"a": x * C, "b": C},
    "kinks": lambda x: x.abs(),
    "imaginary": lambda x: torch.complex(x, x).conj().imag,
}
# torch lacks forward rules or batching rules for these.
REFUSED = {"imaginary"}


def overlap(a: Tensor, b: Tensor) -> bool:
    (first, beyond), (start, stop) = map(address_range, (a, b))
    return first < stop and start < beyond


def address_range(tensor: Tensor) -> tuple[int, int]:
    """Range of addresses that a tensor occupies."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def assert_ordinary(compute: Callable[[], Any]) -> None:
    """Check that a change of one result changes no other result and no input."""
    result = compute()
    tensors = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
    given = (X, V, C, *DIRECTION.values())
    before = [each.clone() for each in (*tensors, *given)]
    assert tensors
    for i, each in enumerate(tensors):
        assert type(each) is Tensor
        assert each.layout == torch.strided
        assert not each.requires_grad
        torch.save(each, io.BytesIO())
        assert each.numpy().shape == each.shape
        assert not any(overlap(each, other) for other in (*tensors[:i], *given))
        each.add_(1)
    for each, old in zip(tensors, before, strict=False):
        torch.testing.assert_close(each, old + 1)
    for each, old in zip(given, before[len(tensors) :], strict=True):
        assert torch.equal(each, old)


def unless_refused(name: str, compute: Callable[[], Any]) -> None:
    try:
        compute()
    except hodiff.errors.RouteError:
        assert name in REFUSED
        return
    assert_ordinary(compute)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", SCALARS)
def test_results_for_a_tensor_are_ordinary_tensors(name: str, route: str) -> None:
    f = SCALARS[name]
    unless_refused(name, lambda: hodiff.hvp(f, X, V, route=route))
    unless_refused(name, lambda: hodiff.hessian(f, route=route)(X))
    unless_refused(name, lambda: hodiff.hessian_matrix(f, X, route=route))
    unless_refused(name, lambda: hodiff.hessian_diagonal(f, route=route)(X))
    unless_refused(name, lambda: hodiff.HessianOperator(f, X, route=route) @ V)
    unless_refused(name, lambda: hodiff.HessianOperator(f, X, route=route) @ torch.stack([V, V], 1))
    unless_refused(name, lambda: hodiff.HessianOperator(f, X, route=route).to_dense())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", OF_TREES)
def test_results_for_a_pytree_are_ordinary_tensors(name: str, route: str) -> None:
    f = OF_TREES[name]
    assert_ordinary(lambda: hodiff.hvp(f, GIVEN, DIRECTION, route=route))
    assert_ordinary(lambda: hodiff.hessian(f, route=route)(GIVEN))
    assert_ordinary(lambda: hodiff.hessian_diagonal(f, route=route)(GIVEN))
    assert_ordinary(lambda: hodiff.HessianOperator(f, GIVEN, route=route) @ DIRECTION)


@pytest.mark.parametrize("name", VECTORS)
def test_results_for_vector_functions_are_ordinary_tensors(name: str) -> None:
    f = VECTORS[name]
    for order in range(3):
        unless_refused(name, lambda order=order: hodiff.directional_derivatives(f, X, V, order=order))
    for mode in ("forward", "reverse"):
        unless_refused(name, lambda mode=mode: hodiff.jacobian(f, mode=mode)(X))


def test_results_of_operators_and_gradients_are_ordinary_tensors() -> None:
    assert_ordinary(lambda: hodiff.operators.IdentityOperator(hodiff.operators.Space.of(X)) @ V)
    assert_ordinary(lambda: hodiff.JacobianOperator(lambda x: x, X) @ V)
    assert_ordinary(lambda: hodiff.JacobianOperator(lambda x: x, X).T @ V)
    assert_ordinary(lambda: hodiff.hvp_function(lambda x: x.abs().sum())(X, V))
    outer, inner = lambda p, h: p.sum() + h.sum(), lambda p, h: ((p - h) ** 2).sum()
    assert_ordinary(lambda: hodiff.meta.hypergradient(outer, inner, X, X, method="unroll", steps=2).value)


def test_hvp_through_sparse_embedding_gradients_matches() -> None:
    table, direction = torch.outer(X, V), torch.outer(V, X)
    words = torch.tensor([0, 1, 1])

    def f(table: Tensor) -> Tensor:
        return (F.embedding(words, table, sparse=True) ** 3).sum()

    expected = torch.tensor([[6.0], [12.0], [0.0]], dtype=D) * table * direction
    for compute in (lambda: hodiff.hvp(f, table, direction), lambda: hodiff.HessianOperator(f, table) @ direction):
        torch.testing.assert_close(compute(), expected)
        assert_ordinary(compute)
    whole = hodiff.HessianOperator(f, table).to_dense()
    torch.testing.assert_close(whole, (torch.tensor([[6.0], [12.0], [0.0]], dtype=D) * table).flatten().diag())


def test_results_keep_their_graph() -> None:
    w = C.clone().requires_grad_()
    product = hodiff.hvp(lambda x: (w * x).sum() ** 2, X, V)
    (found,) = torch.autograd.grad(product.sum(), w)
    torch.testing.assert_close(found, 2 * (V @ C) + 2 * C.sum() * V)
    flat = hodiff.hvp(lambda x: w.sum() * x.sum() ** 2, X, V)
    assert flat.is_contiguous()
    torch.testing.assert_close(torch.autograd.grad(flat.sum(), w)[0], torch.full((3,), 6 * V.sum().item(), dtype=D))
