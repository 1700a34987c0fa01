"""Tests of recomputed intermediate results: the tensors that the graph saves, and rejected functions."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from drawing import draw

from hodiff.functions import GELU, bias_act, fused_linear
from hodiff.recompute.intermediates import forget_between


def layer(calls):
    def inner(x, w):
        calls.append(torch.mm(x, w))
        return calls[-1]

    return inner


def test_intermediate_result_is_freed_and_recomputed():
    x, w = draw(4, 3).requires_grad_(), draw(3, 2).requires_grad_()
    calls = []
    y = forget_between(layer(calls), (x, w), GELU.call)
    first = weakref.ref(calls.pop().untyped_storage())
    assert first() is None
    found = torch.autograd.grad(y.sum(), (x, w))
    assert len(calls) == 1
    torch.testing.assert_close(found, torch.autograd.grad(F.gelu(x @ w).sum(), (x, w)))


def test_recorded_backward_recomputes_once():
    x, w = draw(4, 3).requires_grad_(), draw(3, 2).requires_grad_()
    calls = []

    def penalty(z):
        gradients = torch.autograd.grad(z.square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, w))

    found = penalty(forget_between(layer(calls), (x, w), GELU.call))
    assert len(calls) == 2
    gelu = lambda z: z * torch.special.ndtr(z)  # noqa: E731
    torch.testing.assert_close(found, penalty(gelu(x @ w)))


@pytest.mark.parametrize("changed", ["x", "w"])
def test_inputs_changed_in_place_are_rejected(changed):
    x, w = draw(4, 3).requires_grad_(), draw(2, 3).requires_grad_()
    y = fused_linear(x.clone() if changed == "w" else (inner := x.clone()), w, activation="gelu")
    with torch.no_grad():
        (w if changed == "w" else inner).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensor_hooks_receive_the_inputs():
    x, b = draw(4, 3).requires_grad_(), draw(3).requires_grad_()
    moved = []

    def pack(tensor):
        moved.append(tensor.shape)
        return tensor.to(torch.float16)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.double()):
        y = bias_act(x, b, "silu")
    assert sorted(moved) == [b.shape, x.shape]
    (found,) = torch.autograd.grad(y.sum(), x)
    (exact,) = torch.autograd.grad(F.silu(x + b).sum(), x)
    assert 1e-6 < (found - exact).abs().max() < 1e-2
