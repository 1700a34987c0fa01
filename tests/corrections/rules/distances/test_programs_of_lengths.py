"""Programs that differentiate with respect to lengths, or pass them to other functions than torch's."""

import pytest
import torch
import torch.nn.functional as F
from custom_functions import old_style

import hodiff
import hodiff.functions as hf

D = torch.float64
POINTS = torch.tensor([[0.3, -0.5], [1.2, 0.4], [-0.7, 0.9]], dtype=D)
V = torch.tensor([[1.0, 0.5], [-0.3, 0.8], [0.2, -0.6]], dtype=D)


def by_length(potential, length):
    """Return r V'(r), summed, of a length r, as programs compute it."""

    def f(x):
        r = length(x)
        (slope,) = torch.autograd.grad(potential(r).sum(), r, create_graph=True)
        return (slope * r).sum()

    return f


def by_square(slope_times_length, square):
    """Return the same as a function of the square s."""
    return lambda x: slope_times_length(square(x)).sum()


def pairs(x):
    return (x[:, None] - x).square().sum(-1)


# Lengths, and their squares
LENGTHS = {
    "root": (lambda x: (x.square().sum(1) + 1).sqrt(), lambda x: x.square().sum(1) + 1),
    "norm": (lambda x: x.norm(dim=1), lambda x: x.square().sum(1)),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=1), lambda x: x.square().sum(1)),
    "abs": (torch.abs, torch.square),
    "hypot": (lambda x: torch.hypot(x[:, 0], x[:, 1]), lambda x: x.square().sum(1)),
    "std": (lambda x: x.std(0), lambda x: (x - x.mean(0)).square().sum(0) / 2),
    "complex abs": (lambda x: torch.complex(x[:, 0], x[:, 1]).abs(), lambda x: x.square().sum(1)),
    "pdist": (F.pdist, lambda x: pairs(x)[(0, 0, 1), (1, 2, 2)]),
    "cdist of other points": (lambda x: torch.cdist(x, x[:2] + 1), lambda x: (x[:, None] - x[:2] - 1).square().sum(-1)),
    "cdist": (lambda x: torch.cdist(x, x), pairs),
}
# Potentials V(r), and r V'(r) as a function of s = r²
POTENTIALS = {
    "square": (lambda r: r**2 / 2, lambda s: s),
    "product": (lambda r: r * r, lambda s: 2 * s),
    "Gaussian": (lambda r: torch.exp(-(r**2)), lambda s: -2 * s * torch.exp(-s)),
    "rational": (lambda r: 1 / (1 + r.square()), lambda s: -2 * s / (1 + s) ** 2),
    "einsum": (lambda r: torch.einsum("...,...->...", r, r) ** 2, lambda s: 4 * s**2),
    "norm": (lambda r: r.flatten().norm() ** 4, None),
}


