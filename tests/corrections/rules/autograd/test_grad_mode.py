"""Results computed under `torch.no_grad()` inside a function are constants by every route."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from custom_functions import Square
from torch import nn
from torch.autograd import forward_ad

import hodiff
from hodiff.torch_internals.autograd.grad_mode import CONSTANTS

D = torch.float64
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


def by_set_grad_enabled(x):
    """Disable gradients by a call, as torch's optimizers do."""
    torch.set_grad_enabled(False)
    result = x.exp()
    torch.set_grad_enabled(True)
    return result


def of_data(x):
    return x.data.exp()


WAYS = {
    each.__name__: each
    for each in (as_block, as_decorator, switched, nested, after_an_exception, by_set_grad_enabled, of_data)
}


def detached(x):
    return x.detach().exp()


def loss(constant):
    return lambda x: (constant(x) * x**3).sum()


# Contexts around f; a mode that is set by a call has an effect only if it changes the mode.
AROUND = {"nothing": nullcontext, "no_grad": torch.no_grad, "corrected": hodiff.corrected}
CASES = [(way, around) for way in WAYS for around in AROUND if (way, around) != ("by_set_grad_enabled", "no_grad")]


@pytest.mark.parametrize(("way", "around"), CASES)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hvp_treats_no_grad_results_as_constants_by_every_route(route, way, around):
    """The Hessian is diagonal, with the elements 6 exp(x) x."""
    with AROUND[around]():
        product = hodiff.hvp(loss(WAYS[way]), X, V, route=route)
    torch.testing.assert_close(product, 6 * X.exp() * X * V)


@pytest.mark.parametrize(("way", "around"), CASES)
def test_every_transform_treats_no_grad_results_as_constants(way, around):
    f = loss(WAYS[way])
    gradient = 3 * X.exp() * X**2
    with AROUND[around]():
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


grad, vmap = torch.func.grad, torch.func.vmap
# The Hessian times a vector of ones, by nested reverse mode
NESTED = {
    "jacobian": lambda f: hodiff.jacobian(grad(f), mode="reverse")(X).sum(1),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sum())(X),
    "vjp of grad": lambda f: torch.func.vjp(grad(f), X)[1](torch.ones_like(X))[0],
    "vmap": lambda f: vmap(grad(lambda x: grad(f)(x).sum()))(X[None])[0],
    "vmap inside": lambda f: grad(lambda x: vmap(grad(f))(x[None]).sum())(X),
    "a graph": lambda f: torch.autograd.functional.vjp(grad(f), X, torch.ones_like(X))[1],
    "a graph and vmap": lambda f: torch.autograd.functional.vhp(lambda x: vmap(f)(x[None]).sum(), X, X**0)[1],
}


def of_data_of_a_gradient(x):
    return grad(lambda x: (x * x.data).sum())(x).data.exp()


