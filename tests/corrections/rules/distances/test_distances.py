"""Distances: torch's values and first derivatives, correct routes, and torch's conventions at equal points."""

import math

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_value
from corrections.contract import Contract
from drawing import draw

import hodiff

D = torch.float64
corrected = hodiff.corrected()

NORMS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, math.inf)


def cdist_and_pdist(p):
    def f(x, y):
        return torch.cat([torch.cdist(x, y, p=p).flatten(), F.pdist(x, p)])

    return f


INPUTS = draw(2, 2), draw(1, 2, seed=1)


def test_two_points_match_closed_form():
    """The Hessian of |x - y| by x is the projection orthogonal to x - y, divided by the distance."""
    x, y = torch.tensor([3.0, 4.0], dtype=D), torch.zeros(2, dtype=D)
    hessian = torch.tensor([[16.0, -12.0], [-12.0, 9.0]], dtype=D) / 125

    def f(x):
        return torch.cdist(x[None], y[None])[0, 0]

    def g(x):
        return F.pdist(torch.stack([x, y]))[0]

    for route in hodiff.ROUTES:
        for distance in (f, g):
            torch.testing.assert_close(hodiff.hessian(distance, route=route)(x), hessian)


MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", NORMS)
def test_values_and_gradients_match_torch(p, mode):
    """Batches broadcast; with more than 25 points torch uses a matrix product."""
    x, y = draw(2, 1, 30, 3).requires_grad_(), draw(3, 2, 3, seed=1).requires_grad_()

    def results():
        distances = torch.cdist(x, y, p=p, compute_mode=mode)
        return distances, *torch.autograd.grad(distances.sin().sum(), (x, y))

    same_value(results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("p", NORMS)
def test_first_derivatives_at_equal_points_and_ties_match_torch(p):
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 4.0], [3.0, 4.0]], dtype=D, requires_grad=True)
    weights = draw(4, 4)

    def gradients():
        (one,) = torch.autograd.grad((torch.cdist(x, x.detach(), p=p) * weights).sum(), x)
        (two,) = torch.autograd.grad((F.pdist(x, p) * weights.flatten()[:6]).sum(), x)
        return one, two

    same_value(gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_zero_distances_add_nothing_to_second_derivatives(mode):
    """The diagonal of a large kernel matrix has distances that a matrix product rounds to 1e-8."""
    x = draw(40, 3)

    def with_diagonal(x):
        return torch.cdist(x, x, compute_mode=mode).sum()

    def without(x):
        return 2 * F.pdist(x).sum()

    v = draw(40, 3, seed=1)
    for route in hodiff.ROUTES:
        product = hodiff.hvp(with_diagonal, x, v, route=route)
        torch.testing.assert_close(product, hodiff.hvp(without, x, v, route=route), rtol=1e-9, atol=1e-9)


def test_offset_loses_no_digits():
    x, y = draw(5, 3), draw(4, 3, seed=1)
    v = draw(5, 3, seed=2)

    def f(x, shift):
        return torch.cdist(x + shift, y + shift, compute_mode=MODES[2]).sum()

    torch.testing.assert_close(hodiff.hvp(f, x, v, 1e6), hodiff.hvp(f, x, v, 0.0), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shapes", [((0, 3), (2, 3)), ((2, 3), (0, 3)), ((2, 0), (3, 0)), ((0, 2, 3), (0, 4, 3))])
@pytest.mark.parametrize("p", [1.5, 2.0, math.inf])
def test_empty_inputs_give_empty_distances(shapes, p):
    x, y = (torch.zeros(shape, dtype=D) for shape in shapes)
    with corrected:
        assert torch.equal(torch.cdist(x, y, p), torch.zeros(*shapes[0][:-1], shapes[1][-2], dtype=D))
        if x.dim() == 2:
            assert F.pdist(x, p).shape == (len(x) * (len(x) - 1) // 2,)


@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_match_torch(autocast):
    x = draw(3, 2).float()

    def results(dtype):
        with torch.autocast("cpu", enabled=autocast):
            return torch.cdist(x.to(dtype), x.to(dtype)), F.pdist(x)

    for dtype in (torch.float32, torch.bfloat16) if autocast else (torch.float32,):
        expected = results(dtype)
        with corrected:
            torch.testing.assert_close(results(dtype), expected, rtol=1e-5, atol=1e-3)


WRONG = {
    "columns": lambda x: torch.cdist(x, x[:, :1]),
    "negative p": lambda x: torch.cdist(x, x, p=-1),
    "negative p of pdist": lambda x: F.pdist(x, -1.0),
    "mode": lambda x: torch.cdist(x, x, compute_mode="fast"),
    "vector": lambda x: torch.cdist(x[0], x),
    "three dimensions": lambda x: F.pdist(x[None]),
    "dtypes": lambda x: torch.cdist(x, x.float()),
    "no tensor": lambda x: torch.cdist(x, [1.0]),
}


CASES = {str(p): (cdist_and_pdist(p), INPUTS) for p in NORMS[1:]}


class TestContract(Contract):
    cases = CASES
    order, one_in = 3, 9
    errors, error_inputs = WRONG, (draw(3, 2),)
