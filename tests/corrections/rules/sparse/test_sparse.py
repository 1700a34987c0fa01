"""Sparse tensors made from differentiated tensors, against the same functions of dense tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning", "ignore:There is a performance drop")

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
V = torch.tensor([1.0, 2.0, -1.0], dtype=D)
B, M = torch.randn(3, 2, generator=GENERATOR, dtype=D), torch.randn(3, 3, generator=GENERATOR, dtype=D)

# torch accepts more than its stubs declare.
SPARSE: Any = torch.sparse_coo_tensor
# Unsorted indices, and indices with a repeated entry
PLACES, REPEATED = torch.tensor([[2, 0, 1], [2, 1, 0]]), torch.tensor([[0, 1, 0], [1, 0, 1]])
ENDS, COLUMNS = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 2])
BLOCK_ENDS, BLOCK_COLUMN = torch.tensor([0, 1, 1]), torch.tensor([1])


def dense(x: Tensor, places: Tensor = PLACES) -> Tensor:
    return torch.zeros(3, 3, dtype=x.dtype).index_put((places[0], places[1]), x, accumulate=True)


def coo(x: Tensor, places: Tensor = PLACES) -> Tensor:
    return torch.sparse_coo_tensor(places, x, (3, 3))


def csr(x: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(ENDS, COLUMNS, x, (3, 3))


def csr_dense(x: Tensor) -> Tensor:
    return dense(x, torch.stack([torch.arange(3), COLUMNS]))


def block(x: Tensor, *shape: int) -> Tensor:
    return torch.cat([x, x**2]).view(1, *shape)


def cubes(y: Tensor) -> Tensor:
    return (y**3).sum()


# The function, and the same with dense tensors
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "to_dense": (lambda x: cubes(coo(x).to_dense()), lambda x: cubes(dense(x))),
    "of a function": (lambda x: cubes(coo(x**2).to_dense()), lambda x: cubes(dense(x**2))),
    "repeated": (lambda x: cubes(coo(x, REPEATED).to_dense()), lambda x: cubes(dense(x, REPEATED))),
    "list of indices": (
        lambda x: cubes(SPARSE([[2, 0, 1], [2, 1, 0]], x, dtype=D).to_dense()),
        lambda x: cubes(dense(x)),
    ),
    "dense dimensions": (
        lambda x: cubes(torch.sparse_coo_tensor(PLACES, torch.outer(x, x)).to_dense()),
        lambda x: cubes(torch.outer(x, x)),
    ),
    "coalesced values": (
        lambda x: cubes(coo(x, REPEATED).coalesce().values()),
        lambda x: cubes(dense(x, REPEATED)),
    ),
    "sparse.mm": (lambda x: cubes(torch.sparse.mm(coo(x), B)), lambda x: cubes(dense(x) @ B)),
    "@": (lambda x: cubes(coo(x) @ B), lambda x: cubes(dense(x) @ B)),
    "@ vector": (lambda x: cubes(coo(x) @ x), lambda x: cubes(dense(x) @ x)),
    "constant @": (lambda x: cubes(coo(V) @ x**2), lambda x: cubes(dense(V) @ x**2)),
    "constant sparse.mm": (
        lambda x: cubes(torch.sparse.mm(coo(V), (x**2)[:, None])),
        lambda x: cubes(dense(V) @ x**2),
    ),
    "addmm": (lambda x: cubes(torch.sparse.addmm(B, coo(x), B)), lambda x: cubes(B + dense(x) @ B)),
    "sparse.sum": (lambda x: torch.sparse.sum(coo(x**2)) ** 3, lambda x: dense(x**2).sum() ** 3),
    "sum": (lambda x: coo(x).sum() ** 3, lambda x: dense(x).sum() ** 3),
    "sum of a function": (lambda x: coo(x**2).sum() ** 3, lambda x: dense(x**2).sum() ** 3),
    "sparse * sparse": (lambda x: cubes((coo(x) * coo(x)).to_dense()), lambda x: cubes(dense(x) ** 2)),
    "sparse * dense": (lambda x: cubes((coo(x) * M).to_dense()), lambda x: cubes(dense(x) * M)),
    "sparse + sparse": (
        lambda x: cubes((coo(x) + coo(x**2, REPEATED)).to_dense()),
        lambda x: cubes(dense(x) + dense(x**2, REPEATED)),
    ),
    "dense + sparse": (lambda x: cubes(M + coo(x)), lambda x: cubes(M + dense(x))),
    "transposed": (lambda x: cubes(coo(x).t() @ B), lambda x: cubes(dense(x).T @ B)),
    "to_sparse": (lambda x: cubes(torch.outer(x, x).to_sparse().to_dense()), lambda x: cubes(torch.outer(x, x))),
    "to_sparse @": (lambda x: cubes(torch.outer(x, x).to_sparse() @ x), lambda x: cubes(torch.outer(x, x) @ x)),
    "sparse_mask": (
        lambda x: cubes(torch.outer(x, x).sparse_mask(coo(V)).to_dense()),
        lambda x: cubes(torch.outer(x, x) * (dense(V) != 0)),
    ),
    "csr": (lambda x: cubes(csr(x).to_dense()), lambda x: cubes(csr_dense(x))),
    "csr @": (lambda x: cubes(csr(x) @ B), lambda x: cubes(csr_dense(x) @ B)),
    "csr transposed @": (lambda x: cubes(csr(x).mT @ B), lambda x: cubes(csr_dense(x).T @ B)),
    "csr constant @": (lambda x: cubes(csr(V) @ (x**2)[:, None]), lambda x: cubes(csr_dense(V) @ x**2)),
    "csr values": (lambda x: cubes(csr(x).values()), cubes),
    "csc": (
        lambda x: cubes(torch.sparse_csc_tensor(ENDS, COLUMNS, values=x).to_dense() * M),
        lambda x: cubes(csr_dense(x).T * M),
    ),
    "bsr": (
        lambda x: cubes(torch.sparse_bsr_tensor(BLOCK_ENDS, BLOCK_COLUMN, block(x, 2, 3), (4, 6)).to_dense()),
        lambda x: cubes(block(x, 2, 3)),
    ),
    "bsr values": (
        lambda x: cubes(torch.sparse_bsr_tensor(BLOCK_ENDS, BLOCK_COLUMN, block(x, 2, 3), (4, 6)).values()),
        lambda x: cubes(block(x, 2, 3)),
    ),
    "bsc": (
        lambda x: cubes(
            torch.sparse_compressed_tensor(
                BLOCK_ENDS, BLOCK_COLUMN, block(x, 3, 2), (6, 4), layout=torch.sparse_bsc
            ).to_dense()
        ),
        lambda x: cubes(block(x, 3, 2)),
    ),
}


def climb(f: Callable[[Tensor], Tensor], order: int) -> list[Tensor]:
    """Derivatives along changing directions, each the gradient of the one before."""
    x = X.clone().requires_grad_()
    y, found = f(x), []
    for power in range(1, order + 1):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(g.detach())
        y = g @ V**power
    return found


@pytest.mark.parametrize("name", CASES)
def test_first_to_fourth_derivatives_match_dense(name: str) -> None:
    f, of_dense = CASES[name]
    with hodiff.corrected():
        torch.testing.assert_close(f(X), of_dense(X))
        found = climb(f, 4)
    torch.testing.assert_close(found, climb(of_dense, 4))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_transforms_match_dense(name: str) -> None:
    if name == "to_sparse @" and torch.__version__ >= "2.15":
        pytest.skip("torch 2.15 cannot batch the way back from a sparse tensor, by an assertion of its own")
    f, of_dense = CASES[name]
    hessian = torch.autograd.functional.hessian(of_dense, X)
    torch.testing.assert_close(hodiff.hvp(f, X, V), hessian @ V)
    torch.testing.assert_close(hodiff.hessian(f)(X), hessian)
    torch.testing.assert_close(hodiff.hessian_diagonal(f)(X), hessian.diag())
    A = hodiff.HessianOperator(f, X)
    torch.testing.assert_close(A @ torch.stack([V, X], 1), hessian @ torch.stack([V, X], 1))
    gradient = torch.autograd.functional.jacobian(of_dense, X)
    torch.testing.assert_close(hodiff.jacobian(f)(X), gradient)
    torch.testing.assert_close(hodiff.jacobian(f, mode="reverse")(X), gradient)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("route", hodiff.ROUTES[1:])
@pytest.mark.parametrize("name", CASES)
def test_forward_routes_are_rejected(name: str, route: str) -> None:
    with pytest.raises(hodiff.errors.RouteError, match=route):
        hodiff.hvp(CASES[name][0], X, V, route=route)


def test_torch_alone_is_wrong() -> None:
    """The tests above would prove nothing if torch alone were right."""
    found, expected = (climb(f, 2)[1] for f in CASES["of a function"])
    assert not torch.allclose(found, expected)


def test_sparse_output_is_rejected() -> None:
    with pytest.raises(hodiff.errors.InputError, match=r"got \(3, 3\) float64 sparse_coo; return .to_dense"):
        hodiff.jacobian(coo)(X)


@pytest.mark.parametrize("constructor", [coo, csr])
def test_constants_are_left_to_torch(constructor: Callable[[Tensor], Tensor]) -> None:
    with hodiff.corrected():
        assert constructor(X).grad_fn is None
        assert constructor(X.int()).dtype == torch.int32
        assert torch.sparse_coo_tensor(PLACES, X, requires_grad=True).is_leaf
        assert SPARSE((2, 3)).shape == (2, 3)


def test_invalid_arguments_raise_the_error_of_torch() -> None:
    x = X.clone().requires_grad_()
    with hodiff.corrected():
        with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
            torch.sparse_coo_tensor(PLACES, x, (2, 2), check_invariants=True)
        with pytest.raises(RuntimeError, match="is not satisfied"):
            torch.sparse_coo_tensor(PLACES, x, (2, 2, 2))
        with pytest.raises(RuntimeError, match="Cannot get values on an uncoalesced tensor"):
            coo(x, REPEATED).values()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_values_share_memory_with_the_tensor(layout):
    """Values share memory with the tensor: PyTorch's gradcheck writes into them, and permits undefined gradients."""
    dense = torch.tensor([[1.0, 2.0, 0.0, 0.5], [0.0, 3.0, 0.0, 0.7]], dtype=torch.float64)
    blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks)
    sparse = (sparse.coalesce() if layout == "coo" else sparse).requires_grad_()
    with hodiff.corrected():
        assert torch.autograd.gradcheck(lambda s: s.values() ** 2, sparse, masked=True, check_batched_grad=False)
        assert torch.autograd.gradcheck(lambda s: s.to_dense() ** 2, sparse, masked=True, check_batched_grad=False)
        assert sparse.values().data_ptr() == sparse.detach().values().data_ptr()
        sparse.values().data.mul_(2)
    torch.testing.assert_close(sparse.detach().to_dense(), 2 * dense)