@pytest.mark.parametrize("way", [*WAYS.values(), of_data_of_a_gradient], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", NESTED)
def test_nested_reverse_passes_treat_no_grad_results_as_constants(name, way):
    with hodiff.corrected():
        torch.testing.assert_close(NESTED[name](loss(way)), 6 * X.exp() * X)


def test_nested_reverse_passes_treat_data_as_constant():
    """The gradient of (x c)² with a constant c is 2 x c²."""
    slope = grad(lambda x: (x * x.data.sin()).square().sum())
    for mode in ("auto", "forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(slope, mode=mode)(X), (2 * X.sin() ** 2).diag())


def test_data_may_be_written_inside_a_transform():
    def f(x):
        y = x.exp()
        y.data.clamp_(max=1.5)
        return (y**2).sum()

    expected = torch.func.grad(f)(X)
    torch.testing.assert_close(hodiff.corrected()(torch.func.grad(f))(X), expected)


def in_place(x):
    y = x * 1
    y.detach_()
    return y.exp()


def test_detach_in_place_makes_a_constant():
    f = loss(in_place)
    gradient = 3 * X.exp() * X**2
    torch.testing.assert_close(hodiff.jacobian(f, mode="forward")(X), gradient)
    torch.testing.assert_close(hodiff.corrected()(grad(f))(X), gradient)
    product = hodiff.hvp(f, X, V, route="reverse-over-reverse")
    torch.testing.assert_close(product, 6 * X.exp() * X * V)


@pytest.mark.parametrize("route", hodiff.ROUTES[1:])
def test_detach_in_place_in_nested_transforms_is_rejected(route):
    """Torch detaches from the innermost transform only."""
    f = loss(in_place)
    with pytest.raises(hodiff.RouteError, match=r"detach_: inside nested transforms.*x = x\.detach\(\)"):
        hodiff.hvp(f, X, V, route=route)
    with pytest.raises(hodiff.RouteError, match="detach_: inside nested transforms"):
        hodiff.jacobian(grad(f), mode="reverse")(X)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_total_norm_of_gradient_clipping_is_constant(route):
    """`torch.nn.utils` computes the norm of all gradients without a graph."""

    def clipped(x):
        gradients = [x**2, x.sin()]
        return sum((each / torch.nn.utils.get_total_norm(gradients)).sum() for each in gradients)

    expected = (2 - X.sin()) * V / torch.cat([X**2, X.sin()]).norm()
    torch.testing.assert_close(hodiff.hvp(clipped, X, V, route=route), expected)


def summed(x):
    total = torch.zeros(3, dtype=D)
    total += x
    total[0] = x[1]
    return total


# Results of a no_grad block; views and Functions ignore torch's own switch.
MADE = {
    "a view": lambda x: x[:],
    "an element": lambda x: x[1].expand(3),
    "iteration": lambda x: torch.stack(list(x)),
    "a transposed matrix": lambda x: torch.outer(x, x).T[0],
    "a Function": Square.apply,
    "a Function of hodiff": hodiff.functions.silu,
    "a function with a rule": lambda x: F.layer_norm(x, (3,)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 3, 1)] * 3).flatten(),
    "solve": lambda x: torch.linalg.solve(torch.outer(x, x) + torch.eye(3, dtype=D), x),
    "in place": summed,
    "a batch": lambda x: torch.vmap(lambda x: hodiff.functions.silu(x) * x)(x),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False),
    "a root": lambda x: hodiff.implicit.root(lambda y, x: y**3 - x, lambda _, start, x: x ** (1 / 3))(x, x),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_factories_and_operators_under_no_grad_are_constants(name, route):
    """A sum of c x³ with a constant c has the Hessian 6 c x."""

    def constant(x):
        with torch.no_grad():
            return MADE[name](x * 1)

    expected = 6 * MADE[name](X) * X * V
    torch.testing.assert_close(hodiff.hvp(loss(constant), X, V, route=route), expected)
    gradient = hodiff.jacobian(loss(constant), mode="forward")(X)
    torch.testing.assert_close(gradient, 3 * MADE[name](X) * X**2)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_enable_grad_inside_no_grad_is_differentiated(route):
    def f(x):
        with torch.no_grad():
            with torch.enable_grad():
                y = x.exp()
            z = x.exp()
        return (y * z * x).sum()

    def by_hand(x):
        return (x.exp() * x.exp().detach() * x).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), hodiff.hvp(by_hand, X, V))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_optimizer_steps_are_constants(route, optimizer):
    def f(x):
        p = nn.Parameter(torch.ones(3, dtype=D))
        steps = optimizer([p], lr=0.1)
        p.grad = 2 * (p.detach() - x.detach())
        steps.step()
        return (p.detach() * x**2).sum() + (p * 0).sum().detach()

    by_reverse = hodiff.hvp(f, X, V, route="reverse-over-reverse")
    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), by_reverse)
    p = by_reverse / (2 * V)
    assert ((p - 1).sign() == (X - 1).sign()).all()


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_teacher_output_under_no_grad_is_constant(route):
    """The teacher has the parameters of the student, and its output is constant."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=D).eval()
    x = torch.randn(1, 3, 4, dtype=D)
    p = {name: each.detach() for name, each in layer.named_parameters()}
    v = {name: torch.randn_like(each) for name, each in p.items()}

    def by(teacher):
        def loss(p):
            said = torch.func.functional_call(layer, p, (x,))
            return (said - 2 * teacher(p)).pow(2).sum()

        return loss

    @torch.no_grad()
    def silent(p):
        return torch.func.functional_call(layer, p, (x,))

    expected = hodiff.hvp(by(lambda _: torch.func.functional_call(layer, p, (x,))), p, v)
    found = hodiff.hvp(by(silent), p, v, route=route)
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-7, atol=1e-9)


def test_grad_mode_switched_off_by_f_is_restored():
    def f(x):
        torch.set_grad_enabled(False)
        return (x**2).sum()

    try:
        hodiff.directional_derivatives(f, X, V, order=1)
    finally:
        torch.set_grad_enabled(True)
    with torch.no_grad():
        found = hodiff.directional_derivatives(lambda x: (x**2).sum(), X, V, order=1)[1]
    torch.testing.assert_close(found, 2 * X @ V)


def test_torch_alone_is_wrong():
    """The tests above would prove nothing if torch alone were right."""
    f = loss(as_block)
    assert not torch.allclose(torch.func.jvp(f, (X,), (V,))[1], torch.func.grad(f)(X) @ V)


def test_tangents_return_after_no_grad():
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


def test_transform_inside_no_grad_keeps_its_tangents():
    def f(x):
        with torch.no_grad():
            slope = torch.func.jvp(torch.sin, (X,), (V,))[1]
        return (slope * x).sum()

    torch.testing.assert_close(hodiff.directional_derivatives(f, X, V, order=1)[1], (X.cos() * V * V).sum())


def test_dual_levels_of_users_keep_tangents_under_no_grad():
    """no_grad around the user's own dual numbers drops the graph and keeps tangents."""
    with hodiff.corrected(), forward_ad.dual_level(), torch.no_grad():
        y = forward_ad.make_dual(X, V).sin()
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, X.cos() * V)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_requires_grad_of_a_differentiated_tensor_has_no_effect(route):
    """Models mark the outputs of their embeddings by requires_grad_()."""

    def f(x):
        y = x**2
        y.requires_grad_()
        return (y**2).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), 12 * X**2 * V)
    torch.testing.assert_close(hodiff.jacobian(f, mode="forward")(X), 4 * X**3)


