"""Tests of bilaplacian, divergence and second derivatives by each coordinate, against closed forms."""

import mpmath
import pytest
import torch
from drawing import normals, seeded
from mpmath_series import D
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.taylor import derivative_tensor, divergence, pure_second_derivatives
from hodiff.taylor.differential.bilaplacian import fourth_powers
from hodiff.taylor.jets import Jet

randn = normals(seeded())

W1, W2 = randn(6, 3) / 2, randn(2, 6) / 2


def network(x):
    """Apply a network with two outputs."""
    return functional.linear(torch.tanh(functional.linear(x, W1)), W2)


def fourth_derivative(u):
    """Compute the fourth derivative of tanh."""
    t = torch.tanh(u)
    s = 1 - t * t
    return 16 * t * s * s - 8 * t**3 * s


def exact_bilaplacian(x):
    """Compute the bilaplacian of the network: tanh'''' times the fourth power of the length of each row of weights."""
    return (fourth_derivative(x @ W1.mT) * W1.square().sum(1) ** 2) @ W2.mT


@pytest.mark.parametrize("n", range(1, 11))
def test_fourth_powers_sum_to_the_squared_norm_squared(n):
    xi = randn(5, n)
    total = sum(sign * (xi @ rows.mT).pow(4).sum(1) for sign, rows in fourth_powers(n))
    torch.testing.assert_close(total, xi.square().sum(1) ** 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("n", "chunk_size"), [(2, None), (8, None), (8, 20)])
def test_bilaplacian_of_a_function_without_a_rule_matches(n, chunk_size):
    x = randn(n)
    found = hodiff.bilaplacian(lambda x: torch.special.i0(x).sum() * x[0], chunk_size=chunk_size)(x)
    third, fourth = (
        torch.tensor([float(mpmath.besseli(0, each, derivative=k).real) for each in x.tolist()], dtype=D)
        for k in (3, 4)
    )
    torch.testing.assert_close(found, fourth.sum() * x[0] + 4 * third[0])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_bilaplacian_of_a_plane_wave_matches_closed_form(n, chunk_size):
    """The sizes cover one pass of order 4 and two passes of order 2."""
    x, k = randn(4, n), randn(n)
    found = hodiff.bilaplacian(lambda x: torch.sin(x @ k), batched=True, chunk_size=chunk_size)(x)
    torch.testing.assert_close(found, k.square().sum() ** 2 * torch.sin(x @ k))


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_bilaplacian_of_a_power_of_the_radius_matches_closed_form(n):
    x = randn(n)
    found = hodiff.bilaplacian(lambda x: x.square().sum() ** 2.5)(x)
    # Δ rᵖ = p (p + n - 2) rᵖ⁻², twice
    torch.testing.assert_close(found, 5 * (3 + n) * 3 * (1 + n) * x.norm())


def test_bilaplacian_of_biharmonic_function_is_zero():
    plate = lambda x: x.square().sum() * x.square().sum().log()  # noqa: E731
    assert hodiff.bilaplacian(plate)(randn(2)).abs() < 1e-11


def test_bilaplacian_of_a_network_matches():
    x = randn(5, 3)
    found = hodiff.bilaplacian(network, batched=True)
    torch.testing.assert_close(found(x), exact_bilaplacian(x))
    torch.testing.assert_close(torch.func.vmap(hodiff.bilaplacian(network))(x), exact_bilaplacian(x))
    single = lambda x: functional.linear(torch.tanh(functional.linear(x, W1.float())), W2.float())  # noqa: E731
    found = hodiff.bilaplacian(single, batched=True)(x.float())
    torch.testing.assert_close(found.double(), exact_bilaplacian(x), rtol=1e-4, atol=1e-5)


def test_bilaplacian_of_a_pytree_matches():
    x = {"a": randn(2), "b": randn(2, 2)}
    f = lambda x, scale, power: {"u": scale * (x["a"] ** power).sum() * x["b"].cos().sum()}  # noqa: E731
    a, b = x["a"], x["b"].cos().sum()
    exact = 2 * (24 * 2 * b - 2 * (12 * a**2).sum() * b + (a**4).sum() * b)
    torch.testing.assert_close(hodiff.bilaplacian(f)(x, 2, power=4), {"u": exact})
    torch.testing.assert_close(hodiff.bilaplacian(lambda s, x: f(x, s, 4), argnums=1)(2, x), {"u": exact})


def test_bilaplacian_is_differentiable_by_parameters():
    x, k = randn(3), randn(3).requires_grad_()
    wave = hodiff.bilaplacian(lambda x: torch.sin(x @ k))(x)
    closed = k.square().sum() ** 2 * torch.sin(x @ k)
    torch.testing.assert_close(torch.autograd.grad(wave, k), torch.autograd.grad(closed, k))


