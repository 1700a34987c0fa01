"""Piecewise functions of lengths that are 0, and of lengths that a mask sets to 0, in Taylor mode and by routes."""

import pytest
import torch
import torch.nn.functional as F

import hodiff
from hodiff.corrections.rules.distances.lengths import LENGTHS

ZERO = torch.zeros(3, dtype=torch.float64)
SIGNS = torch.tensor([1.0, -3.0, 0.0, 2.0], dtype=torch.float64)
# Constants of selu.
SCALE, ALPHA = 1.0507009873554805, 1.6732632423543772
# Laplacians at 0, where |x| has the Laplacian 6 of its square.
STEPS = {
    "relu": (lambda n: F.relu(n) ** 2, 6),
    "relu of a negative length": (lambda n: F.relu(-n) ** 2, 0),
    "relu of a negative length that is copied": (lambda n: F.relu((-n).clone()) ** 2, 0),
    "relu of a negative length in place": (lambda n: F.relu(-n, inplace=True) ** 2, 0),
    "relu of a multiple that is moved": (lambda n: F.relu((n * SIGNS)[None].flip(1)).square().sum(), 30),
    "relu of a multiple": (lambda n: torch.relu(2 * n) ** 2, 24),
    "relu in place": (lambda n: (n * 1).relu_() ** 2, 6),
    "relu by an option": (lambda n: F.relu(n * 1, inplace=True) ** 2, 6),
    "relu by a positional option": (lambda n: F.relu(n * 1, True) ** 2, 6),
    "cos in place": (lambda n: (n * 1).cos_(), -3),
    "cos of relu6": (lambda n: F.relu6(n).cos(), -3),
    "clamp": (lambda n: n.clamp(min=0) ** 2, 6),
    "clamp of a negative length": (lambda n: (-n).clamp(min=0) ** 2, 0),
    "leaky relu of a negative length": (lambda n: F.leaky_relu(-n, 0.5) ** 2, 1.5),
    "hardtanh": (lambda n: F.hardtanh(n, 0, 1) ** 2, 6),
    "threshold": (lambda n: F.threshold(n, 0.0, 0.0) ** 2, 6),
    "elu": (lambda n: F.elu(n) ** 2 + F.elu(n) - n, 6),
    "elu of a negative length": (lambda n: F.elu(-n) + n, 3),
    "elu whose slopes differ": (lambda n: F.elu(-n, 0.5) + n / 2, 1.5),
    "elu in place": (lambda n: F.elu(-n, inplace=True) + n, 3),
    "celu of a negative length": (lambda n: F.celu(-n, 2.0) + n, 1.5),
    "selu": (lambda n: F.selu(n) ** 2, 6 * SCALE**2),
    "selu of a negative length": (lambda n: torch.selu(-n) + SCALE * ALPHA * n, 3 * SCALE * ALPHA),
    "hardswish": (lambda n: F.hardswish(n) - n / 2, 1),
    "hardswish above a bound": (lambda n: F.hardswish(3 + n) - n, 0),
    "hardswish below a bound": (lambda n: F.hardswish(3 - n) + 1.5 * n, 1),
    "at another bound": (lambda n: (F.relu(n + 1 - 1e-300) - 1 + n.clamp(max=0)) ** 2, 6),
}
SELECTIONS = {
    "maximum": (lambda n: torch.maximum(n, 2 * n) ** 2, 24),
    "minimum": (lambda n: torch.minimum(n, -n) ** 2, 6),
    "amax": (lambda n: torch.stack([n, 2 * n]).amax() ** 2, 24),
    "max": (lambda n: torch.stack([2 * n, n]).max() ** 2, 24),
    "min of a dimension": (lambda n: torch.stack([2 * n, n]).min(0).values ** 2, 6),
}


def of_norm(function):
    return lambda x: function(x.norm())


