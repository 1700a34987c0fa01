"""Bad input: the exact type of the error, and a message with the argument, the expected and the given value."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from custom_functions import cubed_slope, custom
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hodiff import (
    ROUTES,
    HessianOperator,
    HodiffError,
    HodiffWarning,
    InputError,
    RouteError,
    directional_derivatives,
    hessian,
    hessian_diagonal,
    hessian_matrix,
    hvp,
    jacobian,
)
from hodiff.corrections.mechanism.registry import CORRECTIONS

X = torch.tensor([1.0, 2.0, 3.0])
TREE = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(3)}


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def tree_cubes(x: dict[str, Tensor]) -> Tensor:
    return sum((leaf**3).sum() for leaf in x.values())


def changed(**leaves: Any) -> dict[str, Any]:
    return {**TREE, **{f"layer.{name}": leaf for name, leaf in leaves.items()}}


BAD_DIRECTIONS = {
    "shape": (
        lambda: hvp(tree_cubes, TREE, changed(weight=torch.ones(3, 2))),
        ["hvp", "v", "['layer.weight']", "expected (2, 3) float32", "got (3, 2) float32"],
    ),
    "shape that would broadcast": (
        lambda: hvp(cubes, X, torch.ones(())),
        ["hvp", "v", "expected (3,) float32", "got () float32"],
    ),
    "dtype": (
        lambda: hvp(tree_cubes, TREE, changed(bias=torch.ones(3, dtype=torch.float64))),
        ["hvp", "v", "['layer.bias']", "expected (3,) float32", "got (3,) float64"],
    ),
    "device": (
        lambda: hvp(tree_cubes, TREE, changed(bias=torch.ones(3, device="meta"))),
        ["hvp", "v", "['layer.bias']", "expected (3,) float32", "got (3,) float32 on meta"],
    ),
    "missing leaf": (
        lambda: hvp(tree_cubes, TREE, {"layer.weight": torch.ones(2, 3)}),
        ["hvp", "v", "['layer.bias']"],
    ),
    "additional leaf": (
        lambda: hvp(tree_cubes, TREE, changed(scale=torch.ones(()))),
        ["hvp", "v", "['layer.scale']"],
    ),
    "tensor for a tree": (lambda: hvp(tree_cubes, TREE, torch.ones(9)), ["hvp", "v", "['layer.weight']"]),
    "no tensor": (lambda: hvp(cubes, X, [1.0, 0.0, 0.0]), ["hvp", "v"]),
    "NumPy array": (lambda: hvp(cubes, X, np.ones(3)), ["hvp", "v", "expected (3,) float32", "ndarray"]),
    "of directional derivatives": (
        lambda: directional_derivatives(tree_cubes, TREE, changed(weight=torch.ones(3, 2)), order=2),
        ["directional_derivatives", "v", "['layer.weight']", "expected (2, 3) float32", "got (3, 2) float32"],
    ),
}

# Every transform as a function of f and x, for the errors that they share
TRANSFORMS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "hvp": lambda f, x: hvp(f, x, torch.utils._pytree.tree_map(torch.ones_like, x)),
    "hessian": lambda f, x: hessian(f)(x),
    "hessian_matrix": lambda f, x: hessian_matrix(f, x),
    "hessian_diagonal": lambda f, x: hessian_diagonal(f)(x),
    "jacobian": lambda f, x: jacobian(f)(x),
    "directional_derivatives": lambda f, x: directional_derivatives(
        f, x, torch.utils._pytree.tree_map(torch.ones_like, x), order=2
    ),
}
OF_SCALARS = [name for name in TRANSFORMS if name not in {"jacobian", "directional_derivatives"}]


def raises(call: Callable[[], Any], parts: list[str], error: type[Exception] = InputError) -> str:
    """Check that the call raises exactly this error, with every part in its message; return the message."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    return message


