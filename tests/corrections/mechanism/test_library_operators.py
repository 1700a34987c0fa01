"""Operators of torch.library: every transform works with one registered backward formula, and raises without one."""

import warnings

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import hodiff

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)
V = torch.tensor([1.0, 0.5, -0.3], dtype=torch.float64)

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered"),
]


@torch.library.custom_op("hodiff_libraries::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() ** 2)


square.register_autograd(
    lambda ctx, g: 2 * g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("hodiff_libraries::exponential", mutates_args=())
def exponential(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.exp(x.numpy()))


# The formula uses the output, which must be differentiated as well.
exponential.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("hodiff_libraries::pair", mutates_args=())
def pair(x: torch.Tensor, scale: float, power: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return scale * x.sin(), x**power


def keep(ctx, inputs, output):
    ctx.scale, ctx.power = inputs[1:]
    ctx.save_for_backward(inputs[0])


def pull_pair(ctx, g, h):
    (x,) = ctx.saved_tensors
    gradient = g * ctx.scale * x.cos() + h * ctx.power * x ** (ctx.power - 1)
    return gradient if ctx.needs_input_grad[0] else None, None, None


pair.register_autograd(pull_pair, setup_context=keep)


@torch.library.custom_op("hodiff_libraries::joined", mutates_args=())
def joined(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(xs) ** 2


joined.register_autograd(
    lambda ctx, g: [2 * part * x for part, x in zip(g.split(1), ctx.saved_tensors, strict=True)],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]),
)


@torch.library.custom_op("hodiff_libraries::bare", mutates_args=())
def bare(x: torch.Tensor) -> torch.Tensor:
    return x**2


CASES = {
    "square": (square, lambda x: x**2),
    "exponential": (exponential, torch.exp),
    "pair": (lambda x: sum(pair(x, 3.0)), lambda x: 3 * x.sin() + x**2),
    "by name": (lambda x: pair(x, power=3, scale=2.0)[1], lambda x: x**3),
    "joined": (lambda x: joined(list(x.split(1))), lambda x: x**2),
    "packet": (torch.ops.hodiff_libraries.square, lambda x: x**2),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def functions(request):
    f, plain = request.param
    return f, plain, lambda x: f(x).pow(2).sum() + f(x).prod(), lambda x: plain(x).pow(2).sum() + plain(x).prod()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_second_derivatives_match_by_every_route(functions, route):
    _, _, f, plain = functions
    torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), hodiff.hvp(plain, X, V))


def test_first_derivatives_match(functions):
    f, plain, scalar, plain_scalar = functions
    expected = hodiff.jacobian(plain)(X)
    for mode in ("auto", "forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(X), expected)
    with hodiff.corrected():
        torch.testing.assert_close(torch.func.jvp(f, (X,), (V,))[1], expected @ V)
        torch.testing.assert_close(torch.func.grad(scalar)(X), torch.func.grad(plain_scalar)(X))
        torch.testing.assert_close(torch.func.hessian(scalar)(X), hodiff.hessian(plain_scalar)(X))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(X, V))).tangent
        torch.testing.assert_close(tangent, expected @ V)


def test_sparse_jacobian_matches(functions):
    f, plain, _, _ = functions
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no rule for the dependencies of")
        found = hodiff.sparse.jacobian(lambda x: f(x) * x)(X)
    torch.testing.assert_close(found.to_dense(), hodiff.jacobian(lambda x: plain(x) * x)(X))


@pytest.mark.one_in(3)
def test_taylor_mode_matches(functions):
    _, _, f, plain = functions
    torch.testing.assert_close(hodiff.laplacian(f)(X), hodiff.laplacian(plain)(X))
    for found, expected in zip(
        hodiff.directional_derivatives(f, X, V, order=3),
        hodiff.directional_derivatives(plain, X, V, order=3),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_operator_without_formula_is_rejected():
    for route in hodiff.ROUTES:
        with pytest.raises(hodiff.RouteError, match=r"hodiff_libraries.*bare"):
            hodiff.hvp(lambda x: bare(x).sum() + x.sum(), X, V, route=route)
    with pytest.raises(hodiff.RouteError, match="register_autograd"):
        hodiff.jacobian(lambda x: bare(x) + x, mode="forward")(X)
    with hodiff.corrected(), pytest.raises(NotImplementedError, match="register_autograd"):
        torch.func.jvp(lambda x: bare(x) + x, (X,), (V,))
    with pytest.raises(hodiff.RouteError, match="register_autograd"):
        hodiff.laplacian(lambda x: bare(x).sum())(X)
    # A constant result needs no formula.
    torch.testing.assert_close(
        hodiff.hvp(lambda x: (bare(X) * x**2).sum(), X, V, route="forward-over-forward"), 2 * X**2 * V
    )


def test_operator_without_autograd_kernel_is_rejected():
    library = torch.library.Library("hodiff_kernels", "DEF")
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", lambda x: torch.from_numpy(x.detach().numpy() ** 3), "CPU")
    cube = torch.ops.hodiff_kernels.cube
    for route in hodiff.ROUTES:
        with pytest.raises(hodiff.RouteError, match=r"autograd kernel|hodiff_kernels\.cube"):
            hodiff.hvp(lambda x: (cube(x) * x).sum(), X, V, route=route)
    with pytest.raises(hodiff.RouteError, match=r"hodiff_kernels\.cube"):
        hodiff.jacobian(lambda x: cube(x) * x)(X)


def test_detached_formula_is_rejected():
    cut = torch.library.custom_op(
        "hodiff_libraries::cut", lambda x: x**2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    cut.register_autograd(
        lambda ctx, g: (2 * g * ctx.saved_tensors[0]).detach(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    with pytest.raises(hodiff.RouteError, match="computes outside of the graph"):
        hodiff.jacobian(lambda x: cut(x) + x, mode="forward")(X)


def test_from_custom_op_within_corrected_does_not_recurse():
    """The function of from_custom_op and the operator's correction do not call each other endlessly."""
    f = hodiff.authoring.from_custom_op(exponential)
    with hodiff.corrected(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(X, V))).tangent
    torch.testing.assert_close(found, V * X.exp())


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_torch_function_modes_see_the_operator():
    with Seen() as seen:
        hodiff.authoring.from_custom_op(square)(X)
    assert square._opoverload in seen.functions


@torch.library.custom_op("hodiff_libraries::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("hodiff_libraries::square_to", mutates_args=("out",))
def square_to(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x)


def _of_doubled(x):
    y = x * 1
    double_(y)
    return (y**3).sum()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: hodiff.hvp(f, X, V),
        lambda f: hodiff.hessian_matrix(f, X),
        lambda f: hodiff.HessianOperator(f, X) @ V,
        lambda f: hodiff.jacobian(f)(X),
    ],
)
def test_operator_that_writes_into_a_differentiated_tensor_is_rejected(derivative):
    with pytest.raises(hodiff.RouteError, match=r"double_.* writes into x, which is differentiated"):
        derivative(_of_doubled)


def test_operator_that_writes_results_into_an_argument_warns():
    def f(x):
        out = torch.empty_like(x)
        square_to(x, out)
        return (out * x).sum()

    with pytest.warns(
        hodiff.HodiffWarning, match="square_to.* writes into out, from arguments that are differentiated"
    ):
        hodiff.hvp(f, X, V)


def test_operator_that_writes_into_constants_is_accepted():
    def f(x):
        count = torch.zeros(3, dtype=torch.float64)
        square_to(count + 1, count)
        with torch.no_grad():
            double_(x.clone())
        return (count * x**3).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V), 6 * X * V)
