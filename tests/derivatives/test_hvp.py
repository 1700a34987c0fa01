"""hodiff.hvp by every route against closed forms and differences of function values."""

import collections
from typing import Any

import pytest
import torch
from cases import CASES, Case, cast, ravel
from cases import case as named
from derivatives.oracles import assert_same_structure, reference, route_table
from scipy import optimize
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import hodiff
from hodiff import ROUTES, RouteError, hvp

EVERY_ROUTE = ("auto", *ROUTES)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "route"), route_table(EVERY_ROUTE))
def test_hvp_matches_reference(case: Case, route: str) -> None:
    x, args = case.inputs()
    v = case.vector()
    product = hvp(case.function, x, v, *args, route=route)
    assert_same_structure(product, x)
    known = reference(case.name)
    known.check(ravel(product), known.hessian @ ravel(v), scale=ravel(v).abs().sum().item())


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("case", "route"), route_table(EVERY_ROUTE))
def test_float32_matches_float64(case: Case, route: str) -> None:
    x, args = case.inputs(torch.float32)
    v = case.vector(torch.float32)
    product = hvp(case.function, x, v, *args, route=route)
    assert_same_structure(product, x)
    exact = ravel(hvp(case.function, *cast((x, v, *args), torch.float64)))
    scale = max(1.0, exact.abs().max().item())
    error = (ravel(product).to(torch.float64) - exact).abs().max().item()
    assert error <= 100 * torch.finfo(torch.float32).eps * scale


@pytest.mark.parametrize("case", [each for each in CASES if each.missing_in_torch], ids=lambda each: each.name)
def test_route_missing_in_torch_raises(case: Case) -> None:
    x, args = case.inputs()
    for route in case.missing_in_torch:
        with pytest.raises(RouteError, match=route):
            hvp(case.function, x, case.vector(), *args, route=route, correct=False)


