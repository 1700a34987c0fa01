"""Products of real functions at complex points equal products with respect to the real and imaginary parts."""

import copy
import pickle

import pytest
import torch

import hodiff

D, C = torch.float64, torch.complex128


def randn(*shape, seed=0, dtype=C):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def pairs(tree):
    return {name: torch.view_as_real(each) if each.is_complex() else each for name, each in tree.items()}


def quartic(z):
    """|z|^4: with z = a + ib the Hessian is 4 |z|² I + 8 (a, b)(a, b)'."""
    return z.abs().square().square().sum()


def product_of_quartic(z, v):
    return 4 * z.abs().square() * v + 8 * z * (z.conj() * v).real


def mixed(p):
    waves = torch.fft.fft(p["w"] * p["x"])
    return (waves * p["w"].conj()).real.tanh().sum() + (p["w"].sin() * p["b"]).abs().square().sum()


def mixed_of_pairs(p):
    return mixed({**p, "w": torch.view_as_complex(p["w"])})


POINT = {"w": randn(4), "x": randn(4, seed=1, dtype=D), "b": randn(4, seed=2, dtype=D)}
DIRECTION = {"w": randn(4, seed=3), "x": randn(4, seed=4, dtype=D), "b": randn(4, seed=5, dtype=D)}


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hvp_matches_closed_form(route):
    z, v = randn(3), randn(3, seed=1)
    got = hodiff.hvp(quartic, z, v, route=route)
    assert got.dtype == C
    torch.testing.assert_close(got, product_of_quartic(z, v))


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hvp_matches_real_pairs(route):
    got = hodiff.hvp(mixed, POINT, DIRECTION, route=route)
    expected = hodiff.hvp(mixed_of_pairs, pairs(POINT), pairs(DIRECTION))
    torch.testing.assert_close(pairs(got), expected)


def test_value_grad_hvp_matches_closed_form():
    z, v = randn(3), randn(3, seed=1)
    value, gradient, product = hodiff.value_grad_hvp(quartic, z, v)
    leaf = z.clone().requires_grad_()
    (expected,) = torch.autograd.grad(quartic(leaf), leaf)
    torch.testing.assert_close((value, gradient, product), (quartic(z), expected, product_of_quartic(z, v)))


def test_hessian_matrix_and_directional_derivatives_match_real_pairs():
    matrix = hodiff.hessian_matrix(mixed, POINT)
    torch.testing.assert_close(matrix, hodiff.hessian_matrix(mixed_of_pairs, pairs(POINT)))
    got = hodiff.directional_derivatives(mixed, POINT, DIRECTION, order=3)
    expected = hodiff.directional_derivatives(mixed_of_pairs, pairs(POINT), pairs(DIRECTION), order=3)
    torch.testing.assert_close(got, expected)