def test_operators_inside_transforms_match():
    """Operators can be differentiated by the point in reverse mode, in forward mode, and by jets of jets."""
    x, v, k = randn(3), randn(3), randn(3)
    length = k.square().sum()
    wave = lambda x: torch.sin(x @ k)  # noqa: E731
    field = lambda x: k * wave(x)  # noqa: E731
    for operator, f, factor in (
        (hodiff.bilaplacian, wave, length**2),
        (divergence, field, None),
        (lambda f: hodiff.partial(f, (0, 1)), wave, -k[0] * k[1]),
    ):
        value = lambda x: factor * torch.sin(x @ k) if factor is not None else length * torch.cos(x @ k)  # noqa: E731
        slope = length * -torch.sin(x @ k) if factor is None else factor * torch.cos(x @ k)
        found = operator(f)
        torch.testing.assert_close(found(x), value(x))
        torch.testing.assert_close(torch.func.grad(found)(x), slope * k)
        torch.testing.assert_close(torch.func.jvp(found, (x,), (v,))[1], slope * (k @ v))
        torch.testing.assert_close(hodiff.laplacian(found)(x), -length * value(x))


@pytest.mark.parametrize("name", ["bilaplacian", "divergence", "partial", "pure_second_derivatives"])
def test_vmap_of_nested_operators_matches(name):
    """A Laplacian of each operator, mapped over points, and the bilaplacian that is a Laplacian of a Laplacian."""
    n = 8 if name == "bilaplacian" else 3
    x, k = randn(2, n), randn(n)
    length, wave = k.square().sum(), lambda x: torch.sin(x @ k)
    found, right = {
        "bilaplacian": (hodiff.bilaplacian(wave), length**2 * wave(x)),
        "divergence": (hodiff.laplacian(divergence(lambda x: k * wave(x))), -(length**2) * torch.cos(x @ k)),
        "partial": (hodiff.partial(hodiff.laplacian(wave), (0, 1)), k[0] * k[1] * length * wave(x)),
        "pure_second_derivatives": (
            pure_second_derivatives(hodiff.laplacian(wave, sparse=False)),
            torch.outer(length * wave(x), k * k),
        ),
    }[name]
    torch.testing.assert_close(torch.func.vmap(found)(x), right)


class Opaque(torch.autograd.Function):
    """Call a function where torch switches gradients and tangents off."""

    @staticmethod
    def forward(ctx, f, x):
        return f(x)

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError


