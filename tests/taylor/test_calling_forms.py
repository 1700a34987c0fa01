"""Tests of unusual calls of torch, against torch's values and forward mode with corrections."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from custom_functions import cubed_slope, custom, in_place_multiple
from mpmath_series import D
from torch import nn
from torch.nn import functional

import hodiff
from hodiff.taylor import jet, value_grad_laplacian
from hodiff.torch_operators.table import functions_named

Q = torch.tensor([1.0, 2.0, 3.0, 1.5], dtype=D)
V = torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=D)


def written_through(take):
    """Return a function that writes through a view of a value, if there is one, and returns the value."""

    def f(x):
        y = x * x
        take(y).mul_(2)
        return y

    return f


FORMS = {
    "keywords": lambda x: torch.mul(other=x, input=x) + torch.pow(x, exponent=3) + torch.sub(input=x, other=2 * x),
    "matmul by keywords": lambda x: torch.matmul(x, other=x),
    "power 0": lambda x: (x**0).sum() * x,
    "median": lambda x: x.median() * x,
    "written to empty memory": lambda x: (y := x.new_empty_strided((4,), (2,))).copy_(x**3) * y,
    "NumPy scalars": lambda x: np.float64(2.5) * x ** np.float32(3) + x * np.int64(2),
    "modulus": lambda x: torch.complex(x, x * x).abs(),
    "phase": lambda x: torch.sgn(torch.complex(x, x * x)).real,
    "complex variance": lambda x: torch.complex(x, x * x).var(),
    "complex determinant": lambda x: torch.linalg.slogdet(torch.complex(x, x**3).reshape(2, 2))[1],
    "phase of a determinant": lambda x: torch.linalg.slogdet(torch.complex(x, x**3).reshape(2, 2))[0].imag,
    "sublists": lambda x: torch.einsum(x, [0], x, [0], []),
    "attention without weights": nn.MultiheadAttention(2, 1, dtype=D).requires_grad_(False).__call__,
    "hardswish at its joints": lambda x: functional.hardswish(x - x.detach() + torch.tensor([3, -3, 1, 0])),
    "fmin of equal ones": lambda x: torch.fmin(x**2, x),
    "float_power": lambda x: torch.float_power(x.float(), 2),
    **{
        f"write through {name}": written_through(take)
        for name, take in {
            "ravel": lambda y: y.ravel(),
            "expand_as": lambda y: y.expand_as(y),
            "double": lambda y: y.double(),
            "dropout in evaluation": lambda y: functional.dropout(y, 0.5, False),
            "transposed sum": lambda y: torch.einsum("ij->ji", y.reshape(2, 2)),
            "broadcast tensors": lambda y: torch.broadcast_tensors(y, torch.zeros(4))[0],
            "unsafe_chunk": lambda y: torch.unsafe_chunk(y, 2)[1],
            "a diagonal": lambda y: torch.linalg.diagonal(y.reshape(2, 2)),
        }.items()
    },
}
FORMS["attention without weights"] = lambda x, layer=FORMS["attention without weights"]: layer(
    x.reshape(2, 2), x.reshape(2, 2), x.reshape(2, 2), need_weights=False
)[0]


@pytest.mark.parametrize("name", ["ravel", "expand_as", "unsafe_chunk", "a diagonal"])
def test_writes_through_views_inside_vmap(name):
    """There memory cannot be inspected, and the table of operators tells which results are views."""
    f = FORMS[f"write through {name}"]
    inside = torch.func.vmap(lambda x: jet(f, (x,), ([V, 0 * V],)))(Q[None])
    torch.testing.assert_close([each[0] for each in (inside[0], *inside[1])], [f(Q), *jet(f, (Q,), ([V, 0 * V],))[1]])


@pytest.mark.parametrize("name", FORMS)
def test_unusual_call_matches_forward_mode(name):
    f = FORMS[name]
    value, (slope, second) = jet(f, (Q,), ([V, 0 * V],))

    def along(t):
        return f(Q + t * V)

    def first(t):
        return torch.func.jvp(along, (t,), (torch.ones_like(t),))

    zero = torch.zeros((), dtype=D)
    with hodiff.corrected():
        right, (_, curvature) = first(zero), torch.func.jvp(first, (zero,), (torch.ones_like(zero),))[1]
    torch.testing.assert_close(value, f(Q))
    torch.testing.assert_close(slope, right[1])
    torch.testing.assert_close(second, curvature)


def test_complex_powers_match_exponentials():
    """Complex powers match x^i = exp(i log x) and a^x = exp(x log a)."""
    terms = ([V, 0 * V, V],)
    found = jet(lambda x: ((x**1j).real, ((2 + 1j) ** x).imag), (Q,), terms)
    right = jet(lambda x: (x.log().cos(), (x * (0.5 * np.log(5.0))).exp() * (x * np.arctan(0.5)).sin()), (Q,), terms)
    torch.testing.assert_close(found, right)


def test_grad_outputs_of_inner_gradients_are_constants():
    def f(x):
        x.requires_grad_()
        (g,) = torch.autograd.grad(x**3, x, grad_outputs=x * x, create_graph=True)
        return g.sum()

    x = Q.clone()
    value, gradient, total = value_grad_laplacian(f)(x)
    torch.testing.assert_close((value, gradient, total), ((3 * Q**4).sum(), 12 * Q**3, (36 * Q**2).sum()))
    assert not x.requires_grad


def test_chunks_share_random_draws():
    x = torch.ones(6, dtype=D)
    value, gradient, total = value_grad_laplacian(lambda x: (functional.dropout(x) ** 2).sum(), chunk_size=1)(x)
    kept = value / 4
    assert (gradient == 8).sum() == kept
    torch.testing.assert_close(total, 8 * kept)


def test_second_derivatives_at_kinks_match_torch():
    zero = torch.zeros((), dtype=D)
    one = torch.ones((), dtype=D)
    for f in (functional.elu, functional.selu, lambda x: functional.celu(x, 0.3)):
        assert jet(f, (zero,), ([one, zero],))[1][1] == 0
    value, gradient, _ = value_grad_laplacian(lambda x: torch.linalg.vector_norm(x) * (x + 2).sum())(torch.zeros(3))
    assert value == 0
    assert gradient.tolist() == [0.0] * 3


# A Function that defines only backward
Cubed = custom("Cubed", lambda x: x**3, cubed_slope)


# A Function that writes into its argument
Doubled = in_place_multiple("Doubled", 2)


def test_laplacian_of_a_function_with_backward_only_matches():
    torch.testing.assert_close(hodiff.laplacian(lambda x: Cubed.apply(x * x).sum())(Q), (30 * Q**4).sum())


def _in_mode(mode):
    """Return a cube whose forward switches derivatives off."""

    def forward(x):
        with mode():
            cube = x**3
        return cube.clone()

    return type("CubedInMode", (Cubed,), {"forward": staticmethod(forward)})


class Solved(torch.autograd.Function):
    """An old-style Function whose forward runs autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.enable_grad():
            return (x.detach().requires_grad_() ** 3).detach()

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * ctx.saved_tensors[0] ** 2 * cotangent


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("around", [nullcontext, torch.inference_mode])
def test_no_grad_inside_forward_of_a_function_is_ignored(mode, around):
    function = _in_mode(mode)
    with around():
        found = hodiff.laplacian(lambda x: function.apply(x * x).sum())(Q)
    torch.testing.assert_close(found, (30 * Q**4).sum())


