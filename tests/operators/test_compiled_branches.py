"""Functions that branch on values compile a graph for each branch, or run eagerly with a warning."""

import math
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import hodiff
from hodiff.derivatives import compilation
from hodiff.operators import HessianOperator
from hodiff.operators.compiled.linear_graphs import capture

pytestmark = pytest.mark.usefixtures("captured_graphs")

D = torch.float64
X = torch.tensor([2.0, 1.0, -1.5, 0.5], dtype=D)
# The points differ in signs, in the number of positive elements, and in their order.
POINTS = (X, -X, 0.7 * X, X.flip(0), X.abs(), -X.abs(), X)


def on_one_side(x: Tensor) -> Tensor:
    return (x**3).sum() if x.sum() > 0 else (x**4).sum()


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        positive = (x.detach().sum() > 0).item()
    return (x**3).sum() if positive else (x**4).sum()


def as_often_as_positive(x: Tensor) -> Tensor:
    for _ in range(int((x > 0).sum())):
        x = 2 * x
    return (x**2).sum()


def of_the_positive(x: Tensor) -> Tensor:
    return (x[x > 0] ** 3).sum()


def where_positive(x: Tensor) -> Tensor:
    (places,) = (x > 0).nonzero(as_tuple=True)
    return len(places) * (x[places] ** 2).sum()


def selected(x: Tensor) -> Tensor:
    return (torch.masked_select(x, x > 0) ** 3).sum()


def if_equal(x: Tensor) -> Tensor:
    return (x**3).sum() if torch.equal(x, x.abs()) else (x**2).sum()


def by_a_list(x: Tensor) -> Tensor:
    return sum(x[i] ** (3 if positive else 2) for i, positive in enumerate((x > 0).tolist()))


def repeated(x: Tensor) -> Tensor:
    return (x.repeat_interleave((x.detach() > 0).long() + 1) ** 3).sum()


