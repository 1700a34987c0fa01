"""Rules that fail on empty tensors are named, and right functions pass."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from hodiff.checks.probes.empty_tensors import empty_tensors

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)
M = torch.tensor([[0.5, -1.2, 2.0], [0.3, 0.9, -0.6]], dtype=torch.float64)


@pytest.mark.parametrize("rule", ["backward", "jvp", "vmap"])
def test_rule_that_fails_on_empty_tensors_is_named(rule):
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


def test_tangent_of_wrong_shape_for_empty_tensors_is_found():
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
def test_right_functions_accept_empty_tensors(f, args):
    leaves = tuple(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    assert empty_tensors(f, args, leaves, "") == []


@pytest.mark.slow
@pytest.mark.parametrize("correct", [True, False])
def test_pdist_of_empty_tensors_does_not_end_the_process(correct):
    """Torch's gradient of an empty pdist divides by zero, which ends the process."""
    script = f"import torch, hodiff; hodiff.check(torch.pdist, torch.ones(4, 3).cumsum(0), correct={correct})"
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=900
    )
    assert finished.returncode == 0, finished.stderr
