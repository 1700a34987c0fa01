"""What gradients are asked for at infinity and without any elements, and that nothing of it stays behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hodiff.checks import check
from hodiff.checks.module_buffers import buffers_put_back
from hodiff.checks.probes.domain_edges import bad_gradient, domain_edges
from hodiff.checks.probes.empty_tensors import empty_tensors

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)
M = torch.tensor([[0.5, -1.2, 2.0], [0.3, 0.9, -0.6]], dtype=torch.float64)


def gaussian(x):
    return torch.exp(-(x**2))


@pytest.mark.parametrize("f", [torch.tanh, torch.sigmoid, F.softplus, F.logsigmoid, torch.atan, torch.erf, torch.exp])
def test_finite_slopes_at_infinity(f):
    assert domain_edges(lambda x: (f(x),), (X,), "") == []


@pytest.mark.parametrize("f", [torch.sin, torch.square, lambda x: x, F.silu, lambda x: x.softmax(0), torch.abs])
def test_no_limit_and_no_defect(f):
    assert domain_edges(lambda x: (f(x),), (X,), "") == []


def test_nan_at_infinity_by_closed_form():
    (cause,) = domain_edges(lambda x: (gaussian(x),), (X,), "here")
    assert (cause.code, cause.severity, cause.location) == ("HD112", "warning", "here")
    assert "an element of input 0 is inf" in cause.evidence[0]
    assert domain_edges(lambda x: (gaussian(x),), (X,), "", infinite=False) == []


def test_a_value_that_is_no_limit():
    """0 at infinity by decree, and the identity elsewhere: its derivative there is anything."""
    f = lambda x: (torch.where(x.isinf(), 0.0, x) + 0 * gaussian(x),)  # noqa: E731
    point = torch.tensor([torch.inf, 1.0], dtype=torch.float64)
    assert torch.autograd.functional.jacobian(lambda x: f(x)[0].sum(), point)[0].isnan()
    assert bad_gradient(f, (point,)) == ""
    assert bad_gradient(lambda x: (gaussian(x),), (point,)) != ""


def test_only_the_infinite_input_counts():
    """The weight of an infinite input has it for a factor: 0 * inf, as in every layer."""
    f = lambda x, w: ((x * w).tanh(),)  # noqa: E731
    gradients = torch.autograd.grad(f(torch.tensor(torch.inf), w := torch.ones((), requires_grad=True))[0], w)
    assert gradients[0].isnan()
    assert domain_edges(f, (X, X.flip(0)), "") == []


def test_infinity_is_a_consequence_of_overflow():
    report = check(lambda x: 1 / (1 + torch.exp(-x)), X, scipy=False)
    assert report.codes == ("HD111",)


@pytest.mark.parametrize("rule", ["backward", "jvp", "vmap"])
def test_empties_name_the_rule(rule):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g + (0 * g.max() if rule == "backward" else 0)

        @staticmethod
        def jvp(ctx, t):
            (x,) = ctx.saved_tensors
            return 2 * x * t + (0 * t.max() if rule == "jvp" else 0)

        @staticmethod
        def vmap(info, in_dims, x):
            return Square.apply(x) + (0 * x.max() if rule == "vmap" else 0), in_dims[0]

    (cause,) = empty_tensors(Square, (X,), (X,), "")
    assert cause.code == "HD409"
    assert cause.evidence[0].startswith(f"{rule} fails where a dimension of size 3 is 0")
    found = empty_tensors(Square, (X,), (X,), "", vmap=False)
    assert bool(found) == (rule != "vmap")


def test_a_tangent_of_the_wrong_shape():
    class Sum(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * 1 if len(g) else g.new_zeros(1)

        @staticmethod
        def jvp(ctx, t):
            return t * 1

    (cause,) = empty_tensors(Sum, (X,), (X,), "")
    assert "backward fails" in cause.evidence[0]


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (torch.sin, (X,)),
        (lambda x: x.sum(), (M,)),
        (lambda x, w: x @ w, (M, X)),
        (lambda x, i: x[i], (M, torch.tensor([0, 1, 1]))),
        (lambda x, k: x.topk(k).values, (X, 2)),
        (F.linear, (M, M, torch.ones(2, dtype=torch.float64))),
        (lambda x: x.amax(0), (X,)),
    ],
)
def test_right_functions_without_elements(f, args):
    leaves = tuple(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    assert empty_tensors(f, args, leaves, "") == []


def test_running_statistics_survive():
    norm = nn.BatchNorm1d(3).double()
    within = nn.Sequential(nn.Linear(3, 3).double(), norm)
    with buffers_put_back():
        within(torch.full((4, 3), torch.inf, dtype=torch.float64))
        assert norm.running_mean.isnan().any()
    assert torch.equal(norm.running_mean, torch.zeros(3, dtype=torch.float64))
    assert norm.num_batches_tracked == 0
    check(lambda x: within(x).sin(), torch.randn(4, 3, dtype=torch.float64), order=1, vmap=False, scipy=False)
    assert norm.running_mean.isfinite().all()
