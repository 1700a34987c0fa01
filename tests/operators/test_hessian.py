"""Tests of the Hessian operator against closed forms and torch's dense Hessians, in all forms and settings."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import MODELS, bernoulli_hessian, close, problem, unravel
from torch import Tensor

import hodiff
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.operators import HessianOperator

ALL = pytest.mark.parametrize("name", MODELS)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])


def test_linear_regression_matches_gram_matrix() -> None:
    X, y, w = torch.randn(7, 3).double(), torch.randn(7).double(), torch.randn(3).double()
    A = HessianOperator(lambda w, batch: F.mse_loss(batch[0] @ w, batch[1]), w, data=[(X[:4], y[:4]), (X[4:], y[4:])])
    close(A.to_dense(), 2 * X.T @ X / 7)


def test_logistic_regression_matches_closed_form() -> None:
    X, y, w = torch.randn(7, 3).double(), torch.rand(7).double(), torch.randn(3).double()
    A = HessianOperator(lambda w: F.binary_cross_entropy_with_logits(X @ w, y, reduction="sum"), w)
    close(A.to_dense(), X.T @ bernoulli_hessian(X @ w) @ X)


def test_softmax_regression_matches_closed_form() -> None:
    X, y, W = torch.randn(6, 2).double(), torch.randint(3, (6,)), torch.randn(2, 3).double()
    A = HessianOperator(lambda W: F.cross_entropy(X @ W, y), W)
    s = (X @ W).exp()
    s = s / s.sum(1, keepdim=True)
    blocks = torch.diag_embed(s) - s[:, :, None] * s[:, None, :]
    close(A.to_dense(), torch.einsum("ni,nab,nj->iajb", X, blocks, X).reshape(6, 6) / 6)


@pytest.mark.one_in(3)
@ALL
@REDUCTIONS
def test_matches_dense_hessian(name: str, reduction: str) -> None:
    p = problem(name)
    batch = (p.inputs, p.targets)
    whole = HessianOperator(p.objective(reduction), p.x, batch)
    expected = p.hessian(reduction)
    close(whole.to_dense(), expected)
    close(expected, hodiff.hessian_matrix(p.objective(reduction), p.x, batch))
    split = HessianOperator(p.objective(reduction), p.x, data=p.batches(2, 3), reduction=reduction)
    close(split.to_dense(), expected)


@ALL
def test_vectors_blocks_and_pytrees_agree(name: str) -> None:
    p = problem(name)
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets))
    n = A.shape[0]
    V = torch.randn(n, 3).double()
    expected = p.hessian() @ V
    close(A @ V, expected)
    close(torch.stack([A @ v for v in V.T], dim=1), expected)
    close(ravel(A @ unravel(V[:, 0], p.x)), expected[:, 0])
    assert (A @ V[:, :0]).shape == (n, 0)


SETTINGS: list[dict[str, Any]] = [
    {"cache": True},
    {"cache": False},
    {"cache": "auto", "memory_budget": 1},
    {"cache": "auto", "memory_budget": 2500},
    {"chunk_size": 1},
    {"chunk_size": 3},
    {"chunk_size": None},
    {"check_deterministic": False},
    {"correct": False},
    {"progress": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_do_not_change_products(settings: dict[str, Any]) -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, data=p.batches(2, 3), **settings)
    V = torch.randn(A.shape[0], 5).double()
    expected = p.hessian() @ V
    for _ in range(3):
        close(A @ V, expected)
        close(A @ V[:, 0], expected[:, 0])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_routes_match(route: str) -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, data=p.batches(2), route=route)
    close(A.to_dense(), p.hessian())
    v = torch.randn(A.shape[0]).double()
    close(A @ v, p.hessian() @ v)


def test_memory_budget_caches_what_fits() -> None:
    p = problem("mlp")
    batches = p.batches(1, 2, 3, 4)
    evaluated = 0

    def f(x: Any, batch: Any) -> Tensor:
        nonlocal evaluated
        evaluated += 1
        return p.objective()(x, batch)

    counts = {}
    for budget in (0, 3000, 2**30):
        A = HessianOperator(f, p.x, data=batches, memory_budget=budget, check_deterministic=False)
        A @ p.x
        evaluated = 0
        A @ p.x
        counts[budget] = evaluated
    assert counts[0] == len(batches)
    assert 0 < counts[3000] < len(batches)
    assert counts[2**30] == 0


def test_at_moves_to_another_point() -> None:
    p = problem("tied")
    A = HessianOperator(p.objective(), p.x, data=p.batches(2))
    before = A @ p.x
    elsewhere = {name: value + 0.5 for name, value in p.x.items()}
    other = A.at(elsewhere)
    fresh = HessianOperator(p.objective(), elsewhere, data=p.batches(2))
    close(other.to_dense(), fresh.to_dense(), 1e-14)
    assert (other.to_dense() - A.to_dense()).abs().max() > 1e-3
    close(ravel(A @ p.x), ravel(before), 1e-15)
    torch.testing.assert_close(other.x, elsewhere)
    with pytest.raises(hodiff.InputError, match="x: expected the structure"):
        A.at({name: value.float() for name, value in p.x.items()})
    with pytest.raises(hodiff.InputError, match="x: expected the structure"):
        A.at(list(p.x.values()))


@pytest.mark.parametrize("cache", [True, False])
def test_point_changed_in_place_raises(cache: bool) -> None:
    """Cached linearizations would use the old values, and new ones the changed values."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    A = HessianOperator(lambda x, a: a * (x**4).sum(), x, data=[torch.ones(1)[0]], reduction="sum", cache=cache)
    A @ torch.ones(2)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(hodiff.InputError, match=r"x: .* changed in place since, .* A\.at\(x\)"):
        A @ torch.ones(2)
    close(A.at(x) @ torch.ones(2), 12 * torch.tensor([4.0, 16.0]), 1e-6)