LEAVES = {
    "made of x": lambda x: x.detach().requires_grad_(),
    "made of another": lambda x: V.clone().requires_grad_(),
    "from outside": lambda x: OUTSIDE.requires_grad_(),
}
OUTSIDE = V.clone()


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_gradients_by_a_leaf_made_inside_match(leaf, route):
    """As in force fields and gradient penalties: the gradient of w³ c³ by a constant c is 3 w³ c², a cube of w."""

    def f(w):
        c = LEAVES[leaf](w)
        (slope,) = torch.autograd.grad((w**3 * c**3).sum(), c, create_graph=True)
        return slope.sum()

    c = X if leaf == "made of x" else V
    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route).detach(), 18 * X * c**2 * V)
    for mode in ("forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(X).detach(), 9 * X**2 * c**2)
    OUTSIDE.requires_grad_(False)


def test_leaf_made_inside_a_batch_is_rejected():
    def f(x):
        c = V.clone().requires_grad_()
        return (torch.autograd.grad((x**4 * c**2).sum(), c, create_graph=True)[0]).sum()

    with pytest.raises(hodiff.RouteError, match=r"requires_grad_: called inside torch.func.vmap.*torch.func.grad"):
        hodiff.hessian(f, route="forward-over-forward")(X)
    torch.testing.assert_close(hodiff.hessian(f)(X), (24 * X**2 * V).diag())
    torch.testing.assert_close(hodiff.corrected()(torch.func.vmap(torch.func.grad(f)))(X[None]), 8 * (X**3 * V)[None])


# Dense forward-over-forward also runs the function without tangents, in a batch of directions.
@pytest.mark.parametrize("route", hodiff.ROUTES[:3])
def test_requires_grad_of_a_differentiated_tensor_has_no_effect_in_batches(route):
    """Checkpointed models mark their hidden states by requires_grad_()."""

    def f(x):
        return ((x**2).requires_grad_() ** 2).sum()

    torch.testing.assert_close(hodiff.hessian(f, route=route)(X), (12 * X**2).diag())


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_gradients_by_the_input_itself_match(route):
    """As in residuals of differential equations."""

    def f(x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
        return (slope**2).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), 480 * X**4 * V)