def test_conjugate_views_and_complex64_are_accepted():
    z, v = randn(3).conj(), randn(3, seed=1).conj()
    torch.testing.assert_close(hodiff.hvp(quartic, z, v), product_of_quartic(z, v).resolve_conj())
    single = hodiff.hvp(quartic, z.to(torch.complex64), v.to(torch.complex64))
    assert single.dtype == torch.complex64
    torch.testing.assert_close(single.to(C), product_of_quartic(z, v).resolve_conj(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Torchinductor does not support:UserWarning")
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hessian_operator_matches_dense_matrix(compile):
    A = hodiff.HessianOperator(mixed, POINT, compile=compile)
    dense = hodiff.hessian_matrix(mixed, POINT)
    assert A.shape == dense.shape == (16, 16)
    torch.testing.assert_close(A.to_dense(), dense)
    torch.testing.assert_close(A @ DIRECTION, hodiff.hvp(mixed, POINT, DIRECTION))
    block = A.block("w")
    torch.testing.assert_close(block.to_dense(), dense[:8, :8])
    torch.testing.assert_close((block @ {"w": DIRECTION["w"]})["w"], (A @ {**pairs_zero(), "w": DIRECTION["w"]})["w"])


def pairs_zero():
    return {name: torch.zeros_like(each) for name, each in POINT.items()}


def test_operator_accepts_complex_and_flat_real_vectors():
    z, v = randn(3), randn(3, seed=1)
    A = hodiff.HessianOperator(quartic, z)
    torch.testing.assert_close(A @ v, product_of_quartic(z, v))
    flat = A @ torch.view_as_real(v).reshape(-1)
    torch.testing.assert_close(torch.view_as_complex(flat.reshape(3, 2)), product_of_quartic(z, v))
    other = A.at(2 * z)
    torch.testing.assert_close(other @ v, product_of_quartic(2 * z, v))
    for again in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        torch.testing.assert_close(again @ v, A @ v)
    with pytest.raises(hodiff.InputError, match="of complex numbers"):
        A @ torch.randn(4, dtype=C)


def test_gauss_newton_matches_real_pairs():
    x, y = randn(5, 4), randn(5, seed=7)

    def model(p, inputs):
        return torch.view_as_real((inputs @ p["w"]).tanh())

    def loss(outputs, targets):
        return (outputs - torch.view_as_real(targets)).square().sum() / 2

    def of_pairs(p):
        return model({"w": torch.view_as_complex(p["w"])}, x)

    point = {"w": POINT["w"] / 4}
    G = hodiff.GaussNewtonOperator(model, loss, point, x, y)
    J = torch.func.jacrev(of_pairs)(pairs(point))["w"].reshape(10, 8)
    torch.testing.assert_close(G.to_dense(), J.mT @ J)
    v = {"w": DIRECTION["w"]}
    torch.testing.assert_close(torch.view_as_real((G @ v)["w"]).reshape(-1), J.mT @ J @ pairs(v)["w"].reshape(-1))


def test_rejects_ambiguous_complex_derivatives():
    z = randn(3)
    for transform in (hodiff.hessian, hodiff.jacobian, hodiff.hessian_diagonal):
        with pytest.raises(hodiff.InputError, match="view_as_real"):
            transform(quartic)(z)
    with pytest.raises(hodiff.InputError, match="one real number"):
        hodiff.hvp(lambda z: z.sum(), z, z)
    with pytest.raises(hodiff.InputError, match="v does not match"):
        hodiff.hvp(quartic, z, z.real)


def test_third_derivatives_match_closed_form():
    z, v = randn(3), randn(3, seed=1)
    gradient = torch.func.grad(lambda pair: hodiff.hvp(quartic, torch.view_as_complex(pair), v).abs().square().sum())
    expected = torch.func.grad(lambda pair: product_of_quartic(torch.view_as_complex(pair), v).abs().square().sum())
    torch.testing.assert_close(gradient(torch.view_as_real(z)), expected(torch.view_as_real(z)))


@pytest.mark.parametrize("order", ["Wb", "bW"])
def test_odd_number_of_real_parameters_beside_complex_parameters(order):
    """Pairs start at odd places in blocks of vectors, where torch cannot view them as complex numbers."""
    generator = torch.Generator().manual_seed(0)
    parts = {
        "W": torch.randn(2, 2, dtype=torch.complex128, generator=generator),
        "b": torch.randn(3, dtype=torch.float64, generator=generator),
    }
    x = {name: parts[name] for name in order}
    A = hodiff.HessianOperator(lambda p: p["W"].abs().pow(4).sum() * p["b"].pow(2).sum() + p["W"].imag.sum(), x)
    dense = torch.stack([A @ e for e in torch.eye(11, dtype=torch.float64)], 1)
    torch.testing.assert_close(A.to_dense(), dense)
    torch.testing.assert_close(A @ torch.eye(11, dtype=torch.float64).t(), dense)
    torch.testing.assert_close(A.trace().value, dense.trace().item())
    torch.testing.assert_close(A.diagonal().value, dense.diagonal())
    largest = torch.linalg.eigvalsh(dense).abs().max()
    torch.testing.assert_close(A.eigsh(1).eigenvalues.abs()[0], largest)