# The diagonals of the Hessians, derived by hand.
DIAGONALS: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    on_one_side: lambda x: 6 * x if x.sum() > 0 else 12 * x**2,
    in_inference_mode: lambda x: 6 * x if x.sum() > 0 else 12 * x**2,
    as_often_as_positive: lambda x: 2 * 4.0 ** int((x > 0).sum()) * torch.ones_like(x),
    of_the_positive: lambda x: 6 * x.clamp(min=0),
    where_positive: lambda x: 2.0 * (x > 0).sum() * (x > 0),
    selected: lambda x: 6 * x.clamp(min=0),
    if_equal: lambda x: 6 * x if bool((x >= 0).all()) else torch.full_like(x, 2.0),
    by_a_list: lambda x: torch.where(x > 0, 6 * x, 2.0),
    repeated: lambda x: 6 * x * (1 + (x > 0)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("f", DIAGONALS, ids=lambda f: f.__name__)
def test_each_branch_has_a_graph(f: Callable[[Tensor], Tensor]) -> None:
    A = HessianOperator(f, X, compile=True)
    v = torch.linspace(1, 2, 4, dtype=D)
    for x in POINTS:
        torch.testing.assert_close(A.at(x) @ v, (DIAGONALS[f](x) * v).to(D))
    ways = [len(branches.graphs) for branches in A._compiled._graphs._graphs.values()]  # type: ignore[union-attr]
    # Points on one branch share a graph.
    assert sum(ways) < len(POINTS)


@pytest.mark.slow
def test_too_many_branches_fall_back_to_eager() -> None:
    """Each number of positive elements is another branch."""
    points = [torch.cat([torch.ones(count), -torch.ones(10 - count)]).to(D) for count in range(10)]
    A = HessianOperator(as_often_as_positive, points[0], compile=True)

    def agrees(x: Tensor) -> None:
        torch.testing.assert_close(A.at(x) @ x, DIAGONALS[as_often_as_positive](x) * x)

    for x in points[:8]:
        agrees(x)
    with pytest.warns(hodiff.HodiffWarning, match=r"taken 8 branches.* in as_often_as_positive, .* became 8"):
        agrees(points[8])
    # The warning appears once, and branches with a graph continue to use it.
    for x in reversed(points):
        agrees(x)


def with_numpy(x: Tensor) -> Tensor:
    return (x**2).sum() * (3 if x.detach().numpy()[0] > 0 else 2)


def with_noise(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (x**2 * torch.rand_like(x)).sum()


class OnTheSignOfItsCotangent(torch.autograd.Function):
    """A nonlinear backward rule, which a graph would not see."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (2 if cotangent.sum() > 0 else 2.0) * x * cotangent


REASONS = {
    with_numpy: r"takes numbers out of torch.*test_compiled_branches.py:\d+, in with_numpy, `return",
    with_noise: r"draws random numbers \(aten.rand_like.*call model.eval\(\) \(at .* in with_noise, `return",
    lambda x: OnTheSignOfItsCotangent.apply(x).prod(): r"in backward, .* reads numbers of what depends on the vector",
}


@pytest.mark.parametrize("f", REASONS)
def test_warning_locates_the_reason_for_eager_execution(f: Callable[[Tensor], Tensor]) -> None:
    A, v = HessianOperator(f, X, compile=True), torch.ones(4, dtype=D)
    with pytest.warns(hodiff.HodiffWarning, match=REASONS[f]):
        product = A @ v
    torch.testing.assert_close(product, HessianOperator(f, X) @ v)
    torch.testing.assert_close(A.at(-X) @ v, HessianOperator(f, -X) @ v)


def test_in_place_writes_through_views_do_not_leak() -> None:
    """Otherwise the second product would find the values that the first product wrote."""

    def product(constants: Any, tangents: Any) -> tuple[Tensor]:
        total = 2 * constants[0]
        total[0].add_(tangents[0][0])
        return (total - 2 * constants[0],)

    v = torch.tensor([3.0, 4.0], dtype=D)
    halves = capture(product, (v,), (v,))
    residuals = halves.point(v)
    for scale in (1.0, 2.0):
        (found,) = halves.linear(*residuals, scale * v)
        assert found.tolist() == [3.0 * scale, 0.0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_compile(kind: Any, captured_graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    layer, inputs = kind(2, 2).double(), torch.randn(2, 1, 2, dtype=D)
    x = {name: each.detach() for name, each in layer.named_parameters()}

    def f(x: Any) -> Tensor:
        return torch.func.functional_call(layer, x, (inputs,))[0].square().sum()

    v = {name: torch.randn_like(each) for name, each in x.items()}
    found, expected = (HessianOperator(f, x, compile=compile) @ v for compile in (True, False))
    torch.testing.assert_close(found, expected)
    assert captured_graphs


class Lazy(dict[str, Any]):
    """A dict that creates its items on access, like a registry of models."""

    def __getitem__(self, name: str) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


class Sized(tuple[int, ...]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_truth_of_containers_is_not_a_branch(captured_graphs: list[fx.GraphModule]) -> None:
    registry, sizes, names = Lazy(a=1), Sized((1, 2)), {"a", "b", "c"}

    def f(x: Tensor) -> Tensor:
        return (x**3).sum() * (1 if registry is not None and sizes is not None and names else 2)

    torch.testing.assert_close(HessianOperator(f, X, compile=True) @ X, 6 * X * X)
    assert captured_graphs


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [tuple, dict])
def test_constants_of_packages_are_captured(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants from tuples of packages are in the graph; a tensor in a package's dict may belong to the user."""
    coefficients = torch.arange(4, dtype=D)
    package = types.ModuleType(f"a_package_of_{kind.__name__}s")
    package.__file__ = f"{sysconfig.get_path('purelib')}/{package.__name__}.py"
    package.__dict__["TABLE"] = (coefficients,) if kind is tuple else {"a": coefficients}
    monkeypatch.setitem(sys.modules, package.__name__, package)
    A = HessianOperator(lambda x: (coefficients_of(package) * x**2).sum(), X, compile=True)
    with nullcontext() if kind is tuple else pytest.warns(hodiff.HodiffWarning, match="reads a tensor of shape"):
        torch.testing.assert_close(A @ X, 2 * coefficients * X)


def coefficients_of(package: types.ModuleType) -> Tensor:
    table = sys.modules[package.__name__].__dict__["TABLE"]
    found: Tensor = next(iter(table.values() if isinstance(table, dict) else table))
    return found


@pytest.mark.parametrize(("terminal", "patience"), [(True, 0.0), (True, 60.0), (False, 0.0)])
def test_long_compilation_prints_a_message_on_a_terminal(
    terminal: bool, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    told = threading.Event()
    monkeypatch.setattr(compilation, "PATIENCE", patience)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr.write", lambda line: (lines.append(line), told.set()))
    with compilation.said_if_long("compiling"):
        told.wait(30.0 if terminal and not patience else 0.0)
    assert lines == (["compiling\n"] if terminal and not patience else [])


def test_nan_in_a_branch_condition_equals_nan() -> None:
    """NaN equals NaN in a branch condition, and differs from a number."""
    A = HessianOperator(lambda x: (x**2).sum() * (1 if math.isnan(float(x[0].detach().log())) else 3), X, compile=True)
    for x, factor in ((-X, 2.0), (-2 * X, 2.0), (X, 6.0)):
        torch.testing.assert_close(A.at(x) @ X, factor * X)