def test_legacy_function_whose_forward_runs_autograd_is_rejected():
    with pytest.raises(hodiff.RouteError, match="one whose forward takes ctx"):
        hodiff.laplacian(lambda x: Solved.apply(x).sum())(Q)


def test_keyword_arguments_of_f_are_forwarded():
    torch.testing.assert_close(hodiff.laplacian(lambda x, b: (b * x * x).sum())(Q, b=3.0), torch.tensor(24.0, dtype=D))


def test_python_number_outputs_have_zero_derivative():
    value, (slope,) = jet(lambda x: (x, 3.0), (Q,), ([V],))
    assert value[1] == 3.0
    assert slope[1] == 0.0


KEPT: list = []
CLOSED_OVER: list = []


class ClosingOver(torch.autograd.Function):
    """A Function that multiplies by a closed-over value."""

    @staticmethod
    def forward(x):
        return x * CLOSED_OVER[-1]

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


REFUSED = {
    "kept": (lambda x: x * KEPT[0], "a jet of an earlier call was kept"),
    "kept and returned": (lambda x: KEPT[0], "a jet of an earlier call was kept"),
    "data": (lambda x: x.data * x, r"\.data of a jet is not supported"),
    "data written": (lambda x: setattr(x, "data", x), "data"),
    "conjugate": (lambda x: torch.complex(x, x).conj().mul_(2).real, "writing to a conjugate"),
    "unique": (lambda x: torch.unique(x * x), "not differentiable|not implemented|unique"),
    "marked as dirty": (lambda x: Doubled.apply(x * x), "writes to its argument|mark_dirty|in-?place"),
    "closed over by a Function": (
        lambda x: (CLOSED_OVER.append(x), ClosingOver.apply(Q))[1],
        "the forward of a Function closes over a jet",
    ),
    "without a graph": (lambda x: torch.autograd.grad(x.sum(), x)[0], r"call x\.requires_grad_\(\) before"),
    "bits": (lambda x: x.view(torch.int64).double(), r"view\(dtype\) reads the bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejects_unsupported_calls(name):
    jet(lambda x: KEPT.append(x * x) or x, (Q,), ([V],))
    f, words = REFUSED[name]
    try:
        with pytest.raises(Exception, match=words):
            jet(f, (Q,), ([V],))
    finally:
        KEPT.clear()


def test_deepcopy_keeps_derivatives():
    torch.testing.assert_close(hodiff.laplacian(lambda x: copy.deepcopy(x * x).sum())(Q), torch.tensor(8.0, dtype=D))


COMPILED = {
    "square": lambda x: x**2,
    "relu": lambda x: x.relu().square(),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "softmax": lambda x: torch.softmax(x, -1),
    "attention": lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "difference": lambda x: x - Q,
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_laplacian_matches_eager(name):
    x = torch.rand(3, 4, dtype=D) + 0.2
    found = hodiff.laplacian(COMPILED[name], batched=True)
    torch.testing.assert_close(torch.compile(lambda x: found(x), fullgraph=True, backend="eager")(x), found(x))


OLD_REDUCTIONS = {
    "mse_loss": {"size_average": False},
    "l1_loss": {"reduce": False},
    "binary_cross_entropy_with_logits": {"size_average": True, "reduce": True},
    "kl_div": {"size_average": False, "reduce": True},
    "cross_entropy": {"size_average": False},
    "nll_loss": {"reduce": False},
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("name", OLD_REDUCTIONS)
def test_deprecated_reduction_options_match(name):
    loss, options = getattr(functional, name), OLD_REDUCTIONS[name]
    labels = name in ("cross_entropy", "nll_loss")
    target = torch.tensor([1, 0]) if labels else Q.reshape(2, 2) / 4

    def f(x):
        return loss(x.reshape(2, 2), target, **options)

    value, (slope,) = jet(f, (Q,), ([V],))
    with hodiff.corrected():
        torch.testing.assert_close((value, slope), torch.func.jvp(f, (Q,), (V,)))


CLASSES = torch.tensor([0.5, 2.0, 1.5], dtype=D)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, CLASSES], ids=["equal", "weighted"])
def test_cross_entropy_matches_its_definition(weight, smoothing, reduction):
    labels, weights = torch.tensor([2, 1, 0]), torch.ones(3, dtype=D) if weight is None else weight
    x = torch.linspace(-1.0, 2.0, 9, dtype=D)
    counted = labels != 1
    goal = ((1 - smoothing) * torch.eye(3, dtype=D)[labels] + smoothing / 3) * weights * counted[:, None]
    divisor = (weights[labels] * counted).sum() if reduction == "mean" else 1

    def definition(x):
        x = x.reshape(3, 3)
        return -(goal * (x - x.exp().sum(1, keepdim=True).log())).sum() / divisor

    def f(x):
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction, "ignore_index": 1}
        return functional.cross_entropy(x.reshape(3, 3), labels, **options)

    v = x.cos()
    value, coefficients = jet(f, (x,), ([v, torch.zeros_like(x)],))
    first, second = torch.func.jvp(lambda y: torch.func.jvp(definition, (y,), (v,))[1], (x,), (v,))
    torch.testing.assert_close((value, *coefficients), (definition(x), first, second))


def test_rejects_unknown_reduction():
    with pytest.raises(hodiff.InputError, match="jet: mse_loss: reduction: expected one of none, mean, sum, got 'avg'"):
        jet(lambda x: functional.mse_loss(x, V, reduction="avg"), (Q,), ([V],))


@pytest.mark.parametrize("output", [None, "text", {"a": None}], ids=str)
def test_rejects_outputs_that_are_no_tensors(output):
    for transformed in (
        hodiff.laplacian(lambda x: (x.sin(), output)),
        lambda x: jet(lambda x: (x, output), (x,), ([x],)),
    ):
        with pytest.raises(hodiff.InputError, match="expected to return tensors and numbers"):
            transformed(torch.ones(2))


def test_torch_tensor_of_values_is_rejected():
    with pytest.raises(hodiff.RouteError, match=r"torch\.stack"):
        hodiff.laplacian(lambda x: torch.tensor([x[0], x[1]]).sum())(torch.ones(2))


def test_orders_whose_factorial_overflows_are_rejected():
    one, zero = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    *_, last = jet(torch.exp, (zero,), ([one, *[zero] * 39],))[1]
    torch.testing.assert_close(last, one)
    for call in (
        lambda: jet(torch.exp, (zero,), ([one, *[zero] * 170],)),
        lambda: hodiff.directional_derivatives(torch.exp, zero, one, order=171),
    ):
        with pytest.raises(hodiff.InputError, match="at most 170"):
            call()
    coefficients = jet(torch.exp, (zero,), ([one, *[zero] * 179],), normalized=True)[1]
    torch.testing.assert_close(coefficients[19].log(), -torch.lgamma(21 * one))


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, torch.fmax, torch.fmin])
def test_maximum_and_minimum_have_differentiable_laplacians(function):
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

    def f(x):
        return (function(x, x.roll(1)) ** 4).sum()

    picked = torch.func.jacrev(lambda x: function(x, x.roll(1)))(x).sum(0)
    found = torch.func.grad(hodiff.laplacian(f))(x)
    torch.testing.assert_close(found, 24 * picked * x)


