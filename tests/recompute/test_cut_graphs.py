"""A Function whose backward cuts the graph raises an error, unless zeros are the correct derivative."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from custom_functions import custom, old_style
from torch import Tensor

import hodiff
from hodiff import RouteError

X = torch.tensor([0.5, -1.2], dtype=torch.float64)
V = torch.ones_like(X)
ZERO = torch.zeros_like(X)


class SavedSquare(torch.autograd.Function):
    """The square; subclasses define backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x


class WithoutGrad(SavedSquare):
    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 2 * g * ctx.saved_tensors[0]


class ByData(SavedSquare):
    @staticmethod
    def backward(ctx, g):
        return 2 * g.data * ctx.saved_tensors[0].data


class ByDetach(SavedSquare):
    @staticmethod
    def backward(ctx, g):
        return (2 * g * ctx.saved_tensors[0]).detach()


class ByNumPy(SavedSquare):
    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(2 * g.numpy() * ctx.saved_tensors[0].detach().numpy())


class ByKernel(SavedSquare):
    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(2 * g.detach().numpy() * ctx.saved_tensors[0].detach().numpy())


class IgnoresCotangent(torch.autograd.Function):
    """A Function that computes its gradient in forward, like some losses."""

    @staticmethod
    def forward(ctx, x):
        ctx.gradient = 2 * x
        return (x * x).sum()

    @staticmethod
    def backward(ctx, g):
        return ctx.gradient