def test_thread_state_exists_before_compilation():
    """An attribute that appears while a first product is compiled would fail dynamo's guards."""
    with ThreadPoolExecutor(1) as pool:
        assert "depth" in pool.submit(lambda: vars(CONSTANTS)).result()


def test_frames_with_unhashable_code_are_handled():
    """Code written by dynamo may have a dict among its constants."""
    plain = by_set_grad_enabled.__code__
    rewritten = FunctionType(plain.replace(co_consts=(*plain.co_consts, {})), globals())
    with pytest.raises(TypeError, match="unhashable"):
        hash(rewritten.__code__)
    torch.testing.assert_close(
        hodiff.hvp(lambda x: (x**2 * rewritten(x)).sum(), X, V, route=hodiff.ROUTES[-1]), 2 * X.exp() * V
    )


class Converting(nn.Module):
    """Converts its own layer in forward, as the router of Switch Transformers does."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(3, 3).to(dtype)

    def forward(self, x):
        return torch.tanh(self.layer.to(torch.float64)(x)).sum()


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_dtype_conversion_without_effect_is_allowed(route):
    torch.manual_seed(0)
    model = Converting(D)
    before, plain = model.layer.weight.data_ptr(), nn.Sequential(model.layer, nn.Tanh())
    p = {name: each.detach() for name, each in model.named_parameters()}
    by_inputs = hodiff.hvp(model, X, V, route=route)
    by_weights = hodiff.hvp(lambda p: torch.func.functional_call(model, p, X), p, p, route=route)
    torch.testing.assert_close(by_inputs, hodiff.hvp(lambda x: plain(x).sum(), X, V))
    renamed = {name.replace("layer.", "0."): each for name, each in p.items()}
    expected = hodiff.hvp(lambda p: torch.func.functional_call(plain, p, X).sum(), renamed, renamed)
    torch.testing.assert_close(by_weights["layer.weight"], expected["0.weight"])
    # The module's storage is unchanged, and contains no tensor of a transform.
    assert model.layer.weight.data_ptr() == before


# Forward-over-forward is left out because it first evaluates the function once.
@pytest.mark.parametrize("route", hodiff.ROUTES[1:3])
def test_dtype_conversion_inside_a_transform_is_rejected(route):
    model = Converting(torch.float32)
    with pytest.raises(hodiff.RouteError, match=r"Tensor\.data: expected no assignment .* got torch.float64"):
        hodiff.hvp(model, X, V, route=route)
    assert model.layer.weight.dtype == torch.float32


TRANSFORMS = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (V,)),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, V])),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    **{
        route: lambda f, route=route: hodiff.hvp(lambda x: f(x).sum(), X, V, route=route) for route in hodiff.ROUTES[1:]
    },
}


@pytest.mark.parametrize("function", ["jacobian", "hessian"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_autograd_functional_inside_is_right_or_rejected(name, function):
    """PyTorch also raises in forward mode and under vmap, where it detaches the inputs."""
    f = getattr(torch.autograd.functional, function)
    with hodiff.corrected(), pytest.raises(hodiff.errors.RouteError, match=r"torch\.func\.jacrev"):
        TRANSFORMS[name](lambda x: f(lambda y: (y**3).sum(), x) * x.sum())
    if name == "grad":
        with hodiff.corrected():
            found = TRANSFORMS[name](lambda x: f(lambda y: (y**4).sum(), x, create_graph=True))
        expected = TRANSFORMS[name](lambda x: 4 * x**3 if function == "jacobian" else (12 * x**2))
        torch.testing.assert_close(found, expected)