@pytest.mark.parametrize("name", ["mlp", "nested"])
def test_blocks_of_parameters_match(name: str) -> None:
    p = problem(name)
    A = HessianOperator(p.objective(), p.x, data=p.batches(2))
    H = p.hessian()
    picks = {"mlp": ["0", "2.bias", ["2", "0.bias"]], "nested": ["layers", "layers.1", ["scale", "ignored"]]}[name]
    for names in picks:
        block = A.block(names)
        rows = torch.cat([torch.arange(A.shape[0])[part] for part in A.domain.select(_leaves(A, names))])
        expected = H[rows[:, None], rows[None, :]]
        close(block.to_dense(), expected)
        close((2 * A).block(names).to_dense(), 2 * expected)
        assert set(block @ block.domain.unflatten(torch.ones(len(rows)).double())) == set(block.x)
        close(block.at({key: value + 0.1 for key, value in block.x.items()}).to_dense(), _shifted(p, names, rows))


def _leaves(A: HessianOperator, names: Any) -> list[int]:
    from hodiff.operators.linear.restriction import leaves_named

    return leaves_named(A.domain, names)[0]


def _shifted(p: Any, names: Any, rows: Tensor) -> Tensor:
    flat = ravel(p.x).clone()
    flat[rows] += 0.1
    batch = (p.inputs, p.targets)
    hessian = torch.autograd.functional.hessian(lambda flat: p.objective()(unravel(flat, p.x), batch), flat)
    return hessian[rows[:, None], rows[None, :]]


def test_unused_leaves_have_zero_rows() -> None:
    p = problem("nested")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets))
    start = [i for i, name in enumerate(A.domain.names) if "ignored" in name]
    (place,) = A.domain.select(start)
    H = A.to_dense()
    assert not H[place].any()
    assert not H[:, place].any()