@pytest.mark.parametrize("fault", BAD_DIRECTIONS)
def test_rejects_direction_of_another_structure(fault: str) -> None:
    raises(*BAD_DIRECTIONS[fault])


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("leaf", "parts"),
    [
        (torch.arange(3), ["(3,) int64", "floating-point", ".to("]),
        (torch.ones(3, dtype=torch.bool), ["(3,) bool", "floating-point"]),
    ],
    ids=["integer", "bool"],
)
def test_rejects_leaf_without_derivative(leaf: Tensor, parts: list[str], name: str) -> None:
    raises(lambda: TRANSFORMS[name](lambda x: x["good"].sum(), {"good": X, "bad": leaf}), [name, "['bad']", *parts])


@pytest.mark.parametrize("name", ["hessian", "hessian_diagonal", "jacobian"])
def test_rejects_complex_leaf(name: str) -> None:
    leaf = torch.ones(3, dtype=torch.complex64)
    parts = [name, "['bad']", "(3,) complex64", "real", "view_as_real"]
    raises(lambda: TRANSFORMS[name](lambda x: x["good"].sum(), {"good": X, "bad": leaf}), parts)


@pytest.mark.parametrize("name", ["hessian", "hessian_matrix", "hessian_diagonal", "jacobian"])
def test_rejects_leaf_that_is_no_tensor(name: str) -> None:
    call = TRANSFORMS[name]
    raises(lambda: call(lambda x: x["good"].sum(), {"good": X, "rate": 0.1}), [name, "['rate']", "float", "0.1"])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_rejects_point_without_leaves(name: str) -> None:
    raises(lambda: TRANSFORMS[name](lambda x: torch.ones(()), {}), [name, "tensor"])


@pytest.mark.parametrize("name", OF_SCALARS)
@pytest.mark.parametrize(
    ("f", "parts"),
    [
        (lambda x: x**2, ["()", "(3,) float32"]),
        (lambda x: (x**2).sum(0, keepdim=True), ["()", "(1,) float32"]),
        (lambda x: (x**2).sum().to(torch.complex64), ["real", "complex64"]),
        (lambda x: (x**2).sum().long(), ["int64"]),
        (lambda x: float((x.detach() ** 2).sum()), ["float"]),
        (lambda x: None, ["NoneType"]),
        (lambda x: ((x**2).sum(), x), ["tuple", "has_aux"]),
    ],
    ids=["vector", "one element", "complex", "integer", "float", "None", "pair"],
)
def test_rejects_output_that_is_no_scalar(f: Callable[[Tensor], Any], parts: list[str], name: str) -> None:
    raises(lambda: TRANSFORMS[name](f, X), [name, *parts])


FROZEN = nn.Linear(3, 1)

# autograd sees no dependence on x in these results; zeros would be silently wrong.
INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: torch.ones(()),
    "detached": lambda x: (x.detach() ** 2).sum(),
    "item": lambda x: torch.tensor((x**2).sum().detach().item()),
    "module's own parameters": lambda x: FROZEN(torch.ones(3)).sum(),
}


@pytest.mark.parametrize("fault", INDEPENDENT)
@pytest.mark.parametrize("route", ["auto", *ROUTES])
def test_rejects_output_that_does_not_depend_on_the_input(route: str, fault: str) -> None:
    f = INDEPENDENT[fault]
    parts = ["does not depend", "detach", "functional_call"]
    raises(lambda: hvp(f, X, X, route=route), ["hvp", *parts])
    raises(lambda: hessian_matrix(f, X, route=route), ["hessian_matrix", *parts])
    raises(lambda: hessian(f, route=route)(X), ["hessian", *parts])
    raises(lambda: hessian_diagonal(f, route=route)(X), ["hessian_diagonal", *parts])


