"""Subclasses of Tensor inside `corrected()`: right, or an error, by every route."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import hodiff

D = torch.float64
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
V = torch.tensor([1.0, 0.0, 0.5], dtype=D)
WEIGHT = torch.tensor([1.0, 2.0, 3.0], dtype=D)


class Plain(Tensor):
    """Adds nothing to Tensor."""


class Counting(Tensor):
    """Counts calls, and passes them to torch."""

    called = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.called += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Unwrapping(Tensor):
    """Calls torch with plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [each.as_subclass(Tensor) if isinstance(each, cls) else each for each in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OfItsOwn(Tensor):
    """Computes layer_norm by primitives."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.layer_norm:
            return standardized(args[0].as_subclass(Tensor)) * kwargs["weight"].as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


class Hiding(Tensor):
    """Calls torch with all modes disabled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class Dispatching(Tensor):
    """Intercepts operators, and passes them to torch."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Weight(nn.Parameter):
    """A subclass of Parameter that adds nothing."""


def standardized(x):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()


def by_hand(x):
    return (standardized(x) * WEIGHT).sin().sum()


def layer(weight):
    return lambda x: F.layer_norm(x, (3,), weight).sin().sum()


def plain(result):
    return result.detach().as_subclass(Tensor)


TRUTH = torch.func.hessian(by_hand)(X) @ V
ORDINARY = (Plain, Counting, Unwrapping, OfItsOwn, Dispatching)


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("subclass", ORDINARY)
def test_hvp_of_subclasses_matches_by_every_route(subclass, route):
    weight = WEIGHT.as_subclass(subclass)
    for f, x, v in (
        (layer(weight), X, V),
        (layer(WEIGHT), X.as_subclass(subclass), V.as_subclass(subclass)),
    ):
        torch.testing.assert_close(plain(hodiff.hvp(f, x, v, route=route)), TRUTH, rtol=1e-10, atol=1e-12)
    if subclass is Counting:
        assert Counting.called


@pytest.mark.parametrize("weight", [Weight(WEIGHT.clone()), nn.Buffer(WEIGHT.clone())], ids=["parameter", "buffer"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_parameter_and_buffer_subclasses_match(weight, route):
    torch.testing.assert_close(hodiff.hvp(layer(weight), X, V, route=route), TRUTH, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("subclass", ORDINARY)
def test_directional_derivatives_and_transforms_of_subclasses_match(subclass):
    f, second = layer(WEIGHT.as_subclass(subclass)), V @ TRUTH
    values = hodiff.directional_derivatives(f, X, V, order=3)
    torch.testing.assert_close(plain(values[2]), second, rtol=1e-10, atol=1e-12)
    third = torch.func.jvp(lambda x: torch.func.hessian(by_hand)(x) @ V, (X,), (V,))[1] @ V
    torch.testing.assert_close(plain(values[3]), third, rtol=1e-9, atol=1e-12)
    for mode in ("forward", "reverse"):
        rows = hodiff.jacobian(hodiff.jacobian(f, mode=mode), mode=mode)(X)
        torch.testing.assert_close(plain(rows) @ V, TRUTH, rtol=1e-9, atol=1e-12)
    with hodiff.corrected():
        product = torch.func.grad(lambda x: torch.func.jvp(f, (x,), (V,))[1])(X)
        x = X.clone().as_subclass(subclass).requires_grad_()
        (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
        (by_graph,) = torch.autograd.grad(gradient, x, V)
    torch.testing.assert_close(plain(product), TRUTH, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(plain(by_graph), TRUTH, rtol=1e-10, atol=1e-12)


def test_result_classes_match_torch():
    x = X.as_subclass(Plain)
    with hodiff.corrected():
        found = F.layer_norm(x, (3,)), x.detach(), x.shape, x + 1, torch.linalg.det(torch.eye(2).as_subclass(Plain))
    expected = F.layer_norm(x, (3,)), x.detach(), x.shape, x + 1, torch.linalg.det(torch.eye(2).as_subclass(Plain))
    assert [type(each) for each in found] == [type(each) for each in expected]


def test_subclass_that_refuses_raises_the_error_of_torch():
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    x = X.as_subclass(Refusing)
    for mode in (torch.enable_grad(), hodiff.corrected()):
        with mode, pytest.raises(TypeError, match=r"[Nn]o implementation found|Multiple dispatch failed"):
            F.layer_norm(x, (3,))


FORWARD = hodiff.ROUTES[2:]


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_subclass_that_hides_its_data_is_right_or_rejected(route):
    f = layer(WEIGHT.as_subclass(Hiding))
    if route in FORWARD:
        with pytest.raises(hodiff.errors.RouteError, match=r"layer_norm: Hiding.*reverse-over-reverse"):
            hodiff.hvp(f, X, V, route=route)
        return
    torch.testing.assert_close(plain(hodiff.hvp(f, X, V, route=route)), TRUTH, rtol=1e-10, atol=1e-12)


def test_subclass_that_hides_its_data_has_first_derivatives():
    f = layer(WEIGHT.as_subclass(Hiding))
    rows = hodiff.jacobian(f, mode="forward")(X)
    torch.testing.assert_close(plain(rows), torch.func.grad(by_hand)(X), rtol=1e-10, atol=1e-12)
    # A graph through it would require a second derivative.
    with pytest.raises(hodiff.errors.RouteError, match="Hiding"), hodiff.corrected():
        torch.func.jvp(f, (X.clone().requires_grad_(),), (V,))


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_wrapper_subclass_is_right_or_rejected(route):
    f = layer(TwoTensor(WEIGHT, WEIGHT.clone()))
    refused = ""
    try:
        product = hodiff.hvp(f, X, V, route=route)
    except hodiff.errors.RouteError as error:
        refused = str(error)
    if refused:  # part of the function has no rule
        assert "'reverse-over-reverse'" in refused
        assert route != "reverse-over-reverse"
    else:
        torch.testing.assert_close(product.a.detach(), TRUTH, rtol=1e-10, atol=1e-12)


class Doubling(Tensor):
    """Doubles the results of some functions, and has an attribute and a method."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + result if func in (Tensor.sin, Tensor.mul, F.layer_norm) else result

    def scaled(self):
        return self / self.scale


class DoublingPlainly(Doubling):
    """Doubles the results of some functions, and returns plain tensors, also from `detach`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return 2 * result if func in (Tensor.sin, Tensor.mul, F.layer_norm) else result


def doubled(x):
    return F.layer_norm(x, (3,)).pow(3).sum() + x.sin().pow(3).sum() + (x * x).cos().sum() + x.scaled().exp().sum()


def doubled_by_hand(x):
    return 8 * (F.layer_norm(x, (3,)).pow(3) + x.sin().pow(3)).sum() + (2 * x**2).cos().sum() + (x / 3.0).exp().sum()


DERIVATIVES = {
    **{route: lambda f, x, v, route=route: hodiff.hvp(f, x, v, route=route) for route in hodiff.ROUTES},
    "without corrections": lambda f, x, v: hodiff.hvp(f, x, v, correct=False),
    "a direction of the class": lambda f, x, v: hodiff.hvp(f, x, v.as_subclass(type(x))),
    "forward": lambda f, x, _: hodiff.jacobian(f, mode="forward")(x),
    "reverse": lambda f, x, _: hodiff.jacobian(f, mode="reverse")(x),
    "along a line": lambda f, x, v: hodiff.directional_derivatives(f, x, v, order=3),
    "operator": lambda f, x, v: hodiff.HessianOperator(f, x) @ v,
    "operator elsewhere": lambda f, x, v: hodiff.HessianOperator(f, torch.ones_like(V)).at(x) @ v,
    "Jacobian's operator": lambda f, x, v: hodiff.JacobianOperator(lambda x: f(x)[None], x) @ v,
    "matrix": lambda f, x, _: hodiff.hessian_matrix(f, x),
    "leaves": lambda f, x, _: hodiff.hessian(lambda xs: f(xs["x"]))({"x": x})["x"]["x"],
    "sparse": lambda f, x, _: hodiff.sparse.hessian(f)(x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("subclass", [Doubling, DoublingPlainly])
def test_subclass_receives_each_function_once(subclass, name):
    x = X.as_subclass(subclass)
    x.scale = 3.0
    torch.testing.assert_close(doubled(x).as_subclass(Tensor), doubled_by_hand(X))
    found = DERIVATIVES[name](doubled, x, V)
    expected = DERIVATIVES[name](doubled_by_hand, X, V)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_taylor_mode_rejects_subclasses_with_torch_function():
    for take in (hodiff.laplacian(doubled), lambda x: hodiff.taylor.jet(doubled, (x,), ([V],))):
        with pytest.raises(hodiff.errors.RouteError, match="got Doubling, whose __torch_function__"):
            take(X.as_subclass(Doubling))