def test_scalar_and_empty_leaves_are_accepted() -> None:
    x = {"a": torch.tensor(0.3).double(), "b": torch.zeros(0, 2).double(), "c": torch.tensor([0.2]).double()}
    A = HessianOperator(lambda x: (x["a"] ** 3 * x["c"]).sum() + x["b"].sum(), x)
    close(A.to_dense(), torch.tensor([[6 * 0.3 * 0.2, 3 * 0.09], [3 * 0.09, 0.0]]).double(), 1e-7)
    product = A @ x
    assert product["b"].shape == (0, 2)
    assert product["a"].shape == ()


def test_scalar_point_is_accepted() -> None:
    A = HessianOperator(torch.sin, torch.tensor(0.5).double())
    expected = -torch.tensor(0.5).double().sin()
    close(A @ torch.tensor(2.0).double(), 2 * expected)
    close(A @ torch.tensor([2.0]).double(), 2 * expected[None])
    close(A @ torch.ones(1, 4).double(), expected.expand(1, 4))


def test_linear_function_has_the_zero_hessian() -> None:
    A = HessianOperator(lambda x: x.sum(), torch.randn(3))
    assert not A.to_dense().any()
    assert not (A @ torch.ones(3)).any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_lower_precision_matches_float64(dtype: torch.dtype, tolerance: float) -> None:
    p = problem("regression")
    x = {key: value.to(dtype) for key, value in p.x.items()}
    batches = [tuple(part.to(dtype) for part in batch) for batch in p.batches(2)]
    A = HessianOperator(p.objective(), x, data=batches)
    assert A.dtype == torch.float32
    v = torch.randn(A.shape[0])
    exact = p.hessian() @ v.double()
    assert (A @ v - exact).norm() < tolerance * exact.norm()
    product = A @ {key: torch.ones_like(value) for key, value in x.items()}
    assert {leaf.dtype for leaf in product.values()} == {dtype}


@pytest.mark.slow
def test_low_precision_batches_are_summed_in_float32() -> None:
    """A sum of a thousand products of 1 would stop at 256 in bfloat16."""
    x = torch.ones(1, dtype=torch.bfloat16)
    data = [torch.ones(1, dtype=torch.bfloat16)] * 1000
    A = HessianOperator(lambda x, a: (a * x**2 / 2).sum(), x, data=data, reduction="sum")
    assert (A @ torch.ones(1)).item() == 1000


def test_mixed_dtypes_promote() -> None:
    x = {"a": torch.ones(2), "b": torch.ones(1).double()}
    A = HessianOperator(lambda x: (x["a"].double() ** 3).sum() * x["b"].sum(), x)
    assert A.dtype == torch.float64
    product = A @ x
    assert (product["a"].dtype, product["b"].dtype) == (torch.float32, torch.float64)
    close(A.to_dense(), torch.tensor([[6.0, 0, 3], [0, 6, 3], [3, 3, 0]]).double(), 1e-6)


def test_works_under_autocast() -> None:
    p = problem("mlp")
    x = {key: value.float() for key, value in p.x.items()}

    def f(x: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(p.call(x, p.inputs.float()).float(), p.targets)

    with warnings.catch_warnings():
        # An asymmetry by rounding to 16 bits does not indicate a wrong rule.
        warnings.simplefilter("error", hodiff.HodiffWarning)
        H = HessianOperator(f, x).to_dense()
        assert torch.equal(H, hodiff.hessian_matrix(f, x))
    assert H.dtype == torch.float32
    assert torch.equal(H, H.mT)
    exact = p.hessian()
    assert 1e-5 < (H - exact).norm() / exact.norm() < 5e-2


@pytest.mark.parametrize(("own", "asked", "most"), [(2, "auto", 2), ("auto", 3, 3), (None, "auto", 1000)])
def test_chunk_size_of_the_operator_applies_to_to_dense(own: Any, asked: Any, most: int, monkeypatch: Any) -> None:
    p = problem("mlp")
    widths: list[int] = []
    rows = RecordedGradient.rows

    def counted(self: Any, index: int, basis: Tensor, wanted: Any) -> Any:
        widths.append(len(basis))
        return rows(self, index, basis, wanted)

    monkeypatch.setattr(RecordedGradient, "rows", counted)
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets), chunk_size=own)
    close(A.to_dense(chunk_size=asked), p.hessian())
    assert max(widths) == min(most, max(leaf.numel() for leaf in p.x.values()))