def test_numpy_inside_the_function_is_named_as_the_reason() -> None:
    """The error says that the output does not depend on x, and names NumPy as the reason."""

    def f(x: Tensor) -> Tensor:
        return torch.as_tensor(np.sum(x.detach().numpy() ** 2))

    for name in ("hvp", "hessian_matrix"):
        raises(lambda name=name: TRANSFORMS[name](f, X), [name, "does not depend", "NumPy"])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_error_of_the_function_is_raised_unchanged(name: str) -> None:
    """hodiff does not hide or rename errors of the user's code."""

    def f(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        TRANSFORMS[name](f, X)

    def mismatched(x: Tensor) -> Tensor:
        return (x @ torch.ones(4, 2)).sum()

    with pytest.raises(RuntimeError, match="shapes"):
        TRANSFORMS[name](mismatched, X)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("f", [None, 3.0, X], ids=["None", "float", "tensor"])
def test_rejects_non_callable(f: Any, name: str) -> None:
    raises(lambda: TRANSFORMS[name](f, X), [name, "callable"])


WITH_ROUTE: dict[str, Callable[[Any], Any]] = {
    "hvp": lambda route: hvp(cubes, X, X, route=route),
    "hessian": lambda route: hessian(cubes, route=route)(X),
    "hessian_matrix": lambda route: hessian_matrix(cubes, X, route=route),
    "hessian_diagonal": lambda route: hessian_diagonal(cubes, route=route)(X),
}


@pytest.mark.parametrize("name", WITH_ROUTE)
@pytest.mark.parametrize("route", ["forward", "reverse_over_reverse", "", None, 2, ["auto"]])
def test_rejects_unknown_route(route: Any, name: str) -> None:
    raises(lambda: WITH_ROUTE[name](route), [name, "route", repr(route), "'auto'", *map(repr, ROUTES)])


@pytest.mark.parametrize("mode", ["fwd", "", None, 1, "reverse-over-reverse"])
def test_rejects_unknown_mode(mode: Any) -> None:
    raises(lambda: jacobian(cubes, mode=mode)(X), ["jacobian", "mode", repr(mode), "'auto'", "'forward'", "'reverse'"])


WITH_OPTIONS: dict[str, Callable[..., Any]] = {
    "hessian": lambda **options: hessian(cubes, **options)(X),
    "hessian_matrix": lambda **options: hessian_matrix(cubes, X, **options),
    "hessian_diagonal": lambda **options: hessian_diagonal(cubes, **options)(X),
    "jacobian": lambda **options: jacobian(cubes, **options)(X),
}


@pytest.mark.parametrize("name", WITH_OPTIONS)
@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, "big", True, [3]])
def test_rejects_bad_chunk_size(chunk_size: Any, name: str) -> None:
    raises(lambda: WITH_OPTIONS[name](chunk_size=chunk_size), [name, "chunk_size", "positive int", repr(chunk_size)])


@pytest.mark.parametrize("name", WITH_OPTIONS)
@pytest.mark.parametrize("randomness", ["different", "none", None])
def test_rejects_bad_randomness(randomness: Any, name: str) -> None:
    raises(
        lambda: WITH_OPTIONS[name](randomness=randomness), [name, "randomness", repr(randomness), "'error'", "'same'"]
    )


@pytest.mark.parametrize("transform", [hessian, hessian_diagonal, jacobian])
@pytest.mark.parametrize("argnums", [1, -2, (0, 1), (), (0, 0), (0, -1), 0.0, "x", True, [0], None])
def test_rejects_bad_argnums(argnums: Any, transform: Callable[..., Any]) -> None:
    raises(lambda: transform(cubes, argnums)(X), [transform.__name__, "argnums", repr(argnums)])


@pytest.mark.parametrize("point", [X, {"w": X}, [X], (X, X)], ids=["tensor", "dict", "list", "tuple"])
@pytest.mark.parametrize("transform", [hessian, jacobian, hessian_diagonal])
def test_point_given_as_argnums_raises_with_the_right_call(point: Any, transform: Callable[..., Any]) -> None:
    """The call that is given the point raises, and its message has the call that was meant."""
    raises(lambda: transform(cubes, point), ["argnums: expected an int", f"hodiff.{transform.__name__}(f)(x)"])


@pytest.mark.parametrize("transform", [hessian, hessian_diagonal, jacobian])
def test_rejects_differentiated_argument_by_keyword(transform: Callable[..., Any]) -> None:
    raises(lambda: transform(cubes)(x=X), [transform.__name__, "position"])


@pytest.mark.parametrize("order", [-1, 1.5, "2", None, True])
def test_rejects_bad_order(order: Any) -> None:
    raises(lambda: directional_derivatives(cubes, X, X, order=order), ["directional_derivatives", "order", repr(order)])


