"""Custom Functions as in torch's documentation, in every nesting of forward and reverse passes.

The reference is the same function in elementary operators, and the derivatives of x³ in closed form.
"""

from itertools import product
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from custom_functions import cubed_slope, custom, in_place_multiple, old_style
from torch import nn
from torch.autograd import Function
from torch.func import grad, jacfwd, jvp, vmap

import hodiff

D = torch.float64
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
V = torch.tensor([1.0, 0.7, -0.3], dtype=D)


class Saved(Function):
    """x² y from saved inputs, with a generated batching rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 2 * x * y * g, x * x * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return 2 * x * y * x_t + x * x * y_t


class Batched:
    """Adds a batching rule that applies the Function again."""

    generate_vmap_rule = False

    @classmethod
    def vmap(cls, info, in_dims, x, y):
        moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, y), in_dims, strict=True)]
        return cls.apply(*moved), 0


class Unmaterialized(Batched, Saved):
    """Receives None for zero tangents."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        Saved.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return (0 if x_t is None else 2 * x * y * x_t) + (0 if y_t is None else x * x * y_t)


class Attributes(Batched, Saved):
    """Keeps inputs as attributes of the context, one of them in a list."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x, ctx.others = inputs[0], [inputs[1]]

    @staticmethod
    def backward(ctx, g):
        x, (y,) = ctx.x, ctx.others
        return 2 * x * y * g, x * x * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, (y,) = ctx.x, ctx.others
        return 2 * x * y * x_t + x * x * y_t


class Hidden(Attributes):
    """Keeps inputs in an object that torch does not inspect."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.inputs = lambda: inputs

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.inputs()
        return 2 * x * y * g, x * x * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.inputs()
        return 2 * x * y * x_t + x * x * y_t


class Nested(Saved):
    """Calls another Function in its rules."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 2 * x * y * g, Saved.apply(x, torch.ones_like(x)) * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return 2 * x * y * x_t + Saved.apply(x, torch.ones_like(x)) * y_t


class Output(Saved):
    """Saves its output."""

    @staticmethod
    def forward(x, y):
        return torch.exp(x * y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx, g):
        x, y, z = ctx.saved_tensors
        return y * z * g, x * z * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y, z = ctx.saved_tensors
        return (y * x_t + x * y_t) * z


class Several(Function):
    """Has two differentiable outputs, one non-differentiable output, a non-tensor argument, and a default."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y, power, name=None):
        return x**power * y, (x * y).sin(), x > y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.power, _ = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, g, h, _):
        (x, y), p = ctx.saved_tensors, ctx.power
        c = (x * y).cos() * h
        return p * x ** (p - 1) * y * g + c * y, x**p * g + c * x, None, None

    @staticmethod
    def jvp(ctx, x_t, y_t, *_):
        (x, y), p = ctx.saved_tensors, ctx.power
        return p * x ** (p - 1) * y * x_t + x**p * y_t, (x * y).cos() * (x_t * y + x * y_t), None