class TransformedSquare(torch.autograd.Function):
    """A backward that cuts the graph but is accepted by torch.func, and a correct jvp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 2 * g * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, t):
        return 2 * ctx.saved_tensors[0] * t


CUT = (WithoutGrad, ByData, ByDetach, ByNumPy, ByKernel, IgnoresCotangent, TransformedSquare)

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "hvp": lambda f: hodiff.hvp(f, X, V),
    "hessian": lambda f: hodiff.hessian(f)(X),
    "hessian_matrix": lambda f: hodiff.hessian_matrix(f, X),
    "hessian_diagonal": lambda f: hodiff.hessian_diagonal(f)(X),
    "value_grad_hvp": lambda f: hodiff.value_grad_hvp(f, X, V),
    "grad_and_hvp": lambda f: hodiff.grad_and_hvp(f, X, V),
    "hvp_function": lambda f: hodiff.hvp_function(f)(X, V),
    "HessianOperator": lambda f: hodiff.HessianOperator(f, X) @ V,
    "to_dense": lambda f: hodiff.HessianOperator(f, X).to_dense(),
    "sparse.hessian": lambda f: hodiff.sparse.hessian(f)(X),
    "minimize": lambda f: hodiff.optimize.minimize(f, X, method="trust-ncg"),
}


@pytest.mark.parametrize("function", CUT)
def test_cut_backward_is_rejected_with_name_line_and_remedy(function: Any) -> None:
    for f in (lambda x: function.apply(x).sum(), lambda x: function.apply(x).pow(2).sum() + x.pow(4).sum()):
        with pytest.raises(
            RouteError, match=rf"{function.__name__}\.backward \(test_cut_graphs\.py:\d+\).*write it with"
        ):
            hodiff.hvp(f, X, V)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_second_derivative_rejects_a_cut_backward(transform: Any) -> None:
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward"):
        transform(lambda x: WithoutGrad.apply(x).pow(2).sum())


def test_operators_of_models_reject_a_cut_backward() -> None:
    # The tangent of a model is the derivative of its pullback.
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward"):
        hodiff.JacobianOperator(WithoutGrad.apply, X) @ V
    operator = hodiff.GaussNewtonOperator(
        lambda p, scale: WithoutGrad.apply(p * scale), torch.nn.functional.mse_loss, X, data=[(V, V)]
    )
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward"):
        operator @ V


@pytest.mark.parametrize("route", ["auto", "reverse-over-reverse", "forward-over-reverse"])
def test_hvp_inside_transforms_rejects_a_cut_backward(route: str) -> None:
    def product(x: Tensor) -> Tensor:
        return hodiff.hvp(lambda x: TransformedSquare.apply(x).sum(), x, V, route=route)

    with pytest.raises(RouteError, match=r"TransformedSquare\.backward"):
        product(X)
    with pytest.raises(RouteError, match=r"TransformedSquare\.backward"):
        torch.func.vmap(product)(X[None])


@pytest.mark.parametrize(
    "second",
    [
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(X),
        lambda f: torch.func.hessian(f)(X),
        lambda f: torch.func.jacrev(torch.func.jacrev(f))(X),
        lambda f: torch.func.jvp(torch.func.grad(f), (X,), (V,))[1],
    ],
    ids=["grad of grad", "hessian", "jacrev of jacrev", "jvp of grad"],
)
def test_torch_transforms_within_corrected_reject_a_cut_backward(second: Any) -> None:
    for f in (lambda x: TransformedSquare.apply(x).sum(), lambda x: (TransformedSquare.apply(x) ** 2).sum()):
        with pytest.raises(RouteError, match=r"TransformedSquare\.backward"), hodiff.corrected():
            second(f)


def test_autograd_within_corrected_rejects_a_cut_backward() -> None:
    leaf = X.clone().requires_grad_()
    with hodiff.corrected():
        for function in CUT:
            with pytest.raises(RouteError, match=rf"{function.__name__}\.backward.*create_graph"):
                torch.autograd.grad(function.apply(leaf), [leaf], V, create_graph=True)
            with pytest.raises(RouteError, match=rf"{function.__name__}\.backward"):
                function.apply(leaf).sum().backward(create_graph=True)
        # First derivatives, and Functions that are not on the path of differentiation, are accepted.
        (found,) = torch.autograd.grad((WithoutGrad.apply(X) * leaf).sum(), leaf, create_graph=True)
        torch.testing.assert_close(found, X * X)
        torch.testing.assert_close(torch.autograd.grad(WithoutGrad.apply(leaf).sum(), leaf)[0], 2 * X)
        # Outputs without rows and sparse outputs are accepted, and module hooks run once.
        empty = torch.ones(0, 2, requires_grad=True)
        assert torch.autograd.grad(RightTangent.apply(empty).sum(), empty, create_graph=True)[0].shape == (0, 2)
        sparse = RightTangent.apply(leaf).to_sparse()
        assert torch.equal(torch.autograd.grad(sparse, leaf, V.to_sparse(), create_graph=True)[0], 2 * X)
        layer, calls = torch.nn.Linear(2, 2, dtype=X.dtype), []
        layer.register_full_backward_hook(lambda *_: calls.append(1))
        torch.autograd.grad(layer(leaf).pow(2).sum(), leaf, create_graph=True)
        assert calls == [1]
    assert leaf.grad is None


class WithAttributes(torch.autograd.Function):
    """3 (M x)², with a context attribute of a common name."""

    @staticmethod
    def forward(matrix, x):
        return 3 * (matrix @ x) ** 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.outside = 3.0
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        matrix, x = ctx.saved_tensors
        return None, matrix.mT @ (2 * ctx.outside * g * (matrix @ x))


@pytest.mark.parametrize("matrix", [torch.eye(2).double(), torch.eye(2).double().to_sparse()], ids=["dense", "sparse"])
def test_context_attributes_and_sparse_operands_are_allowed(matrix: Tensor) -> None:
    with hodiff.corrected():
        inner = torch.func.grad(lambda x: WithAttributes.apply(matrix, x).sum())
        torch.testing.assert_close(torch.func.grad(lambda x: inner(x).sum())(X), 6 * V)


def test_route_that_uses_a_right_jvp_is_allowed() -> None:
    product = hodiff.hvp(lambda x: TransformedSquare.apply(x).sum(), X, V, route="reverse-over-forward")
    torch.testing.assert_close(product, 2 * V)


def test_cut_backward_is_rejected_where_the_gradient_is_zero() -> None:
    # The cotangent is zero at a minimum, so it gives no information.
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward"):
        hodiff.hvp(lambda x: (WithoutGrad.apply(x) - X.square()).square().sum(), X, V)


def test_cut_backward_inside_a_checkpoint_is_rejected() -> None:
    f = lambda x: hodiff.functions.checkpoint(WithoutGrad.apply, x).sum()  # noqa: E731
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward"):
        hodiff.hvp(f, X, V)
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward"):
        hodiff.JacobianOperator(lambda x: hodiff.functions.checkpoint(WithoutGrad.apply, x), X) @ V


def test_inner_loop_rejects_a_cut_backward() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(RouteError, match=r"WithoutGrad\.backward.*first_order"):
        hodiff.meta.adapt(lambda p, _: WithoutGrad.apply(p).sum(), x, None, hodiff.meta.SGD(0.1), 1)


def test_cut_rules_of_custom_vjp_and_custom_jvp_are_rejected() -> None:
    @hodiff.custom_vjp
    def square(x):
        return x * x

    def backward(x, cotangent):
        with torch.no_grad():
            return (2 * x * cotangent,)

    square.defvjp(lambda x: (x * x, x), backward)

    @hodiff.custom_jvp
    def by_tangents(x):
        return x * x

    @by_tangents.defjvp
    def rule(primals, tangents):
        with torch.no_grad():
            return primals[0] ** 2, 2 * primals[0] * tangents[0]

    with pytest.raises(RouteError, match=r"square\.backward \(test_cut_graphs\.py"):
        hodiff.hvp(lambda x: square(x).sum(), X, V)
    with pytest.raises(RouteError, match="computes outside of the graph"):
        hodiff.hvp(lambda x: square(x).sum() + x.pow(2).sum(), X, V, route="forward-over-reverse")
    with pytest.raises(RouteError, match="computes outside of the graph"):
        torch.func.jvp(square, (X,), (V,))
    for gradient in (lambda f: torch.func.grad(f)(X), lambda f: hodiff.hvp(f, X, V)):
        with pytest.raises(RouteError, match="computes outside of the graph"):
            gradient(lambda x: by_tangents(x).sum() + x.pow(2).sum())


class CutTangent(TransformedSquare):
    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, t):
        with torch.no_grad():
            return 2 * ctx.saved_tensors[0] * t


class RightTangent(CutTangent):
    @staticmethod
    def jvp(ctx, t):
        return 2 * ctx.saved_tensors[0] * t


class LinearTangent(RightTangent):
    @staticmethod
    def forward(x):
        return 3 * x

    @staticmethod
    def backward(ctx, g):
        return 3 * g

    @staticmethod
    def jvp(ctx, t):
        return 3 * t


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: hodiff.hvp(f, X, V, route="reverse-over-forward"),
        lambda f: hodiff.hvp(f, X, V, route="forward-over-forward"),
        lambda f: hodiff.hessian(f, route="reverse-over-forward")(X) @ V,
        lambda f: hodiff.laplacian(f)(X),
        lambda f: hodiff.directional_derivatives(f, X, V, order=2)[2],
        lambda f: hodiff.corrected(torch.func.grad(lambda x: torch.func.jvp(f, (x,), (V,))[1]))(X),
    ],
    ids=["rf", "ff", "hessian", "laplacian", "directional", "corrected"],
)
def test_cut_jvp_is_rejected(derivative: Any) -> None:
    for g in (lambda y: y.sum(), lambda y: y.pow(2).sum()):
        with pytest.raises(RouteError, match=r"CutTangent\.jvp \(test_cut_graphs\.py:\d+\)"):
            derivative(lambda x, g=g: g(CutTangent.apply(x)) + x.pow(3).sum())
        for function, plain in ((RightTangent, lambda x: x * x), (LinearTangent, lambda x: 3 * x)):
            found = derivative(lambda x, g=g, function=function: g(function.apply(x)))
            torch.testing.assert_close(found, derivative(lambda x, g=g, plain=plain: g(plain(x))))
    torch.testing.assert_close(hodiff.jacobian(CutTangent.apply, mode="forward")(X).diagonal(), 2 * X)


Tripled = old_style("Tripled", lambda x: (3 * x,), lambda ctx, g: 3 * g)


# A linear Function with a saved constant
Matrix = old_style("Matrix", lambda x, a: (a @ x, a), lambda ctx, g: (ctx.saved_tensors[0].T @ g, None))


Rounded = old_style("Rounded", lambda x: (x.round(),), lambda ctx, g: g)


Sign = old_style("Sign", lambda x: (x.sign(),), lambda ctx, g: torch.zeros_like(g))


Rectified = old_style("Rectified", lambda x: (x.relu(), (x > 0).to(x)), lambda ctx, g: g * ctx.saved_tensors[0])


# The first argument; every backward pass gives the second a gradient of one, as in mixtures of experts
WithAuxiliaryLoss = old_style(
    "WithAuxiliaryLoss", lambda x, loss: (x.clone(),), lambda ctx, g: (g, torch.ones((), dtype=g.dtype))
)


A = torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: Tripled.apply(x).sum(), ZERO),
        (lambda x: Tripled.apply(x).pow(2).sum(), 18 * V),
        (lambda x: Matrix.apply(x, A).sum(), ZERO),
        (lambda x: Matrix.apply(x, A).pow(2).sum(), 2 * A.T @ A @ V),
        (lambda x: Rounded.apply(x).sum(), ZERO),
        (lambda x: Rounded.apply(x).pow(2).sum(), 2 * V),
        (lambda x: Sign.apply(x).pow(2).sum() + x.sum(), ZERO),
        (lambda x: Rectified.apply(x).sum(), ZERO),
        (lambda x: Rectified.apply(x).pow(2).sum(), torch.tensor([2.0, 0.0], dtype=torch.float64)),
        (lambda x: (x.relu() * 3).sum(), ZERO),
        (lambda x: (x * x.detach()).sum(), ZERO),
        # The gradient does not go through the Function.
        (lambda x: (x * WithoutGrad.apply(x.detach().requires_grad_())).sum(), ZERO),
        (lambda x: (x * WithoutGrad.apply(x).detach()).sum(), ZERO),
    ],
)
def test_linear_and_deliberately_detached_functions_have_zero_derivatives(f: Any, expected: Tensor) -> None:
    torch.testing.assert_close(hodiff.hvp(f, X, V), expected)
    torch.testing.assert_close(hodiff.HessianOperator(f, X) @ V, expected)
    torch.testing.assert_close(hodiff.hessian(f)(X) @ V, expected)


class Clipped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.5, 0.5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: WithAuxiliaryLoss.apply(x, x.pow(3).sum()).pow(2).sum(),
        lambda x: 1e-3 * Clipped.apply(x).pow(2).sum(),
    ],
)
def test_nonlinear_backward_is_rejected(f: Any) -> None:
    for derivative in (lambda: hodiff.hvp(f, X, V), lambda: hodiff.HessianOperator(f, X) @ V):
        for _ in range(3):
            with pytest.raises(RouteError, match="is not linear in its cotangent"):
                derivative()


def test_cut_only_by_a_closed_over_tensor_is_allowed() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return 2 * g * x * w, (g * x * x).detach()

    w = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(hodiff.hvp(lambda x: Scaled.apply(x, w).sum(), X, V).detach(), 2 * w.detach())
    with pytest.raises(RouteError, match=r"Scaled\.backward"):
        hodiff.hvp(lambda w: Scaled.apply(w, w).sum(), w.detach(), V)


def test_formula_that_calls_an_operator_without_formula_is_rejected() -> None:
    slope = torch.library.custom_op(
        "hodiff_test::slope", lambda x, g: 2 * x * g, mutates_args=(), schema="(Tensor x, Tensor g) -> Tensor"
    )
    square = torch.library.custom_op(
        "hodiff_test::square", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    square.register_autograd(
        lambda ctx, g: slope(ctx.saved_tensors[0], g),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    with pytest.raises(RouteError, match="no autograd formula"):
        hodiff.hvp(lambda x: square(x).sum(), X, V)
    square.register_autograd(
        lambda ctx, g: (2 * ctx.saved_tensors[0] * g).detach(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    with pytest.raises(RouteError, match=r"hodiff_test::square\.backward \(test_cut_graphs"):
        hodiff.hvp(lambda x: square(x).sum(), X, V)


def test_adjoint_of_torchdiffeq_is_rejected() -> None:
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Field(torch.nn.Module):
        def forward(self, t, y):
            return y * y.sin()

    times = torch.tensor([0.0, 0.5], dtype=torch.float64)
    with pytest.raises(RouteError, match=r"OdeintAdjointMethod.*torchdiffeq\.odeint instead"):
        hodiff.hvp(lambda x: torchdiffeq.odeint_adjoint(Field(), x, times, method="rk4")[-1].sum(), X, V)


def test_event_of_torchdiffeq_is_rejected() -> None:
    """Its second derivative is 0 by torch."""
    torchdiffeq = pytest.importorskip("torchdiffeq")

    def fall(t, y):
        return torch.stack([y[1], -torch.ones_like(y[1])])

    def landing(height):
        start, zero = torch.cat([height, torch.zeros_like(height)]), torch.zeros((), dtype=torch.float64)
        return torchdiffeq.odeint_event(
            fall, start, zero, event_fn=lambda t, y: y[0], odeint_interface=torchdiffeq.odeint, rtol=1e-3, atol=1e-3
        )[0]

    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(RouteError, match=r"odeint_event has first derivatives only: .* hodiff\.implicit\.root"):
        hodiff.hvp(landing, one, one)


@pytest.mark.filterwarnings("ignore:.*the gradient by autograd is not the derivative")
def test_adjoint_of_torchdiffeq_in_functional_call_is_rejected() -> None:
    """Its backward calls the module after functional_call has put the module's own parameters back: zeros."""
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Field(torch.nn.Linear):
        def forward(self, t, y):
            return super().forward(y)

    class End(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.field = Field(2, 2, bias=False, dtype=torch.float64)

        def forward(self, x):
            times = torch.tensor([0.0, 0.5], dtype=torch.float64)
            return torchdiffeq.odeint_adjoint(self.field, x, times, method="rk4")[-1].square().sum()

    module = End()
    weight = module.field.weight.detach().clone()
    f = partial(torch.func.functional_call, module, args=(X,))
    products = (
        lambda: hodiff.hvp(lambda w: f({"field.weight": w}), weight, weight),
        lambda: hodiff.hessian(lambda w: f({"field.weight": w}))(weight),
        lambda: hodiff.HessianOperator(lambda w: f({"field.weight": w}), weight) @ weight,
    )
    for product in products:
        with pytest.raises(RouteError, match=r"OdeintAdjointMethod.*torchdiffeq\.odeint instead"):
            product()


@pytest.mark.slow
def test_second_derivative_of_a_compiled_function_names_the_way_that_works() -> None:
    """torch's double backward loses the derivative of a Function in code that dynamo captured, without an error."""
    compiled = torch.compile(lambda x: torch.nn.functional.layer_norm(x, (3,)).pow(3).sum(), backend="eager")
    x = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    with (
        hodiff.corrected(),
        pytest.raises(RouteError, match=r"compile the product \(torch\.compile of a call of hodiff\.hvp\)"),
    ):
        torch.autograd.grad(compiled(x), x, create_graph=True)


@pytest.mark.slow
def test_small_nonlinear_part_of_a_large_gradient_is_rejected() -> None:
    x = torch.linspace(-1, 1, 4_000_000, dtype=torch.float32)
    with pytest.raises(RouteError, match="is not linear in its cotangent"):
        hodiff.hvp(lambda x: WithAuxiliaryLoss.apply(x, x.pow(3).mean()).pow(2).sum(), x, torch.ones_like(x))


@pytest.mark.parametrize("route", ["auto", "reverse-over-reverse"])
@pytest.mark.parametrize("lost", [False, True])
def test_functions_generated_by_vmap_are_checked_as_written(route: str, lost: bool) -> None:
    def slope(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * (x.detach() if lost else x) ** 2 * g

    Cube = custom("Cube", lambda x: x**3, slope, vmap=True)

    f = lambda x: torch.func.vmap(Cube.apply)(x).sum()  # noqa: E731
    if lost:
        with pytest.raises(RouteError, match=r"Cube\.backward"):
            hodiff.hvp(f, X, V, route=route)
    else:
        torch.testing.assert_close(hodiff.hvp(f, X, V, route=route), 6 * X)
