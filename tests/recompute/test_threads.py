"""Checkpoints in several threads share the state that a run replaces temporarily, and the random number generator."""

import torch
from threads import in_threads
from torch import nn

from hodiff.functions import checkpoint

POINTS = [torch.tensor([0.1 * i, 1.0, -0.3 * i], dtype=torch.float64) for i in range(4)]


def test_closures_and_modules_in_threads_match():
    """The reference is the same function without a checkpoint."""
    weight = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(3, 3, dtype=torch.float64)

    def block(x):
        return torch.tanh(layer(x)) * weight

    def gradients(function, x):
        point = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(function(point)).square().sum(), point, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), point)
        return torch.stack([first.detach(), second])

    truth = [gradients(block, x) for x in POINTS]
    found = in_threads(lambda x: gradients(lambda y: checkpoint(block, y), x), POINTS, 40)
    for value, expected in zip(found, truth * 10, strict=True):
        torch.testing.assert_close(value, expected)
    assert block.__closure__[1].cell_contents is weight


def test_random_numbers_in_threads_are_replayed():
    """A linear function equals its gradient times its argument only if both draw the same mask."""

    def gap(x):
        point = x.clone().requires_grad_()
        value = checkpoint(lambda y: nn.functional.dropout(y).sum(), point)
        (gradient,) = torch.autograd.grad(value, point)
        return (gradient @ x - value).detach()

    for found in in_threads(gap, [torch.arange(1.0, 65.0, dtype=torch.float64)], 200):
        torch.testing.assert_close(found, torch.zeros((), dtype=torch.float64))