@pytest.mark.parametrize("name", STEPS)
def test_laplacian_and_routes_of_step_functions(name):
    f, laplacian = of_norm(STEPS[name][0]), STEPS[name][1]
    assert float(hodiff.laplacian(f)(ZERO)) == pytest.approx(laplacian, abs=1e-12)
    assert float(hodiff.taylor.pure_second_derivatives(f)(ZERO).sum()) == pytest.approx(laplacian, abs=1e-12)
    for route in hodiff.ROUTES:
        hessian = hodiff.hessian(f, route=route)(ZERO)
        torch.testing.assert_close(hessian, laplacian / 3 * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_follow_the_faster_length_or_are_refused(name):
    f, laplacian = of_norm(SELECTIONS[name][0]), SELECTIONS[name][1]
    assert float(hodiff.laplacian(f)(ZERO)) == pytest.approx(laplacian)
    with pytest.warns(hodiff.HodiffWarning, match="0 somewhere, where it has a kink"):
        assert hodiff.hvp(f, ZERO, torch.ones_like(ZERO)).isnan().all()


def test_selections_between_lengths_follow_each_direction():
    # Along each coordinate axis, the largest |x_i| is that of the axis.
    found = hodiff.taylor.pure_second_derivatives(lambda x: x.abs().amax() ** 2)(ZERO)
    torch.testing.assert_close(found, torch.full_like(ZERO, 2.0))


def test_pieces_that_depend_on_the_direction_are_refused_where_directions_are_summed():
    # The order-2 coefficient of the smooth part differs between the pieces, which differ between the axes.
    scale = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    f = lambda x: torch.maximum(x[0].abs() + x.square().sum(), x[1].abs()) * 1.0 + 0 * (x * scale).sum()  # noqa: E731
    with pytest.warns(hodiff.HodiffWarning, match="The branch of the function depends on the direction"):
        assert hodiff.laplacian(f)(ZERO).isnan()


def test_zeros_that_are_no_lengths_keep_torchs_derivative():
    f = lambda x: F.relu(x).square().sum() + F.relu(x.sum()) + x.norm() ** 2  # noqa: E731
    assert float(hodiff.laplacian(f)(ZERO)) == 6
    torch.testing.assert_close(hodiff.hessian(f)(ZERO), 2 * torch.eye(3, dtype=torch.float64))


D, V = torch.float64, torch.tensor([1.0, 0.0], dtype=torch.float64)
MASK, ONES = torch.tensor([1.0, 0.0], dtype=D), torch.ones(2, 2, dtype=D)
# Elements that a factor or a function sets to 0 are constants; the length 5 is not 0.
MASKED = {
    "clone": lambda n: (n * MASK).clone().softmax(0)[0],
    "a new dimension": lambda n: (n * MASK)[None].softmax(1)[0, 0],
    "in place": lambda n: (n * ONES[0]).mul_(MASK).softmax(0)[0],
    "a cutoff": lambda n: (lambda d: (d * (d < 6)).repeat(2).softmax(0)[0])(torch.stack([n, 2 * n])),
    "dropout in evaluation": lambda n: F.dropout(n * MASK, training=False).softmax(0)[0],
    "triu": lambda n: (n * ONES).triu().softmax(1)[1, 1],
    "tril": lambda n: (n * ONES).tril().softmax(1)[0, 0],
    "diag_embed": lambda n: torch.diag_embed(n * ONES[0]).softmax(1)[1, 1],
    "pad": lambda n: F.pad(n[None], (0, 1)).softmax(0)[0],
}


@pytest.mark.filterwarnings("error::hodiff.HodiffWarning")
@pytest.mark.parametrize("name", MASKED)
def test_elements_that_a_mask_sets_to_zero_are_no_kinks(name):
    f, x = of_norm(MASKED[name]), torch.tensor([3.0, 4.0], dtype=D)
    expected = torch.func.hessian(f)(x) @ V
    assert expected.isfinite().all()
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, x, V, route=route), expected)


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_no_length_is_remembered_after_a_derivative():
    functions = [f for f, _ in (*STEPS.values(), *SELECTIONS.values())]
    moves = [lambda n: n.clone(), lambda n: n[None].flip(0).sum(), lambda n: n.reshape(1).sum().to(D)]
    before = len(LENGTHS)
    for f in (*functions, *moves, *MASKED.values()):
        for x in (torch.zeros(2, dtype=D), torch.ones(2, dtype=D)):
            for route in hodiff.ROUTES:
                hodiff.hvp(of_norm(f), x, V, route=route)
    assert len(LENGTHS) <= before