class Normalized(Function):
    """Calls a torch function in its rules whose own derivatives need corrections."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return F.layer_norm(x, x.shape[-1:]) * y

    setup_context = Saved.setup_context

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        z, pull = torch.func.vjp(lambda x: F.layer_norm(x, x.shape[-1:]), x)
        return pull(y * g)[0], z * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        z, z_t = jvp(lambda x: F.layer_norm(x, x.shape[-1:]), (x,), (x_t,))
        return z_t * y + z * y_t


def several(x, y):
    first, second, third = Several.apply(x, y, 3)
    return first + second**2 + third


def normalized(x, y):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * y


def elementary(x, y):
    return x * x * y


CASES = {
    "saved": (Saved.apply, elementary),
    "unmaterialized": (Unmaterialized.apply, elementary),
    "attributes": (Attributes.apply, elementary),
    "hidden": (Hidden.apply, elementary),
    "nested": (Nested.apply, elementary),
    "output": (Output.apply, lambda x, y: torch.exp(x * y)),
    "several": (several, lambda x, y: x**3 * y + (x * y).sin() ** 2 + (x > y)),
    "normalized": (Normalized.apply, normalized),
}


def unbatched(f):
    return lambda x: (f(x.sin(), x.exp()) * x).sum()


def batched(f):
    """Return a function that applies f to a batch of both arguments, and of one argument along the last dimension."""

    def total(x):
        both = vmap(f)(torch.stack([x.sin(), x]), torch.stack([x.exp(), 2 * x]))
        one = vmap(f, in_dims=(1, None))(torch.stack([x.sin(), x], 1), x.exp())
        return (both * x).sum() + one.square().sum()

    return total


def derivative_by_passes(f, modes):
    """Derivative of a scalar function by passes, the innermost first; all passes but the last are directional."""
    for mode in modes[:-1]:
        f = _forward_pass(f) if mode == "forward" else _reverse_pass(f)
    return grad(f) if modes[-1] == "reverse" else jacfwd(f)


def _forward_pass(f):
    return lambda x: jvp(f, (x,), (V,))[1]


def _reverse_pass(f):
    return lambda x: (grad(f)(x) * V).sum()


@pytest.mark.one_in(18)
@pytest.mark.parametrize("arrange", [unbatched, batched])
@pytest.mark.parametrize("name", CASES)
def test_every_nesting_matches_closed_form(name, arrange):
    function, truth = CASES[name]
    for modes in (*product(("reverse", "forward"), repeat=2), ("forward",) * 3, ("forward", "reverse", "forward")):
        with hodiff.corrected():
            found = derivative_by_passes(arrange(function), modes)(X)
        torch.testing.assert_close(
            found, derivative_by_passes(arrange(truth), modes)(X), msg=lambda text, m=modes: f"{m}: {text}"
        )


def test_torch_alone_is_wrong():
    """The tests above would prove nothing if torch alone were right."""
    slope = _forward_pass(unbatched(Saved.apply))
    assert not torch.allclose(jacfwd(slope)(X), jacfwd(_forward_pass(unbatched(elementary)))(X))


Cube = custom("Cube", lambda x: x**3, cubed_slope, cubed_slope, vmap=True)


def cubes(x):
    return Cube.apply(x).sum()


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hvp_and_hessian_match_by_every_route(route):
    torch.testing.assert_close(hodiff.hvp(cubes, X, V, route=route), 6 * X * V)
    torch.testing.assert_close(hodiff.hessian(cubes, route=route)(X), torch.diag(6 * X))


class CubeCut(Cube):
    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0].detach() ** 2


class CubeUnrecorded(Cube):
    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 3 * g * ctx.saved_tensors[0] ** 2


@pytest.mark.parametrize("function", [CubeCut, CubeUnrecorded])
def test_backward_that_is_not_differentiated_may_cut_the_graph(function):
    """Reverse-over-forward mode differentiates the forward rule only."""

    def slope(x):
        return jvp(lambda x: function.apply(x).square().sum(), (x,), (V,))[1]

    with hodiff.corrected():
        torch.testing.assert_close(grad(slope)(X), 30 * X**4 * V)
        with pytest.raises(hodiff.RouteError, match=f"{function.__name__}.backward"):
            grad(lambda x: grad(slope)(x).sum())(X)


def test_directional_derivatives_match_closed_form():
    found = hodiff.directional_derivatives(Cube.apply, X, V, order=4)
    truth = (X**3, 3 * X**2 * V, 6 * X * V**2, 6 * V**3, 0 * X)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_uncorrected_second_derivative_is_zero():
    second = hodiff.directional_derivatives(Cube.apply, X, V, order=2, correct=False)[2]
    assert torch.equal(second, 0 * X)


def test_forward_jacobian_of_a_jacobian_matches():
    inner = hodiff.jacobian(Cube.apply, mode="forward")
    found = hodiff.jacobian(lambda x: inner(x).sum(0), mode="forward")(X)
    torch.testing.assert_close(found, torch.diag(6 * X))


class CubeLayer(nn.Module):
    def forward(self, x):
        return Cube.apply(x)


def test_function_in_a_module_matches():
    found = hodiff.directional_derivatives(nn.Sequential(CubeLayer(), nn.Flatten(0)), X, V, order=2)[2]
    torch.testing.assert_close(found, 6 * X * V**2)


def test_autograd_around_jvp_matches():
    """Corrections reach rules if `torch.autograd` runs around `torch.func.jvp`."""
    x = X.clone().requires_grad_()
    with hodiff.corrected():
        (found,) = torch.autograd.grad(_forward_pass(unbatched(Normalized.apply))(x), x)
    torch.testing.assert_close(found, grad(_forward_pass(unbatched(normalized)))(X))


InPlace = in_place_multiple("InPlace", 3)


def test_in_place_function_matches():
    found = hodiff.directional_derivatives(lambda x: InPlace.apply(x.exp()) * x, X, V, order=2)[2]
    torch.testing.assert_close(found, 3 * X.exp() * (X + 2) * V**2)


class Registered(type(Function)):
    """A metaclass that registers its classes, as plugins do."""

    known: ClassVar = []

    def __init__(cls, name, bases, members):
        super().__init__(name, bases, members)
        Registered.known.append(cls)


class OfAPlugin(Cube, metaclass=Registered):
    pass


def test_class_is_left_unchanged():
    before = dict(vars(OfAPlugin))
    second = hodiff.directional_derivatives(OfAPlugin.apply, X, V, order=2)[2]
    torch.testing.assert_close(second, 6 * X * V**2)
    assert dict(vars(OfAPlugin)) == before
    assert Registered.known == [OfAPlugin]
    assert OfAPlugin.__subclasses__() == []


class Changed(Cube):
    pass


def test_jvp_replaced_later_is_used(monkeypatch):
    assert hodiff.directional_derivatives(Changed.apply, X, V, order=2)[2].any()
    monkeypatch.setattr(Changed, "jvp", staticmethod(lambda ctx, t: 0 * t * ctx.saved_tensors[0]))
    assert not hodiff.directional_derivatives(Changed.apply, X, V, order=2)[2].any()


class Troubled(Cube):
    calls = 0

    @staticmethod
    def forward(x):
        Troubled.calls += 1
        raise RuntimeError("an error of the user's")


def test_error_in_jvp_is_raised_once():
    with pytest.raises(RuntimeError, match=r"^an error of the user's$"):
        hodiff.directional_derivatives(Troubled.apply, X, V, order=2)
    assert Troubled.calls == 1


OldStyle = old_style("OldStyle", lambda x: (x**3, x), cubed_slope)


class WithoutTangent(Cube):
    jvp = Function.jvp


@pytest.mark.parametrize("function", [OldStyle, WithoutTangent])
def test_functions_without_jvp_work_by_the_default_route(function):
    """Functions without a forward rule are right by the default route; Taylor mode applies `backward` twice."""
    torch.testing.assert_close(hodiff.hvp(lambda x: function.apply(x).sum(), X, V), 6 * X * V)
    if function is OldStyle:
        with pytest.raises(hodiff.RouteError, match="setup_context"):
            hodiff.directional_derivatives(function.apply, X, V, order=2)
    else:
        derivatives = hodiff.directional_derivatives(function.apply, X, V, order=2)
        torch.testing.assert_close(derivatives, (X**3, 3 * X**2 * V, 6 * X * V**2))


@pytest.mark.slow
def test_check_without_corrections_reports_hd114():
    (finding,) = hodiff.check(Cube, X, scipy=False, correct=False).findings
    assert finding.code == "HD114"
    assert "hodiff.corrected()" in finding.remedy
    report = hodiff.check(Cube, X, scipy=False)
    assert report.ok
    assert report.codes == ("HD410",)
    assert hodiff.check(hodiff.corrected()(Cube.apply), X, scipy=False).codes == ()


def test_table_lists_function_apply():
    rows = {row.name: row for row in hodiff.corrections.table()}
    assert rows["torch.autograd.Function.apply"].routes == ("forward-over-forward",)


# sin(x) with a generated batching rule, and without a jvp
WithoutJvp = custom("WithoutJvp", lambda x: x.sin(), lambda ctx, g: g * ctx.saved_tensors[0].cos(), vmap=True)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_batched_function_without_jvp_is_right_or_rejected(route):
    x = torch.tensor([0.5, -1.0], dtype=torch.float64)
    f = lambda x: torch.vmap(WithoutJvp.apply)(x).sum()  # noqa: E731
    if route == "reverse-over-reverse":
        torch.testing.assert_close(hodiff.hvp(f, x, x, route=route), -x.sin() * x)
        return
    with pytest.raises(hodiff.RouteError, match=f"{route}: WithoutJvp: it has generate_vmap_rule=True, and no jvp"):
        hodiff.hvp(f, x, x, route=route)
    with pytest.raises(hodiff.RouteError, match="forward: WithoutJvp: it has generate_vmap_rule=True, and no jvp"):
        hodiff.jacobian(f, mode="forward")(x)
