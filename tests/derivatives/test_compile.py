"""torch.compile(fullgraph=True) around hodiff. Compilation is slow, so each test compiles one small thing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import case as named
from cases import ravel
from slow_cases import slow_except
from torch import Tensor
from torch.nn.functional import layer_norm, softmax

from hodiff import (
    ROUTES,
    InputError,
    corrected,
    directional_derivatives,
    hessian,
    hessian_diagonal,
    hessian_matrix,
    hvp,
    jacobian,
)


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    torch.compiler.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """Compile by aot_eager, which captures and differentiates like the default backend, without a C++ compiler."""
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("route", slow_except(["auto", *ROUTES], ["auto", ROUTES[1]]))
def test_compiled_hvp_matches_eager(route: str) -> None:
    case = named("mlp")
    x, args = case.inputs()
    v = case.vector()
    function = compiled(lambda x, v, *args: hvp(case.function, x, v, *args, route=route))
    torch.testing.assert_close(function(x, v, *args), hvp(case.function, x, v, *args))
    # The same graph at a second point shows that nothing of the first point became a constant.
    other, other_v = case.inputs(seed=5)[0], case.vector(seed=6)
    torch.testing.assert_close(function(other, other_v, *args), hvp(case.function, other, other_v, *args))


# Inductor imports TorchScript, which warns of its deprecation.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_hvp_compiled_by_inductor_matches_eager() -> None:
    case = named("tied")
    x, args = case.inputs()
    v = case.vector()
    function = compiled(lambda x, v, *args: hvp(case.function, x, v, *args), backend="inductor")
    torch.testing.assert_close(function(x, v, *args), hvp(case.function, x, v, *args))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic_regression", pytest.param("nested", marks=pytest.mark.slow)])
def test_compiled_dense_derivatives_match_eager(name: str) -> None:
    case = named(name)
    x, args = case.inputs()

    def everything(x: Any, *args: Any) -> tuple[Any, ...]:
        return (
            hessian(case.function)(x, *args),
            hessian_matrix(case.function, x, *args),
            hessian_diagonal(case.function)(x, *args),
        )

    torch.testing.assert_close(compiled(everything)(x, *args), everything(x, *args))


@pytest.mark.slow
def test_compiled_dense_derivatives_accept_other_sizes() -> None:
    """The compiler replaces sizes by symbols at the second size."""

    def f(x: dict[str, Tensor]) -> Tensor:
        return (x["a"].sin().sum() * x["b"].exp().sum()).tanh()

    function = compiled(lambda x: (hessian_matrix(f, x), hessian(f)(x)))
    for n in (3, 5):
        x = {"a": torch.randn(n), "b": torch.randn(n + 1)}
        torch.testing.assert_close(function(x), (hessian_matrix(f, x), hessian(f)(x)))


SIZED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hvp": lambda w, x: hvp(loss_of_rows, w, w.cos(), x),
    "hvp-by-rows": lambda w, x: hvp(lambda x: loss_of_rows(w, x), x, x.cos()),
    "jacobian": lambda w, x: jacobian(lambda w: layer_norm(x, (3,), w).sin(), mode="reverse")(w),
    "hessian": lambda w, x: hessian(loss_of_rows)(w, x),
    "hessian-by-rows": lambda w, x: hessian(lambda x: loss_of_rows(w, x))(x),
}


def loss_of_rows(w: Tensor, x: Tensor) -> Tensor:
    return layer_norm(x, (3,), w).tanh().pow(2).mean() + softmax(x * w, -1).pow(2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "hvp")) for each in SIZED])
def test_two_graphs_serve_all_sizes(name: str) -> None:
    function, generator = compiled(SIZED[name]), torch.Generator().manual_seed(0)
    w = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    for count, rows in enumerate((3, 5, 2, 7, 4, 11, 6, 8, 9, 10)):
        x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        with torch.compiler.set_stance("default" if count < 2 else "fail_on_recompile"):
            found = function(w, x)
        torch.testing.assert_close(found, SIZED[name](w, x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_compiled_jacobian_matches_eager(mode: str) -> None:
    def function(x: Tensor) -> Tensor:
        return jacobian(lambda y: torch.tanh(y).cumsum(0), mode=mode)(x)

    x = torch.linspace(-1, 1, 4, dtype=torch.float64)
    torch.testing.assert_close(compiled(function)(x), function(x))


def test_hvp_of_a_compiled_function_matches() -> None:
    """The product differentiates a function that the user compiled."""
    case = named("softmax_regression")
    x, args = case.inputs()
    v = case.vector()
    model = torch.compile(case.function, backend="eager")
    torch.testing.assert_close(hvp(model, x, v, *args), hvp(case.function, x, v, *args))


@pytest.mark.slow
def test_compiled_third_derivative_matches() -> None:
    case = named("log_sum_exp")
    x, _ = case.inputs()
    v = case.vector()

    def curvature(x: Tensor) -> Tensor:
        return ravel(hvp(case.function, x, v)) @ v

    function = compiled(lambda x: torch.func.grad(curvature)(x))
    torch.testing.assert_close(function(x), torch.func.grad(curvature)(x))


X = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
CONSTANT = torch.ones(3, dtype=torch.float64)
INDEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    **{route: lambda x, route=route: hvp(lambda _: CONSTANT.sum(), x, x, route=route) for route in ROUTES},
    "hessian": lambda x: hessian(lambda _: CONSTANT.sum())(x),
    "hessian_diagonal": lambda x: hessian_diagonal(lambda _: CONSTANT.sum())(x),
    "jacobian": lambda x: jacobian(lambda _: CONSTANT.sin())(x),
    "jacobian forward": lambda x: jacobian(lambda _: CONSTANT.sin(), mode="forward")(x),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads .grad where a graph breaks
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_constant_output_is_rejected_in_compiled_code(name: str, fullgraph: bool) -> None:
    # With a full graph the compiler raises its own error, which names hodiff's.
    error, words = (Exception, "InputError") if fullgraph else (InputError, "does not depend on the differentiated")
    with pytest.raises(error, match=words):
        torch.compile(INDEPENDENT[name], backend="eager", fullgraph=fullgraph)(X)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_compiled_directional_derivatives_match_eager(order: int) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x**3 * x.sin(), (3,)).exp() + x

    v = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    found = compiled(lambda x: directional_derivatives(f, x, v, order=order))(X)
    # Derivatives along the line through x, by nested reverse mode
    t = torch.zeros((), dtype=torch.float64)
    along: Callable[[Tensor], Tensor] = lambda t: f(X + t * v)  # noqa: E731
    with corrected():
        for each in found:
            torch.testing.assert_close(each, along(t))
            along = torch.func.jacrev(along)
