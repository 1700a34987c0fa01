"""Tests of Laplacians of small models against traces of Hessians, and of wavefunctions against closed forms."""

import pytest
import torch
from drawing import normals, seeded
from mpmath_series import D
from torch import nn
from torch.nn import functional

import hodiff
from hodiff.taylor import jet, value_grad_laplacian

randn = normals(seeded(2))


class Block(nn.Module):
    """Self-attention and two layers, with layer norms before and residual connections."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.layers(self.norms[1](x))


MODELS = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 2)),
        (3,),
    ),
    "attention block": (Block, (1, 3, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.GroupNorm(1, 2),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(2, 2, 2),
            nn.Mish(),
            nn.Flatten(),
        ),
        (1, 1, 4, 4),
    ),
    "recurrence by hand": (
        lambda: (lambda cell: lambda x: cell(x[2:], cell(x[1:2], cell(x[:1], None))).tanh())(
            nn.GRUCell(2, 3).double().requires_grad_(False)
        ),
        (3, 2),
    ),
}


def model(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    found = make()
    if isinstance(found, nn.Module):
        found = found.double().requires_grad_(False)
    return found, randn(*shape)


def trace_of_hessian(f, x):
    return torch.trace(hodiff.hessian_matrix(f, x))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_laplacian_matches_trace_of_hessian(name, chunk_size):
    net, x = model(name)

    def f(x):
        return (net(x) ** 2).sum() + net(x).sum()

    found = hodiff.laplacian(f, chunk_size=chunk_size)(x)
    torch.testing.assert_close(found, trace_of_hessian(f, x), rtol=1e-9, atol=1e-9)


NUCLEI = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.4]], dtype=D)


def orbitals(r):
    """Compute exponentials about the nuclei and their products with coordinates, one per electron, at most four."""
    distances = torch.linalg.vector_norm(r[:, None] - NUCLEI, dim=-1)
    s = torch.exp(-distances * torch.tensor([1.0, 0.8], dtype=D))
    p = r[:, :2] * torch.exp(-0.6 * distances[:, :1])
    return torch.cat((s, p), 1)[:, : len(r)]


def jastrow(r):
    i, j = torch.triu_indices(len(r), len(r), 1)
    d = torch.linalg.vector_norm(r[i] - r[j], dim=-1)
    return (0.5 * d / (1 + 0.7 * d)).sum()


def log_wavefunction(r):
    return torch.linalg.slogdet(orbitals(r))[1] + jastrow(r)


def wavefunction(r):
    return torch.linalg.det(orbitals(r)) * torch.exp(jastrow(r))


@pytest.mark.parametrize("electrons", [2, 3, 4])
def test_slater_jastrow_kinetic_energies_agree(electrons):
    """The local kinetic energies from ψ and from log ψ agree, and both match Hessians."""
    r = randn(electrons, 3)
    psi, _, total = value_grad_laplacian(wavefunction)(r)
    _, slope, curvature = value_grad_laplacian(log_wavefunction)(r)
    torch.testing.assert_close(total / psi, curvature + (slope * slope).sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(total, trace_of_hessian(wavefunction, r), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(curvature, trace_of_hessian(log_wavefunction, r), rtol=1e-9, atol=1e-9)


def test_hydrogen_atom_matches_closed_form():
    """The ratio Δψ / ψ for exp(-r) is 1 - 2 / r."""
    r = randn(3)
    psi, _, total = value_grad_laplacian(lambda r: torch.exp(-torch.linalg.vector_norm(r)))(r)
    torch.testing.assert_close(total / psi, 1 - 2 / r.norm())


# Self-similar solutions of Burgers' equation: x = -u - u^(2k+1) solves -λ u + ((1 + λ) x + u) u' = 0, λ = 1 / 2k.
POINTS = torch.linspace(-1.2, 1.2, 5, dtype=D)[:, None]


def along_x(f, x, order):
    """Return the value and the derivatives by x, with one number per row."""
    value, rest = jet(f, (x,), ([torch.ones_like(x), *[torch.zeros_like(x)] * (order - 1)],))
    return [value, *rest]


def residual_derivative(u, x, lam, n):
    """Compute the n-th derivative of -λ u + ((1 + λ) x + u) u' from derivatives of u up to n + 1, by Leibniz's rule."""
    speed = [(1 + lam) * x + u[0], 1 + lam + u[1], *u[2:]]
    choose = [1.0]
    for i in range(n):
        choose.append(choose[-1] * (n - i) / (i + 1))
    return -lam * u[n] + sum(choose[i] * speed[i] * u[n - i + 1] for i in range(n + 1))


def cardano(x):
    """Return the profile for k = 1, a root of u³ + u + x."""
    size = torch.sqrt(x * x / 4 + 1 / 27)
    return (size - x / 2) ** (1 / 3) - (size + x / 2) ** (1 / 3)


def implicit_derivatives(x, u, k, order):
    """Compute derivatives of the profile, coefficient by coefficient, from x + u + u^(2k+1) = 0."""
    terms = [u, *[0.0] * order]
    for m in range(1, order + 1):
        power = [1.0, *[0.0] * order]
        for _ in range(2 * k + 1):
            power = [sum(power[i] * terms[j - i] for i in range(j + 1)) for j in range(order + 1)]
        slope = 1 + (2 * k + 1) * u ** (2 * k)
        terms[m] = -((1.0 if m == 1 else 0.0) + power[m]) / slope
    return [each * torch.exp(torch.lgamma(torch.tensor(m + 1.0, dtype=D))).item() for m, each in enumerate(terms)]


def test_burgers_profile_derivatives_match_implicit_series():
    """The derivatives of the root formula match the implicit series, and all derivatives of the residual vanish."""
    found = along_x(cardano, POINTS, 6)
    for row, x in enumerate(POINTS[:, 0].tolist()):
        expected = implicit_derivatives(x, found[0][row].item(), 1, 6)
        got = [each[row].item() for each in found]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for n in range(6):
        assert residual_derivative(found, POINTS, 0.5, n).abs().max() < 1e-9 * 10**n


@pytest.mark.parametrize("n", [2, 3])
def test_parameter_gradients_of_a_residual_match_nested_autograd(n):
    """A loss of network derivatives to order 3 or 4 has the gradient of nested autograd, as in n-TangentProp."""
    W, b, w = randn(6, 1), randn(6), randn(1, 6) / 2
    k = 2
    parameters = [each.requires_grad_() for each in (W, b, w)]

    def net(x):
        return torch.tanh(x @ W.mT + b) @ w.mT

    def nested(x, order):
        x = x.clone().requires_grad_()
        found = [net(x)]
        for _ in range(order):
            found.append(torch.autograd.grad(found[-1].sum(), x, create_graph=True)[0])
        return found

    def loss(u):
        return (
            residual_derivative(u, POINTS, 1 / (2 * k), n).square().mean()
            + residual_derivative(u, POINTS, 1 / (2 * k), 0).square().mean()
        )

    found = torch.autograd.grad(loss(along_x(net, POINTS, n + 1)), parameters)
    right = torch.autograd.grad(loss(nested(POINTS, n + 1)), parameters)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_float32_softmax_regression_matches_float64():
    W, x = randn(5, 4), randn(4)

    def f(x):
        return functional.cross_entropy((W.to(x.dtype) @ x)[None], torch.tensor([2]))

    found, right = hodiff.laplacian(f)(x.float()), hodiff.laplacian(f)(x)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
