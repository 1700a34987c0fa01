"""torch.cond and other control-flow operators, against plain Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop

import hodiff
from hodiff.errors import InputError, RouteError

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch compiles them before anybody can look")

D = torch.float64
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
V = torch.tensor([1.0, 2.0, -1.0], dtype=D)
W = torch.tensor([2.0, 1.0, 3.0], dtype=D)
ONE = torch.ones((), dtype=D)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    """Import dynamo, which torch.cond requires; the import takes longer than the tests."""
    import torch._dynamo  # noqa: F401


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def squares(x: Tensor) -> Tensor:
    return (x**2).sum()


def branching(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, cubes, squares, (x,))


def normalized(x: Tensor) -> Tensor:
    return (F.layer_norm(x, (3,)) ** 3 * W).sum()


def normalized_by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean()
    return ((centred / ((centred**2).mean() + 1e-5).sqrt()) ** 3 * W).sum()


def partial_products(x: Tensor) -> list[Tensor]:
    return [x[0], x[0] * x[1], x[0] * x[1] * x[2]]


def three_times(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * x.sin()
    return x


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "cond": (branching, cubes),
    "cond, the other branch": (lambda x: torch.cond(x.sum() < 0, squares, cubes, (x,)), cubes),
    "cond on what is closed over": (lambda x: torch.cond(x.sum() > 0, lambda: cubes(x), lambda: squares(x)), cubes),
    "cond on a tree": (
        lambda x: torch.cond(
            x.sum() > 0, lambda p: {"c": cubes(p["a"][0])}, lambda p: {"c": squares(p["a"][0])}, ({"a": (x,)},)
        )["c"],
        cubes,
    ),
    "cond in cond": (lambda x: torch.cond(x.sum() > 0, branching, squares, (x,)), cubes),
    "cond around what torch has wrong": (
        lambda x: torch.cond(x.sum() > 0, normalized, squares, (x,)),
        normalized_by_hand,
    ),
    "scan": (lambda x: scan(lambda c, e: (c * e, c * e * e), ONE, x)[0], torch.prod),
    "scan, what comes out": (
        lambda x: squares(scan(lambda c, e: (c * e, c * e * e), ONE, x)[1]),
        lambda x: squares(torch.stack(partial_products(x)) * x),
    ),
    "scan of trees, reversed": (
        lambda x: squares(
            scan(lambda c, e: ({"a": c["a"] * e["u"]}, (c["a"] + e["u"],)), {"a": ONE}, {"u": x}, reverse=True)[1][0]
        ),
        lambda x: (x[0] + x[1] * x[2]) ** 2 + (x[1] + x[2]) ** 2 + (x[2] + 1) ** 2,
    ),
    "scan of rows": (
        lambda x: squares(scan(lambda c, e: (c * e.sin(), c + e), x, torch.outer(x, x), dim=1)[1]),
        lambda x: squares(
            torch.stack(
                [x + x * x[0], x * (x * x[0]).sin() + x * x[1], x * (x * x[0]).sin() * (x * x[1]).sin() + x * x[2]], 1
            )
        ),
    ),
    "while_loop": (
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * y.sin()), (torch.tensor(0), x))[1].sum(),
        lambda x: three_times(x).sum(),
    ),
    "while_loop of no step": (
        lambda x: cubes(while_loop(lambda i, y: i < 0, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))[1]),
        cubes,
    ),
    "map": (lambda x: map(lambda e, y: e**3 * y, x, torch.tensor(2.0, dtype=D)).sum(), lambda x: 2 * cubes(x)),
    "map of trees": (
        lambda x: map(lambda e: {"a": e["u"] ** 3, "b": e["v"]}, {"u": x, "v": x**2})["a"].sum(),
        cubes,
    ),
    "associative_scan": (
        lambda x: squares(associative_scan(torch.mul, x, 0, combine_mode="generic")),
        lambda x: squares(torch.stack(partial_products(x))),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_every_transform_matches_plain_python(name: str) -> None:
    f, plain = CASES[name]
    hessian = torch.autograd.functional.hessian(plain, X)
    gradient = torch.autograd.functional.jacobian(plain, X)
    torch.testing.assert_close(hodiff.corrected()(f)(X), plain(X))
    for route in ("auto", *hodiff.ROUTES):
        torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), hessian @ V)
        torch.testing.assert_close(hodiff.hessian(f, route=route)(X), hessian)
        torch.testing.assert_close(hodiff.hessian_diagonal(f, route=route)(X), hessian.diag())
        torch.testing.assert_close(hodiff.HessianOperator(f, X, route=route) @ V, hessian @ V)
    for mode in ("forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(X), gradient)
    expected = hodiff.directional_derivatives(plain, X, V, order=3)
    torch.testing.assert_close(hodiff.directional_derivatives(f, X, V, order=3), expected)
    torch.testing.assert_close(expected[2], V @ hessian @ V)
    batched = torch.func.vmap(lambda x: hodiff.hvp(f, x, V))(torch.stack([X, X]))
    torch.testing.assert_close(batched, (hessian @ V).expand(2, 3))


def test_torch_transforms_within_corrected_match() -> None:
    x = X.clone().requires_grad_()
    with hodiff.corrected():
        (gradient,) = torch.autograd.grad(branching(x), x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(gradient @ V, x)[0], 6 * X * V)
        product = torch.func.grad(lambda x: torch.func.jvp(branching, (x,), (V,))[1])(X)
    torch.testing.assert_close(product, 6 * X * V)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_batch_rows_may_take_different_branches(route: str) -> None:
    found = torch.func.vmap(lambda x: hodiff.hvp(branching, x, V, route=route))(torch.stack([X, -X]))
    torch.testing.assert_close(found, torch.stack([6 * X * V, 2 * V]))


def test_batch_rows_with_different_step_counts_are_rejected() -> None:
    def f(x: Tensor) -> Tensor:
        return while_loop(lambda y: y.sum() < 5, lambda y: (y * y + 1,), (x,))[0].sum()

    with pytest.raises(InputError, match="expected one answer for the whole batch"):
        torch.func.vmap(lambda x: hodiff.hvp(f, x, V))(torch.stack([X, -X]))


def test_error_in_a_branch_reaches_the_user() -> None:
    calls = []

    def wrong(x: Tensor) -> Tensor:
        calls.append(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        hodiff.hvp(lambda x: torch.cond(x.sum() > 0, wrong, squares, (x,)), X, V)
    assert len(calls) == 1


def test_meta_gradients_match() -> None:
    def loss(params: dict[str, Tensor], task: Tensor) -> Tensor:
        return torch.cond(task.sum() > 0, lambda w: cubes(w * task), lambda w: squares(w * task), (params["w"],))

    w = X.clone().requires_grad_()
    adapted = hodiff.meta.adapt(loss, {"w": w}, W, hodiff.meta.SGD(0.01), 1)
    adapted = adapted[0] if isinstance(adapted, tuple) else adapted
    (found,) = torch.autograd.grad(adapted["w"] @ V, w)
    torch.testing.assert_close(found, (1 - 0.01 * 6 * W**3 * X) * V)


def test_rejects_graph_recorded_outside_corrected() -> None:
    x = X.clone().requires_grad_()
    y = branching(x)
    assert "CondAutogradOp" in type(y.grad_fn).__name__  # outside of corrections, torch is unchanged
    with hodiff.corrected(), pytest.raises(RouteError, match="gradient of CondAutogradOp"):
        torch.autograd.grad(y, x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], 3 * X**2)


@pytest.mark.slow
def test_torch_alone_is_wrong() -> None:
    """The tests above would prove nothing if torch alone were right."""
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(branching(x), x, create_graph=True)
    torch.testing.assert_close(gradient, 3 * X**2)
    assert not gradient.requires_grad or not torch.autograd.grad(gradient @ V, x)[0].any()


@pytest.mark.slow
def test_uncorrected_products_are_rejected() -> None:
    with pytest.raises(
        RouteError, match=r"gradient of CondAutogradOp, an operator that takes functions, is a constant"
    ):
        hodiff.hvp(branching, X, V, route="reverse-over-reverse", correct=False)


class Exported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (carry, out) = scan(lambda c, e: (c * e, (c * e * e).clone()), torch.ones((), dtype=D), x)
        (_, y) = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * y.sin()), (torch.tensor(0), x))
        return carry * out.sum() + y.sum() + map(lambda e: e**3, x).sum() + branching(x)


@pytest.mark.slow
def test_exported_program_matches_plain_python() -> None:
    program: Any = torch.export.export(Exported(), (X,)).module()
    assert {"cond", "scan", "while_loop", "map_impl"} <= {
        getattr(node.target, "__name__", "") for node in program.graph.nodes
    }

    def plain(x: Tensor) -> Tensor:
        products = torch.stack(partial_products(x))
        return products[-1] * (products * x).sum() + three_times(x).sum() + 2 * cubes(x)

    hessian = torch.autograd.functional.hessian(plain, X)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(program, X, V, route=route), hessian @ V)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="before 2.15 torch wants a step")
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_loops_without_steps(route: str) -> None:
    nothing = torch.zeros(0, dtype=D)

    def f(x: Tensor) -> Any:
        state, rows = scan(lambda c, a: ({"s": c["s"].sin() + a}, (c["s"] * 2, None)), {"s": x.sin()}, nothing)
        assert rows[0].shape == (0,)
        assert rows[1] is None
        return state["s"] + rows[0].sum() + associative_scan(torch.add, nothing * x, 0, combine_mode="generic").sum()

    x = torch.tensor(0.3, dtype=D)
    torch.testing.assert_close(hodiff.hvp(f, x, torch.ones_like(x), route=route), -x.sin())