WITH_AUX: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "hvp": lambda f: hvp(f, X, X, has_aux=True),
    "hessian": lambda f: hessian(f, has_aux=True)(X),
    "hessian_matrix": lambda f: hessian_matrix(f, X, has_aux=True),
    "hessian_diagonal": lambda f: hessian_diagonal(f, has_aux=True)(X),
    "jacobian": lambda f: jacobian(f, has_aux=True)(X),
}


@pytest.mark.parametrize("name", WITH_AUX)
@pytest.mark.parametrize(
    "f", [cubes, lambda x: (cubes(x), x, x), lambda x: [cubes(x), x]], ids=["tensor", "triple", "list"]
)
def test_has_aux_requires_a_pair(f: Callable[[Tensor], Any], name: str) -> None:
    raises(lambda: WITH_AUX[name](f), [name, "has_aux", "(output, aux)"])


OnceDifferentiable = custom("OnceDifferentiable", lambda x: x**3, once_differentiable(cubed_slope))


WithoutForwardRule = custom("WithoutForwardRule", lambda x: x**3, cubed_slope, vmap=True)


@pytest.mark.parametrize("name", OF_SCALARS)
def test_once_differentiable_raises_instead_of_returning_zero(name: str) -> None:
    """torch returns zeros here, because the backward pass returns constants."""
    message = raises(
        lambda: TRANSFORMS[name](lambda x: OnceDifferentiable.apply(x).sum(), X),
        ["once_differentiable", "OnceDifferentiable"],
        RouteError,
    )
    assert all(route in message for route in ROUTES)


@pytest.mark.parametrize("route", ROUTES)
def test_function_without_jvp_raises_by_forward_routes(route: str) -> None:
    """Reverse mode works, other routes quote the Function's error, and "auto" finds the route that works."""

    def f(x: Tensor) -> Tensor:
        return WithoutForwardRule.apply(x).sum()

    assert hvp(f, X, X).equal(6 * X * X)
    assert hessian_matrix(f, X).equal(torch.diag(6 * X))
    if route == "reverse-over-reverse":
        assert hvp(f, X, X, route=route).equal(6 * X * X)
    elif "over-forward" in route:
        raises(lambda: hvp(f, X, X, route=route), ["hvp", route, "WithoutForwardRule: You must", "jvp"], RouteError)
        raises(
            lambda: hessian_matrix(f, X, route=route),
            ["hessian_matrix", route, "WithoutForwardRule", "jvp"],
            RouteError,
        )


@pytest.mark.parametrize("name", OF_SCALARS)
def test_operator_without_second_derivative_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardsigmoid = torch.ops.aten.hardsigmoid
    monkeypatch.delitem(CORRECTIONS, hardsigmoid)
    message = raises(lambda: TRANSFORMS[name](lambda x: hardsigmoid(x).sum(), X), [name], RouteError)
    assert all(route in message for route in ROUTES)


# Returns a scalar with the gradient (x₁, −x₀), which is the gradient of no function
Rotation = custom(
    "Rotation",
    lambda x: x.sum(),
    lambda ctx, g: g * torch.stack([ctx.saved_tensors[0][1], -ctx.saved_tensors[0][0]]),
    vmap=True,
)


@pytest.mark.parametrize("name", ["hessian", "hessian_matrix"])
def test_asymmetric_hessian_warns(name: str) -> None:
    """The average of the two halves would look like a Hessian, hence a warning."""
    with pytest.warns(HodiffWarning, match=f"{name}: .*not symmetric") as caught:
        TRANSFORMS[name](Rotation.apply, X[:2])
    assert caught[0].filename == __file__


def test_error_classes_derive_from_builtin_errors() -> None:
    """Users can catch one class, or the built-in class that they already catch."""
    assert issubclass(InputError, HodiffError)
    assert issubclass(InputError, ValueError)
    assert issubclass(RouteError, HodiffError)
    assert issubclass(RouteError, RuntimeError)