@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("length", LENGTHS)
def test_derivatives_by_lengths_match_functions_of_the_square(length, potential):
    r, s = LENGTHS[length]
    V_of_r, of_s = POTENTIALS[potential]
    f = by_length(V_of_r, r)
    truth = by_square(of_s, s) if of_s is not None else lambda x: 4 * s(x).sum() ** 2
    found = hodiff.value_grad_hvp(f, POINTS, V)
    for got, expected in zip(found, hodiff.value_grad_hvp(truth, POINTS, V), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(hodiff.HessianOperator(f, POINTS) @ V, found[2], rtol=1e-11, atol=1e-11)
    leaf = POINTS.clone().requires_grad_()
    with hodiff.corrected():
        (gradient,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(gradient, found[1], rtol=1e-11, atol=1e-11)


def test_hooks_and_kept_gradients_of_lengths_are_those_of_torch():
    x, seen = torch.tensor([1.0, -2.0], dtype=D, requires_grad=True), []
    with hodiff.corrected():
        a = x.abs()
        a.retain_grad()
        a.register_hook(seen.append)
        (a**2 / 2 + a).sum().backward()
    assert a.grad.tolist() == seen[0].tolist() == [2.0, 3.0]


def test_absolute_value_of_negative_zero_is_positive_zero():
    x = torch.tensor([-0.0], dtype=D, requires_grad=True)
    with hodiff.corrected():
        assert not torch.signbit(x.abs()).any()


@pytest.mark.parametrize("length", [lambda x: x.norm(), lambda x: x.norm() + 1, lambda x: 2 * x.norm()])
def test_derivatives_by_lengths_that_are_zero_are_refused(length):
    f = by_length(lambda r: r**3, length)
    with pytest.raises(hodiff.RouteError, match=r"torch.autograd.grad: inputs: expected a length.* i < j"):
        hodiff.hvp(f, torch.zeros(2, dtype=D), torch.ones(2, dtype=D))


def even(function):
    return lambda r: function(r) + function(-r)


# Functions of a norm n, and half of their second derivative by n at 0, which is the Laplacian in two dimensions over 4
OF_HODIFF = {
    "log_cosh": (hf.log_cosh, 0.5),
    "silu": (lambda r: hf.silu(r) - r / 2, 0.25),
    "SiLU": (lambda r: hodiff.nn.SiLU()(r) - r / 2, 0.25),
    "gelu": (even(hf.gelu), 2 / (2 * torch.pi) ** 0.5),
    "mish": (even(hf.mish), 0.64),
    "swish": (even(lambda r: hf.swish(r, 2.0)), 1.0),
    "softplus": (even(hf.softplus), 0.25),
    "log_sigmoid": (even(hf.log_sigmoid), -0.25),
    "torch's logsigmoid": (even(F.logsigmoid), -0.25),
    "relu": (lambda r: hf.relu(r) ** 2, 1.0),
    "clipped_relu": (lambda r: hf.clipped_relu(r, 1.0) ** 2, 1.0),
    "soft_threshold": (lambda r: hf.soft_threshold(r, 0.0) ** 2, 1.0),
    "checkpoint": (lambda r: hf.checkpoint(torch.cos, r), -0.5),
    "torch's checkpoint": (lambda r: torch.utils.checkpoint.checkpoint(torch.cos, r, use_reentrant=False), -0.5),
}


@pytest.mark.parametrize("name", OF_HODIFF)
def test_functions_of_hodiff_at_a_zero_length_have_the_even_part(name):
    function, half = OF_HODIFF[name]
    zero = torch.zeros(2, dtype=D)

    def f(x):
        return function(torch.linalg.vector_norm(x))

    torch.testing.assert_close(hodiff.hessian(f)(zero), 2 * half * torch.eye(2, dtype=D), rtol=1e-12, atol=1e-12)
    assert hodiff.laplacian(f)(zero).item() == pytest.approx(4 * half, rel=1e-12)


@hodiff.custom_jvp
def squared(x):
    return x * x


@squared.defjvp
def _(primals, tangents):
    return squared(*primals), 2 * primals[0] * tangents[0]


UNKNOWN = {
    "logsumexp": lambda r: hf.logsumexp(torch.stack([r, -r]), 0),
    "scale_gradient": lambda r: hf.scale_gradient(r, 2.0) ** 2,
    "custom_jvp": squared,
    "a power with itself": lambda r: (r + 0.3) ** (r + 0.3) + (0.3 - r) ** (0.3 - r),
    "hvp": lambda r: hodiff.hvp(lambda t: t**4, r, torch.ones_like(r)),
}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_functions_of_a_zero_length_are_not_a_number(name):
    with pytest.warns(hodiff.HodiffWarning, match="does not know whether the kink cancels"):
        product = hodiff.hvp(lambda x: UNKNOWN[name](x.norm()), torch.zeros(2, dtype=D), torch.ones(2, dtype=D))
    assert product.isnan().all()
    point = torch.full((2,), 0.1, dtype=D)
    away = hodiff.hvp(lambda x: UNKNOWN[name](x.norm()), point, torch.ones(2, dtype=D))
    assert away.isfinite().all()


Cosine = old_style("Cosine", lambda x: (x.cos(), x), lambda ctx, g: -g * ctx.saved_tensors[0].sin())


def test_custom_functions_of_a_zero_length_are_refused():
    def f(x):
        return Cosine.apply(x.norm())

    with pytest.raises(hodiff.RouteError, match=r"hvp: expected custom Functions that receive no length.*Cosine"):
        hodiff.hvp(f, torch.zeros(2, dtype=D), torch.ones(2, dtype=D))
    point = torch.tensor([0.3, 0.4], dtype=D)
    product = hodiff.hvp(f, point, torch.ones(2, dtype=D))
    torch.testing.assert_close(product, hodiff.hvp(lambda x: x.norm().cos(), point, torch.ones(2, dtype=D)))