def test_linear_function_has_zero_dense_matrix() -> None:
    x = {"a": torch.ones(2), "b": torch.ones(3)}
    assert torch.equal(HessianOperator(lambda x: x["a"].sum() + 2 * x["b"].sum(), x).to_dense(), torch.zeros(5, 5))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_products_own_their_memory(reduction: str) -> None:
    """Products are new tensors, while autograd returns the vector for an identity and an expanded number for a sum."""
    x, v = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    for f, expected in ((lambda x, *_: x @ x / 2, v.clone()), (lambda x, *_: x.sum() ** 2, torch.full_like(v, 14.0))):
        for options in ({}, {"data": [torch.ones(1), torch.ones(1)], "reduction": reduction}):
            product = HessianOperator(f, x, **options) @ v
            times = 2 if options and reduction == "sum" else 1
            close(product, times * expected)
            product.mul_(3)
            close(product, 3 * times * expected)
    close(v, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_gradient_inside_the_function_is_differentiated(route: str) -> None:
    def f(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return g.square().sum()

    x = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    A = hodiff.HessianOperator(f, x, route=route)
    torch.testing.assert_close(A @ torch.ones(3, dtype=torch.float64), 108 * x**2)
    torch.testing.assert_close(A.to_dense(), (108 * x**2).diag())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("value", [(torch.ones(()), 1), 1.0, torch.ones(3)])
def test_rejects_functions_that_return_no_scalar(value: Any, compile: bool) -> None:
    A = HessianOperator(lambda x: value, torch.ones(3), compile=compile)
    with pytest.raises(
        hodiff.InputError, match=r"HessianOperator: expected a function that returns (a scalar tensor|one real number)"
    ):
        A @ torch.ones(3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_and_negative_bit_views_match() -> None:
    def f(x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:1] ** 2, x[1:] ** 3])
        return torch.nested.to_padded_tensor(nested, 0.0).square().sum()

    x, v = torch.tensor([1.0, -0.5, 2.0]).double(), torch.tensor([0.3, 1.0, -0.7]).double()
    product = torch.stack([12 * x[0] ** 2 * v[0], 30 * x[1] ** 4 * v[1], 30 * x[2] ** 4 * v[2]])
    torch.testing.assert_close(HessianOperator(f, x) @ v, product)
    torch.testing.assert_close(hodiff.hessian_matrix(f, x) @ v, product)
    negative = torch.complex(v, x).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(HessianOperator(lambda x: (x**3).sum(), negative) @ v, -6 * x * v)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_meta_tensors_are_accepted(route):
    """A product on the device "meta" has a shape but no values."""
    x = torch.ones(3, dtype=torch.float64, device="meta")
    A = hodiff.HessianOperator(lambda x: (x**3).sum(), x, route=route)
    for found, shape in ((A @ x, (3,)), (A @ torch.ones(3, 2, dtype=x.dtype, device="meta"), (3, 2))):
        assert (found.device.type, found.shape, found.dtype) == ("meta", shape, x.dtype)
    assert A.to_dense().shape == (3, 3)
    by_batches = hodiff.HessianOperator(lambda x, batch: (x**3 * batch).sum(), x, data=[x, x], route=route)
    assert (by_batches @ x).shape == (3,)
    x.add_(1)
    with pytest.raises(hodiff.errors.InputError, match="expected the values with which the operator was created"):
        A @ x
