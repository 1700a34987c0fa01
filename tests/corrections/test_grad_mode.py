"""`torch.no_grad()` inside a function: what it computes is a constant by every route."""

import pytest
import torch
from torch.autograd import forward_ad

import hodiff

X, V = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)


def as_block(x):
    with torch.no_grad():
        return x.exp()


@torch.no_grad()
def as_decorator(x):
    return x.exp()


def switched(x):
    with torch.set_grad_enabled(False):
        return x.exp()


def nested(x):
    with torch.no_grad(), torch.no_grad():
        return x.exp()


def after_an_exception(x):
    try:
        with torch.no_grad():
            raise KeyError
    except KeyError:
        pass
    return as_block(x) * (1 + 0 * x)


WAYS = {each.__name__: each for each in (as_block, as_decorator, switched, nested, after_an_exception)}


def detached(x):
    return x.detach().exp()


def loss(constant):
    return lambda x: (constant(x) * x**3).sum()


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_it_is_a_constant_by_every_route(route, way, around):
    """The Hessian is diagonal: 6 exp(x) x."""
    with around():
        product = hodiff.hvp(loss(WAYS[way]), X, V, route=route)
    torch.testing.assert_close(product, 6 * X.exp() * X * V)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_a_constant_for_every_transform(way, around):
    f = loss(WAYS[way])
    gradient = 3 * X.exp() * X**2
    with around():
        for mode in ("forward", "reverse"):
            torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(X), gradient)
        derivatives = hodiff.directional_derivatives(f, X, V, order=3)
        by_torch = hodiff.corrected()(torch.func.hessian(f))(X)
        hvp = hodiff.HessianOperator(f, X, route="forward-over-reverse") @ V
    torch.testing.assert_close(derivatives[1], gradient @ V)
    torch.testing.assert_close(derivatives[2], (6 * X.exp() * X * V**2).sum())
    torch.testing.assert_close(derivatives[3], (6 * X.exp() * V**3).sum())
    torch.testing.assert_close(by_torch, (6 * X.exp() * X).diag())
    torch.testing.assert_close(hvp, 6 * X.exp() * X * V)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_clipping_divides_by_a_constant(route):
    """`torch.nn.utils` takes the norm of all gradients without a graph."""

    def clipped(x):
        gradients = [x**2, x.sin()]
        return sum((each / torch.nn.utils.get_total_norm(gradients)).sum() for each in gradients)

    expected = (2 - X.sin()) * V / torch.cat([X**2, X.sin()]).norm()
    torch.testing.assert_close(hodiff.hvp(clipped, X, V, route=route), expected)


def test_torch_goes_through():
    """Else nothing above proves anything."""
    f = loss(as_block)
    assert not torch.allclose(torch.func.jvp(f, (X,), (V,))[1], torch.func.grad(f)(X) @ V)


def test_what_comes_after_has_tangents_again():
    def f(x):
        with torch.no_grad():
            scale = x.norm()
        y = x.sin()
        with pytest.raises(KeyError), torch.no_grad():
            raise KeyError
        return (y * scale).sum() + x.prod()

    got = hodiff.directional_derivatives(f, X, V, order=1)[1]
    expected = (X.cos() * X.norm() * V).sum() + (X.prod() / X * V).sum()
    torch.testing.assert_close(got, expected)


def test_a_transform_inside_has_tangents_of_its_own():
    def f(x):
        with torch.no_grad():
            slope = torch.func.jvp(torch.sin, (X,), (V,))[1]
        return (slope * x).sum()

    torch.testing.assert_close(hodiff.directional_derivatives(f, X, V, order=1)[1], (X.cos() * V * V).sum())


def test_levels_that_users_open_are_theirs():
    """Who writes no_grad around dual numbers wants no graph, and tangents."""
    with hodiff.corrected(), forward_ad.dual_level(), torch.no_grad():
        y = forward_ad.make_dual(X, V).sin()
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, X.cos() * V)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_what_has_derivatives_may_be_marked_as_such(route):
    """As models do with what their embeddings return."""

    def f(x):
        y = x**2
        y.requires_grad_()
        return (y**2).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), 12 * X**2 * V)
    torch.testing.assert_close(hodiff.jacobian(f, mode="forward")(X), 4 * X**3)


def test_a_leaf_inside_a_transform_is_refused_as_by_torch():
    def f(x):
        return x.detach().requires_grad_().sum()

    with pytest.raises(RuntimeError, match="requires_grad_"):
        hodiff.jacobian(f, mode="forward")(X)
