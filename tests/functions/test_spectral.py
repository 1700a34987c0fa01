"""Tests of functions of symmetric matrices with equal, nearly equal and distinct eigenvalues."""

import pytest
import torch

import hodiff

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X, W = torch.randn(2, 3, 3, generator=GENERATOR, dtype=D)
S = X + X.mT
MATRICES = {
    "apart": S,
    "equal": torch.eye(3, dtype=D),
    "near": torch.eye(3, dtype=D) + 1e-9 * S,
    "two and one": torch.diag(torch.tensor([1.0, 1, 2], dtype=D)),
    "near zero": 1e-9 * S + torch.diag(torch.tensor([0.0, 0, 1], dtype=D)),
}


def spectral(A):
    return (hodiff.functions.spectral_function(A, torch.exp) * W).sum()


def primitive(A):
    return (torch.linalg.matrix_exp((A + A.mT) / 2) * W).sum()


@pytest.mark.parametrize("name", MATRICES)
def test_hvp_matches_matrix_exp(name):
    A = MATRICES[name]
    expected = hodiff.hvp(primitive, A, X, route="reverse-over-reverse")
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(spectral, A, X, route=route), expected, rtol=1e-12, atol=1e-12)


def test_third_derivatives_at_equal_eigenvalues_match():
    def third(f):
        def second(A):
            return torch.func.jvp(torch.func.grad(f), (A,), (X,))[1]

        return torch.func.jvp(second, (torch.eye(3, dtype=D),), (X,))[1]

    torch.testing.assert_close(third(spectral), third(primitive), rtol=1e-12, atol=1e-12)


def test_logarithmic_strain_hessian_at_rest_matches_closed_form():
    """The Hessian of |log C|^2 / 2 at the identity is the identity on symmetric matrices, also under vmap."""

    def energy(C):
        return hodiff.functions.spectral_function(C, torch.log).square().sum() / 2

    C, V = (
        torch.eye(3, dtype=D).expand(2, 3, 3) * torch.tensor([1.0, 1 + 1e-13], dtype=D)[:, None, None],
        torch.stack([S, X]),
    )
    expected = (V + V.mT) / 2
    batched = torch.func.vmap(lambda c, v: hodiff.hvp(energy, c, v))(C, V)
    torch.testing.assert_close(batched, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(hodiff.hvp(energy, C, V), expected, rtol=1e-11, atol=1e-11)


def test_hermitian_matrices_match():
    def of_parts(function):
        return lambda a: function(torch.complex((a + a.mT) / 2, (X - X.mT) / 2)).abs().square().sum()

    f = of_parts(lambda A: hodiff.functions.spectral_function(A, torch.exp))
    expected = hodiff.hvp(of_parts(torch.linalg.matrix_exp), S, W, route="reverse-over-reverse")
    torch.testing.assert_close(hodiff.hvp(f, S, W), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(([1.0], torch.exp), "A: expected a tensor"), ((X[0], torch.exp), "square matrices"), ((S, 2), "f: expected")],
)
def test_rejects_bad_arguments(arguments, said):
    with pytest.raises(hodiff.InputError, match=said):
        hodiff.functions.spectral_function(*arguments)