class Sixfold(torch.autograd.Function):
    """The square of x, with 6 x as its derivative, which shows whether the rule or the forward is differentiated."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 6 * ctx.saved_tensors[0] * g

    @staticmethod
    def jvp(ctx, tangent):
        return 6 * ctx.saved_tensors[0] * tangent


class ClosesOver(Sixfold):
    """A sum that has a jet in its forward and not among its arguments."""

    closed_over = None

    @staticmethod
    def forward(x):
        return x + ClosesOver.closed_over


@pytest.mark.parametrize("inference", [False, True])
def test_operators_inside_the_forward_of_a_function_match(inference):
    x, k = randn(2, 3), randn(3)
    wave = lambda x: torch.sin(x @ k)  # noqa: E731

    def closing(x):
        ClosesOver.closed_over = x
        return ClosesOver.apply(torch.ones_like(x)).sum()

    with torch.inference_mode(inference):
        found = Opaque.apply(hodiff.laplacian(wave, batched=True), x)
        torch.testing.assert_close(found, -k.square().sum() * torch.sin(x @ k))
        found = Opaque.apply(hodiff.laplacian(lambda x: Sixfold.apply(x).sum()), x[0])
        torch.testing.assert_close(found, torch.tensor(18.0, dtype=D))
        with pytest.raises(hodiff.RouteError, match="closes over a jet"):
            Opaque.apply(hodiff.laplacian(closing), x[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_first_call_inside_a_checkpoint_matches(batched, use_reentrant):
    """The comparisons of a first call are not repeated by the recomputation, and save nothing for it."""
    x, k = randn(2, 3).requires_grad_(), randn(3).requires_grad_()
    wave = lambda x: torch.sin(x @ k)  # noqa: E731
    total = hodiff.laplacian(wave if batched else lambda x: wave(x).sum(), batched=batched)
    found = checkpoint(total, x, use_reentrant=use_reentrant).sum()
    closed = -k.square().sum() * torch.sin(x @ k).sum()
    # A reentrant checkpoint accumulates gradients, and refuses torch.autograd.grad.
    found.backward()
    torch.testing.assert_close((x.grad, k.grad), torch.autograd.grad(closed, (x, k)))


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "operator",
    ["bilaplacian", "divergence", "pure_second_derivatives", "partial", "partials", "derivative_tensor"],
)
def test_compiled_operators_match_closed_forms(operator):
    x, k = randn(4, 3), randn(3)
    wave = lambda x: torch.sin(torch.matmul(x, k))  # noqa: E731
    s, c, length = torch.sin(x @ k), torch.cos(x @ k), k.square().sum()
    found, exact = {
        "bilaplacian": (hodiff.bilaplacian(wave, batched=True), length**2 * s),
        "divergence": (divergence(lambda x: wave(x)[:, None] * k, batched=True), length * c),
        "pure_second_derivatives": (pure_second_derivatives(wave, batched=True), -torch.outer(s, k * k)),
        "partial": (hodiff.partial(wave, (0, 0, 1), batched=True), -c * k[0] ** 2 * k[1]),
        # The graph contains the making of the operator.
        "partials": (lambda x: hodiff.partial(wave, [(1,), (0, 2)], batched=True)(x)[1], -s * k[0] * k[2]),
        "derivative_tensor": (lambda x: derivative_tensor(wave, 2)(x[0]), -s[0] * torch.outer(k, k)),
    }[operator]
    torch.testing.assert_close(torch.compile(lambda x: found(x), fullgraph=True, backend="eager")(x), exact)


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_divergence_of_a_pytree_matches(chunk_size):
    x = {"a": randn(2), "b": randn(2, 2)}
    f = lambda x: {"a": x["a"] ** 2 * x["b"].sum(), "b": x["b"].sin() * x["a"].sum()}  # noqa: E731
    exact = 2 * x["a"].sum() * x["b"].sum() + x["b"].cos().sum() * x["a"].sum()
    torch.testing.assert_close(divergence(f, chunk_size=chunk_size)(x), exact)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_divergence_of_a_batch_matches(chunk_size):
    x, A = randn(5, 3), randn(3, 3)
    field = lambda x: torch.sin(x @ A.mT)  # noqa: E731
    exact = (torch.cos(x @ A.mT) * A.diagonal()).sum(1)
    torch.testing.assert_close(divergence(field, batched=True, chunk_size=chunk_size)(x), exact)
    torch.testing.assert_close(torch.func.vmap(divergence(field))(x), exact)


def test_divergence_of_divergence_free_fields_is_zero():
    x, A = randn(3), randn(3, 3)
    turning = lambda x: (A - A.mT) @ x  # noqa: E731
    assert divergence(turning)(x).abs() < 1e-14
    assert divergence(lambda x: torch.ones(3, dtype=D))(x) == 0
    curl = lambda x: torch.stack((x[2] * x[1], x[0].exp(), x[0] * x[1]))  # noqa: E731
    assert divergence(curl)(x) == 0


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_hessian_diagonal_of_every_output_matches(chunk_size):
    x = randn(5, 3)
    t = torch.tanh(x @ W1.mT)
    exact = torch.einsum("oh,nh,hi->noi", W2, -2 * t * (1 - t * t), W1 * W1)
    torch.testing.assert_close(pure_second_derivatives(network, batched=True, chunk_size=chunk_size)(x), exact)
    torch.testing.assert_close(pure_second_derivatives(network, chunk_size=chunk_size)(x[0]), exact[0])


def test_hessian_diagonal_of_a_pytree_matches():
    x = {"a": randn(2), "b": randn(2, 3)}
    f = lambda x: (x["a"] ** 3 * x["b"].sum(), x["b"].sin().sum(1))  # noqa: E731
    first, second = pure_second_derivatives(f)(x)
    zero = torch.zeros(2, 2, 3, dtype=D)
    torch.testing.assert_close(first, {"a": torch.diag(6 * x["a"] * x["b"].sum()), "b": zero})
    sines = torch.stack([torch.stack((-x["b"][0].sin(), zero[0, 0])), torch.stack((zero[0, 0], -x["b"][1].sin()))])
    torch.testing.assert_close(second, {"a": torch.zeros(2, 2, dtype=D), "b": sines})
    scalar = lambda x: sum(each.sum() for each in f(x))  # noqa: E731
    torch.testing.assert_close(pure_second_derivatives(scalar)(x), hodiff.hessian_diagonal(scalar)(x))


def test_chunks_share_random_draws():
    """All columns of the Jacobian belong to the same function, whatever it draws."""
    x = randn(4)
    noisy = lambda x: x**2 * torch.rand(4, dtype=D)  # noqa: E731
    torch.manual_seed(3)
    exact = (2 * x * torch.rand(4, dtype=D)).sum()
    for operator, f, chunk_size in (
        (divergence, noisy, 1),
        (divergence, noisy, None),
        (hodiff.laplacian, lambda x: (noisy(x) * x).sum() / 3, 1),
    ):
        torch.manual_seed(3)
        torch.testing.assert_close(operator(f, chunk_size=chunk_size)(x), exact)


@pytest.mark.parametrize("correct", [True, False])
def test_correct_option_reaches_the_series(correct):
    """Series know whether hodiff's rules replace torch's."""
    seen = []

    def f(x):
        if isinstance(x, Jet):
            seen.append(x.frame.mode is not None)
        return x * x

    x = randn(2)
    for operator in (hodiff.bilaplacian, divergence, pure_second_derivatives, hodiff.laplacian):
        operator(f, correct=correct)(x)
    hodiff.partial(f, (0,), correct=correct)(x)
    derivative_tensor(f, 2, correct=correct)(x)
    assert seen == [correct] * 6


def test_empty_points_and_batches_are_accepted():
    empty, none = torch.zeros(0, dtype=D), torch.zeros(0, 3, dtype=D)
    assert hodiff.bilaplacian(lambda x: x.sum())(empty) == 0
    assert divergence(lambda x: x)(empty) == 0
    assert pure_second_derivatives(lambda x: x.sum())(empty).shape == (0,)
    assert hodiff.bilaplacian(network, batched=True)(none).shape == (0, 2)
    assert divergence(lambda x: x * x, batched=True)(none).shape == (0,)
    assert pure_second_derivatives(network, batched=True)(none).shape == (0, 2, 3)


def test_rejects_bad_arguments():
    x = randn(3)
    for call, words in (
        (lambda: hodiff.bilaplacian(network, chunk_size=0), "bilaplacian: chunk_size: expected an int"),
        (lambda: divergence(network, batched="yes"), "divergence: batched: expected True or False"),
        (lambda: pure_second_derivatives(3), "pure_second_derivatives: f: expected a callable, got int"),
        (lambda: hodiff.bilaplacian(network)(torch.ones(3).long()), "bilaplacian: cannot differentiate"),
        (lambda: divergence(network)(x), r"divergence: f: expected an output .* \[\(3,\)\], got \[\(2,\)\]"),
        (lambda: divergence(lambda x: (x,))(x), r"divergence: f: expected an output in the structure and shapes"),
        (lambda: pure_second_derivatives(network, argnums=1)(x), "argnums: expected one of 1 positional"),
    ):
        with pytest.raises(hodiff.InputError, match=words):
            call()


def test_functions_of_empty_points_have_zero_derivatives():
    # Without elements, a product has no value from which to take derivatives.
    product, empty, three = torch.prod, torch.zeros(0, dtype=D), torch.ones(3, dtype=D)
    assert hodiff.laplacian(product)(empty) == 0
    assert pure_second_derivatives(product)(empty).shape == (0,)
    assert hodiff.laplacian(product, weights=torch.zeros(0, 3, dtype=D))(three) == 0
    assert hodiff.partial(product, [])(three) == []
    for kind in ("rademacher", "gaussian", "coordinates"):
        assert hodiff.laplacian(lambda x: x.sum() ** 2, randomised=kind)(empty).value == 0


def test_derivative_tensor_of_a_scalar_matches():
    found = hodiff.taylor.derivative_tensor(torch.sin, 2)(torch.tensor(0.3, dtype=D))
    torch.testing.assert_close(found, -torch.tensor(0.3, dtype=D).sin())


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-15), (torch.float32, 1e15), (D, 1e-110), (D, 1e110)])
def test_norm_derivatives_survive_overflow_of_squares(dtype, size):
    x, v = (torch.tensor(each, dtype=D) for each in ([1.0, 2.0, -1.0], [0.3, -1.0, 0.5]))
    # vᵀ∇²r v is the squared part of v orthogonal to x, divided by r. The Laplacian is (n - 1) / r.
    second = (v @ v - (x @ v) ** 2 / (x @ x)) / x.norm() * size
    found = hodiff.directional_derivatives(torch.linalg.norm, (x * size).to(dtype), (v * size).to(dtype), order=2)[2]
    torch.testing.assert_close(found, second.to(dtype))
    torch.testing.assert_close(
        hodiff.laplacian(torch.linalg.norm)((x * size).to(dtype)), (2 / (x.norm() * size)).to(dtype)
    )