def test_hvp_of_rosenbrock_matches_scipy() -> None:
    x = torch.linspace(-1.2, 1.5, 12, dtype=torch.float64)
    v = torch.linspace(1, -2, 12, dtype=torch.float64)
    expected = torch.from_numpy(optimize.rosen_hess_prod(x.numpy(), v.numpy()))
    torch.testing.assert_close(hvp(named("rosenbrock").function, x, v), expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_has_aux_returns_aux(route: str) -> None:
    def f(x: Tensor, shift: float) -> tuple[Tensor, dict[str, Tensor]]:
        y = (x + shift) ** 3
        return y.sum(), {"cubes": y, "largest": y.argmax()}

    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    product, aux = hvp(f, x, v, 0.5, route=route, has_aux=True)
    torch.testing.assert_close(product, 6 * (x + 0.5) * v)
    torch.testing.assert_close(aux["cubes"], (x + 0.5) ** 3)
    assert aux["largest"].equal(torch.tensor(0))
    assert not aux["cubes"].requires_grad


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_zero_direction_gives_zero(route: str) -> None:
    case = named("mlp")
    x, args = case.inputs()
    product = hvp(case.function, x, tree_map(torch.zeros_like, x), *args, route=route)
    assert all(not leaf.any() for leaf in tree_leaves(product))


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_inputs_are_left_unchanged(route: str) -> None:
    case = named("tied")
    x, args = case.inputs()
    v = case.vector()
    tree_map(lambda leaf: leaf.requires_grad_(), x)
    before = tree_map(torch.clone, (x, v, args))
    versions = [leaf._version for leaf in tree_leaves((x, v, args))]
    hvp(case.function, x, v, *args, route=route)
    assert [leaf._version for leaf in tree_leaves((x, v, args))] == versions
    assert all(a.equal(b) for a, b in zip(tree_leaves((x, v, args)), tree_leaves(before), strict=True))
    assert all(leaf.grad is None and leaf.requires_grad and leaf.is_leaf for leaf in tree_leaves(x))
    assert not any(leaf.requires_grad for leaf in tree_leaves(v))


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_function_may_return_part_of_its_input(route: str) -> None:
    """An output that is a view of the input has a gradient, and the second derivative 0."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert hvp(lambda y: y[0], x, torch.ones_like(x), route=route).equal(torch.zeros_like(x))


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_function_may_return_its_scalar_argument(route: str) -> None:
    x = torch.tensor(3.0, dtype=torch.float64)
    assert hvp(lambda y: y, x, torch.ones_like(x), route=route).equal(torch.zeros_like(x))


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_same_tensor_in_two_leaves_counts_as_two_arguments(route: str) -> None:
    """Two leaves that are the same object are still two arguments: f = a·b³ with a = b."""
    t = torch.tensor(2.0, dtype=torch.float64)
    one, zero = torch.ones_like(t), torch.zeros_like(t)
    product = hvp(lambda p: p["a"] * p["b"] ** 3, {"a": t, "b": t}, {"a": one, "b": zero}, route=route)
    torch.testing.assert_close(product, {"a": zero, "b": 3 * t**2})


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_expanded_direction_is_accepted(route: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    v = torch.ones((), dtype=torch.float64).expand(3)
    torch.testing.assert_close(hvp(lambda y: (y**3).sum(), x, v, route=route), 6 * x)


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_leaves_may_have_different_dtypes(route: str) -> None:
    x = {"single": torch.ones(2), "double": torch.ones(1, dtype=torch.float64)}
    product = hvp(lambda p: (p["single"] ** 2).sum() * (p["double"] ** 3).sum(), x, x, route=route)
    assert_same_structure(product, x)
    assert product["single"].tolist() == [8.0, 8.0]
    assert product["double"].tolist() == [24.0]


Pair = collections.namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize("route", EVERY_ROUTE)
@pytest.mark.parametrize(
    "container",
    [
        lambda a, b: Pair(a, b),
        lambda a, b: collections.OrderedDict(b=a, a=b),
        lambda a, b: [(a, b)],
    ],
    ids=["namedtuple", "OrderedDict", "list of tuples"],
)
def test_containers_keep_their_type(container: Any, route: str) -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    x = container(a, b)
    product = hvp(lambda p: sum((leaf**3).sum() for leaf in tree_leaves(p)), x, x, route=route)
    assert type(product) is type(x)
    assert_same_structure(product, x)
    torch.testing.assert_close(product, container(6 * a * a, 6 * b * b))


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_grad_inside_the_function_is_differentiated(route: str) -> None:
    """Σ (∂ Σy⁴)² = Σ 16 y⁶ has the second derivative 480 y⁴."""
    x, v = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    product = hvp(lambda y: (grad(lambda z: (z**4).sum())(y) ** 2).sum(), x, v, route=route)
    torch.testing.assert_close(product, 480 * x**4 * v)


def test_autograd_grad_inside_the_function_is_differentiated() -> None:
    x, v = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)

    def penalty(y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((y**4).sum(), y, create_graph=True)
        return (slope**2).sum()

    torch.testing.assert_close(hvp(penalty, x, v), 480 * x**4 * v)


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_detached_parts_are_constants(route: str) -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert hvp(lambda y: (y.detach() * y).sum(), x, x, route=route).equal(torch.zeros_like(x))
    product = hvp(lambda y: (y.detach() * y**2).sum(), x, x, route=route)
    torch.testing.assert_close(product, 2 * x * x)


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_works_under_autocast(route: str) -> None:
    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    x, v = torch.ones(4), torch.tensor([1.0, 0.0, -1.0, 2.0])

    def f(y: Tensor) -> Tensor:
        return torch.tanh(weight @ y).float().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = hvp(f, x, v, route=route)
    assert product.dtype == torch.float32
    exact = hvp(f, x, v)
    # bfloat16 has eight bits, and the derivative contains three such products.
    assert (product - exact).abs().max() <= 0.05 * exact.abs().max()


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_bfloat16_matches_closed_form(route: str) -> None:
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.bfloat16)
    product = hvp(lambda y: (y**3).sum(), x, torch.ones_like(x), route=route)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product, 6 * x, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_dict_keeps_the_order_of_the_input() -> None:
    x = {"z": torch.ones(1), "a": torch.ones(2)}
    product = hvp(lambda p: (p["z"] ** 2).sum() + (p["a"] ** 3).sum(), x, x)
    assert list(product) == ["z", "a"]


IN_PLACE = {
    "scaled": lambda x: (x * 1).mul_(2).pow(3).sum() / 8,
    "copied": lambda x: (x * 1).copy_(x).pow(3).sum(),
    "multiplied": lambda x: (x * 1).mul_(x).mul_(x).sum(),
    "clamped": lambda x: (x * 1).clamp_(-9, 9).pow(3).sum(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_writes_into_zero_tangents_are_supported(name):
    """The Hessian of Σ x³ is diag(6 x), although torch's zero tangents of linear operators cannot be written to."""
    x, v = torch.tensor([0.5, -2.0], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    got = hvp(IN_PLACE[name], x, v, route="forward-over-forward")
    torch.testing.assert_close(got, 6 * x * v)


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_in_place_addition_of_a_batched_tangent_is_supported(route):
    """A batch of directions of one leaf is added in place to a tensor that depends on the other leaf only."""
    a, b, u, v = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def f(p):
        total = p["a"].sin()
        total += p["b"].cos()
        return total.square().sum()

    got = hvp(f, {"a": a, "b": b}, {"a": u, "b": v}, route=route)
    total, slope = a.sin() + b.cos(), a.cos() * u - b.sin() * v
    torch.testing.assert_close(got["a"], 2 * (slope * a.cos() - total * a.sin() * u))
    torch.testing.assert_close(got["b"], -2 * (slope * b.sin() + total * b.cos() * v))


def test_forward_mode_of_rsub_does_not_end_the_process():
    """Torch's second tangent of rsub ends the process if a mode watches it."""
    x, a = torch.ones(3), torch.tensor(1.3)
    f = lambda a: torch.rsub(x, a, alpha=2).pow(2).sum()  # noqa: E731
    assert hvp(f, a, torch.ones_like(a), route="forward-over-forward").item() == pytest.approx(6.0)


def test_leaf_made_inside_leaves_no_graph():
    """No derivative can reach a leaf made inside, unless it is closed over or kept."""
    x, held = torch.tensor([1.0, 2.0]), torch.nn.Parameter(torch.ones(2))
    kept = []

    def cut(x):
        return (torch.nn.Parameter(2 * x) ** 2).sum() + (x**3).sum()

    def keeps(x):
        kept.append(torch.nn.Parameter(2 * x))
        return (kept[-1] * x**3).sum()

    for product in (hodiff.hvp(cut, x, x), hodiff.hessian_matrix(cut, x), hodiff.value_grad_hvp(cut, x, x)[2]):
        assert not product.requires_grad
    assert hodiff.hvp(lambda x: (held * x**3).sum(), x, x).requires_grad
    assert hodiff.hvp(keeps, x, x).requires_grad


@pytest.mark.parametrize("route", ["reverse-over-reverse", "forward-over-reverse"])
def test_functions_of_hodiff_need_no_extra_gradient(route):
    """Foreign Functions are checked in an extra gradient; hodiff's own resemble them inside transforms."""
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def flops(rest):
        f = lambda w: rest(x @ w).exp().sum()  # noqa: E731
        hvp(f, w, w, route=route)
        with FlopCounterMode(display=False) as counter:
            hvp(f, w, w, route=route)
        return counter.get_total_flops()

    assert flops(lambda y: torch.nn.functional.layer_norm(y, (8,))) == flops(torch.sin)
