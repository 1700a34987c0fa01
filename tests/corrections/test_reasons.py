"""The published causes of faults: torch's wrong derivative equals the formula that the reason in the table states."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from corrections.public_reports import nested
from torch.func import grad, jacrev, jvp, vjp

D = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


L = randn(3, 3).tril() + 3 * torch.eye(3, dtype=D)
TANGENT, B = randn(3, 3, seed=1), randn(3, 3, seed=2)
DL = TANGENT.tril()


def tangent(f, x, v):
    return jvp(f, (x,), (v,))[1]


def skip_where_mended(got, right, rtol):
    """Skip the test where torch is right, which torch 2.13, whose faults the reasons describe, must not be."""
    if torch.allclose(got, right, rtol=rtol):
        assert not torch.__version__.startswith("2.13")
        pytest.skip(f"torch {torch.__version__} has mended the fault of 2.13 that the reason describes")


def factors_in_the_wrong_order():
    """The right tangent is -X (dL Lᵀ + L dLᵀ) X; torch exchanges Lᵀ and the last X."""
    X = torch.cholesky_inverse(L)
    wrong, right = -X @ DL @ X @ L.mT, -X @ DL @ L.mT @ X
    return tangent(torch.cholesky_inverse, L, DL), wrong + wrong.mT, right + right.mT


def right_side_as_vectors():
    """Torch takes B (3, 3) beside L (3, 3, 3) for vectors: it multiplies row j of each solution by the j-th tangent."""
    factors, tangents = torch.stack([L, 2 * L, L + L[0, 0]]).tril(), torch.stack([DL, DL / 2, -DL])
    got = tangent(lambda each: torch.cholesky_solve(B, each), factors, tangents)
    dA, x = tangents @ factors.mT + factors @ tangents.mT, torch.cholesky_solve(B, factors)
    wrong, right = torch.einsum("jab,ijb->ija", dA, x), dA @ x
    # The same systems, if B has the dimensions of L.
    fits = tangent(lambda each: torch.cholesky_solve(B.expand(3, 3, 3), each), factors, tangents)
    torch.testing.assert_close(fits, -torch.cholesky_solve(right, factors))
    return got, -torch.cholesky_solve(wrong, factors), -torch.cholesky_solve(right, factors)


def tangent_not_transposed():
    x = torch.linalg.solve(L, B)
    upper = L.mT.contiguous()
    got = tangent(lambda a: torch.triangular_solve(B, a, transpose=True)[0], upper, DL.mT)
    return got, -torch.linalg.solve(L, DL.mT @ x), -torch.linalg.solve(L, DL @ x)


def ignored_entries():
    x = torch.linalg.solve(L, B)
    got = tangent(lambda a: torch.triangular_solve(B, a, upper=False)[0], L, TANGENT)
    return got, -torch.linalg.solve(L, TANGENT @ x), -torch.linalg.solve(L, DL @ x)


def gradient_of_overwritten_elements():
    weights = torch.arange(1.0, 5.0, dtype=D)
    got = grad(lambda x: torch.as_strided_scatter(x, torch.ones(2, dtype=D), (2,), (1,)) @ weights)(randn(4))
    overwritten = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=D)
    return got, weights * overwritten, weights * (1 - overwritten)


def sign_of_the_modulus():
    angle = torch.tensor([0.5, 0.5, 0.5], dtype=D)
    modulus = torch.tensor([-2.0, 0.0, 3.0], dtype=D)
    got = grad(lambda r: torch.polar(r, angle).real.sum())(modulus)
    return got, angle.cos() * modulus.sign(), angle.cos()


def zero_tangent_of_products():
    x, index = torch.tensor([2.0, 3.0, 5.0], dtype=D), torch.tensor([0, 0, 0])

    def f(x):
        return torch.scatter_reduce(torch.ones(1, dtype=D), 0, index, x, "prod")

    return tangent(f, x, torch.ones(3, dtype=D)), torch.zeros(1, dtype=D), torch.full((1,), 31.0, dtype=D)


def constant_statistics(f, dim):
    x, v, weights = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2)
    centred = v - v.mean(dim, keepdim=True)

    def rule(x, mean, scale):
        tangent = centred * scale - (x - mean) * scale**3 * ((x - mean) * centred).mean(dim, keepdim=True)
        return (tangent * weights).sum()

    def statistics(x):
        return x.mean(dim, keepdim=True), (x.var(dim, unbiased=False, keepdim=True) + 1e-5).rsqrt()

    fixed = statistics(x)
    got = grad(lambda x: (tangent(f, x, v) * weights).sum())(x)
    return got, grad(lambda x: rule(x, *fixed))(x), grad(lambda x: rule(x, *statistics(x)))(x)


def constant_norms():
    v, g, cotangent, u = randn(3, 4), randn(3, 1, seed=1), randn(3, 4, seed=2), randn(3, 4, seed=3)

    def backward(v, norms):
        return (g / norms * (cotangent - v * (v * cotangent).sum(1, keepdim=True) / norms**2) * u).sum()

    norms = v.norm(dim=1, keepdim=True)
    got = grad(lambda z: (vjp(lambda v: torch._weight_norm_interface(v, g, 0)[0], z)[1](cotangent)[0] * u).sum())(v)
    return got, grad(lambda v: backward(v, norms))(v), grad(lambda v: backward(v, v.norm(dim=1, keepdim=True)))(v)


def constant_matrix():
    """The rule -A⁻¹ dA x solves with the factors of A."""
    got = grad(lambda a: tangent(lambda a: torch.linalg.solve(a, B), a, TANGENT).sum())(L)

    def rule(a, inside):
        return -torch.linalg.solve(a, TANGENT @ torch.linalg.solve(inside, B)).sum()

    return got, grad(lambda a: rule(L, a))(L), grad(lambda a: rule(a, a))(L)


def constant_factors():
    got = grad(lambda a: tangent(torch.linalg.det, a, TANGENT))(L)

    def rule(a, inside):
        return torch.linalg.det(inside) * torch.linalg.solve(a, TANGENT).trace()

    return got, grad(lambda a: rule(L, a))(L), grad(lambda a: rule(a, a))(L)


CAUSES = {
    "cholesky_inverse": factors_in_the_wrong_order,
    "cholesky_solve": right_side_as_vectors,
    "triangular_solve, transposed": tangent_not_transposed,
    "triangular_solve, ignored entries": ignored_entries,
    "as_strided_scatter": gradient_of_overwritten_elements,
    "polar": sign_of_the_modulus,
    "scatter_reduce": zero_tangent_of_products,
    "layer_norm": lambda: constant_statistics(lambda x: F.layer_norm(x, (4,)), -1),
    "batch_norm": lambda: constant_statistics(lambda x: F.batch_norm(x, None, None, training=True), 0),
    "instance_norm": lambda: constant_statistics(lambda x: F.instance_norm(x[None])[0], -1),
    "weight_norm": constant_norms,
    "solve": constant_matrix,
    "det": constant_factors,
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_torch_is_wrong_for_the_published_reason(cause):
    got, stated, right = cause()
    skip_where_mended(got, right, 1e-9)
    torch.testing.assert_close(got, stated, rtol=1e-9, atol=1e-12)


def test_masked_select_is_wrong_only_under_vmap():
    """Three selected elements, at two places: under vmap, torch takes the batch of gradients for a dimension."""
    mask = torch.tensor([[True, False], [True, True]])
    x, places = torch.tensor([0.5, -0.7], dtype=D), torch.tensor([0, 0, 1])
    f, by_hand = (lambda x: torch.masked_select(x, mask).sum()), (lambda x: x[places].sum())
    torch.testing.assert_close(grad(f)(x), grad(by_hand)(x))
    try:
        batched = jacrev(lambda x: torch.stack([f(x), 2 * f(x)]))(x)
    except RuntimeError:
        return
    skip_where_mended(batched, jacrev(lambda x: torch.stack([by_hand(x), 2 * by_hand(x)]))(x), 1e-5)


@pytest.mark.parametrize("middle", ["f", "r"])
def test_third_derivatives_of_eigenvalues_are_wrong_through_forward_over(middle):
    """The sum of cubes of eigenvalues is the trace of the cube, a cubic polynomial of t."""
    matrix, direction = randn(3, 3), randn(3, 3, seed=1)
    truth = 6 * (direction @ direction @ direction).trace()

    def f(t):
        return (torch.linalg.eigvals(matrix + t * direction) ** 3).sum().real

    for inner, outer in itertools.product("rf", repeat=2):
        got = nested(f, inner + middle + outer)(torch.zeros((), dtype=D))
        if middle == "f":
            skip_where_mended(got, truth, 1e-5)
        assert torch.allclose(got, truth, rtol=1e-8) == (middle == "r")