def test_rejects_generator_without_randomised():
    with pytest.raises(hodiff.InputError, match="expected None without randomised"):
        hodiff.laplacian(torch.sum, generator=torch.Generator())


@pytest.mark.parametrize("n", [4, 6])
def test_determinants_of_singular_matrices_match_interpolation(n):
    generator = torch.Generator().manual_seed(0)
    A, V = torch.randn(2, n, n, dtype=D, generator=generator)
    A[:, 0] = A[:, 1]
    # det(A + tV) is a polynomial, so its values at n + 1 points determine it.
    t = np.arange(n + 1) - n / 2
    values = [torch.linalg.det(A + s * V).item() for s in t]
    polynomial = np.polynomial.polynomial.polyfit(t, values, n)
    _, found = jet(torch.linalg.det, (A,), ([V, 0 * V, 0 * V],), normalized=True)
    np.testing.assert_allclose(torch.stack(found).numpy(), polynomial[1:4], rtol=1e-6)
    assert hodiff.laplacian(torch.det)(torch.zeros(n, n, dtype=D)) == 0


def test_solve_under_vmap_matches():
    def f(x):
        return torch.linalg.solve(torch.diag(x[:, 0] + 3) + x[:, 1:] * 0.1, x).sin().sum()

    x = torch.rand(3, 3, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([hodiff.laplacian(f)(each) for each in x])
    torch.testing.assert_close(torch.func.vmap(hodiff.laplacian(f))(x), expected)


def _with_a_break(x):
    y = x.view(3)
    print(end="")  # noqa: T201  (which no graph holds)
    return (y * y * y).exp().mean()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("f", [lambda x: x.softmax(0).square().sum(), lambda x: x.logsumexp(0) ** 2, _with_a_break])
def test_graph_breaks_inside_f_raise(f):
    # After a graph break the code would get other objects, and silently be wrong.
    torch._dynamo.reset()
    x = torch.tensor([0.1, 0.5, 0.9])
    for transformed in (hodiff.laplacian(f), lambda x: jet(f, (x,), ([x],))):
        with pytest.raises(Exception, match="Explanation: Dynamo does not know how to trace"):
            torch.compile(transformed, backend="eager")(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_library_operators_match():
    library = torch.library.Library("hodiff_jet_tests", "DEF")
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", lambda x: x**3, "CompositeExplicitAutograd")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x**2, "CompositeImplicitAutograd")
    cube, square = torch.ops.hodiff_jet_tests.cube, torch.ops.hodiff_jet_tests.square
    x = torch.tensor([0.5, -1.0], dtype=D)
    torch.testing.assert_close(hodiff.laplacian(lambda x: square(x).sum())(x), torch.tensor(4.0, dtype=D))
    # torch's forward mode treats the result as a constant.
    for call in (
        lambda: hodiff.laplacian(lambda x: cube(x).sum())(x),
        lambda: jet(cube.default, (x,), ([x],)),
        lambda: hodiff.directional_derivatives(cube, x, x, order=2),
    ):
        with pytest.raises(hodiff.RouteError, match="operator of a library"):
            call()
    hodiff.taylor.register(cube)(lambda x: x * x * x)
    torch.testing.assert_close(hodiff.laplacian(lambda x: cube(x).sum())(x), 6 * x.sum())
    del hodiff.taylor.RULES[cube]


def test_rules_apply_to_wrapped_torch_functions(monkeypatch):
    """torch_geometric wraps `index_select`, for example."""
    own = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *args: own(*args))
    assert own in set(functions_named("index_select"))