@pytest.mark.parametrize("name", OF_SCALARS)
def test_failed_call_leaves_the_input_unchanged(name: str) -> None:
    x = X.clone().requires_grad_()
    for f in (lambda y: y**2, lambda y: OnceDifferentiable.apply(y).sum(), lambda y: y.detach().sum()):
        with pytest.raises(HodiffError):
            TRANSFORMS[name](f, x)
    assert x.equal(X)
    assert x.grad is None
    assert x.requires_grad
    assert torch.is_grad_enabled()
    # No transform's level is left open, so the next derivative is right.
    torch.testing.assert_close(TRANSFORMS["hessian_matrix"](cubes, X), torch.diag(6 * X))


CONTAINERS = {
    "dict": nn.ParameterDict({"w": torch.ones(2)}),
    "list": nn.ParameterList([torch.ones(2)]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_rejects_parameter_containers_with_a_remedy(kind):
    x = CONTAINERS[kind]
    for refused in (lambda: hvp(lambda x: x["w"].sum(), x, x), lambda: HessianOperator(torch.sum, x)):
        with pytest.raises(InputError, match=rf"got Parameter{kind.title()} .*; pass {kind}\(\.\.\.\)"):
            refused()
    v = {"dict": dict, "list": list}[kind](x)
    f = lambda x: sum((each**2).sum() for each in torch.utils._pytree.tree_leaves(x))  # noqa: E731
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(hvp(f, v, v))[0], 2 * torch.ones(2))


def test_rejects_module_with_a_remedy():
    with pytest.raises(InputError, match=r"got Linear .*; pass dict\(module.named_parameters\(\)\)"):
        hvp(torch.sum, nn.Linear(1, 1), None)


@pytest.mark.parametrize("route", ROUTES)
def test_gradient_by_a_closed_over_parameter_is_right_or_raises(route):
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)

    def f(x):
        (g,) = torch.autograd.grad(((w * x) ** 2).sum(), w, create_graph=True)
        return g.square().sum()

    if route == ROUTES[0]:
        torch.testing.assert_close(hvp(f, x, torch.ones_like(x), route=route), 48 * x**2)
        return
    for derive in (hvp, lambda f, x, v, route: hessian_matrix(f, x, route=route)):
        with pytest.raises(RouteError, match="to a tensor that it closes over"):
            derive(f, x, torch.ones_like(x), route=route)


LACKING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "Gamma": (lambda a: torch.distributions.Gamma(a, 1.0).rsample(), "detach the sample"),
    "Dirichlet": (lambda a: torch.distributions.Dirichlet(a).rsample() ** 2, "detach the sample"),
    "Beta": (lambda a: torch.distributions.Beta(a, a).rsample(), "detach the sample"),
    "gammainc": (lambda a: torch.special.gammainc(a, torch.ones_like(a)), "define the derivative by hodiff.custom_jvp"),
    "gammaincc": (lambda a: torch.special.gammaincc(a, torch.ones_like(a)), "define the derivative"),
    "zeta": (lambda a: torch.special.zeta(a, torch.ones_like(a)), "define the derivative by hodiff.custom_jvp"),
}


@pytest.mark.parametrize("name", LACKING)
def test_derivatives_that_torch_lacks_have_a_remedy(name):
    f, remedy = LACKING[name]
    a = torch.tensor([1.5, 2.5], dtype=torch.float64)

    def total(a):
        return f(a).sum()

    for derive in (
        lambda: hvp(total, a, a),
        lambda: hessian(total, randomness="same")(a),
        lambda: HessianOperator(total, a, randomness="fixed") @ a,
    ):
        with pytest.raises(RouteError, match=remedy):
            derive()


def test_sparse_bags_of_embeddings_have_a_remedy():
    w = torch.ones(3, 2)

    def f(w):
        return (F.embedding_bag(torch.tensor([[0, 1]]), w, sparse=True) ** 2).sum()

    for derive in (lambda: hvp(f, w, w), lambda: hessian(f)(w), lambda: HessianOperator(f, w) @ w):
        with pytest.raises(RouteError, match=r"does not take sparse=True.*set sparse=False"):
            derive()
