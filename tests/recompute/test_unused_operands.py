"""Intermediate results that a function reaches, but does not depend on, are left alone, as in a plain call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.errors import InputError
from hodiff.functions import checkpoint
from hodiff.meta import SGD, adapt

D = torch.float64
Call = Callable[..., Tensor]


class Holder(nn.Module):
    """A module that holds a tensor which it does not read."""

    held: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def _held(out: Tensor) -> Call:
    holder = Holder()
    holder.held = out
    return holder


def _without_gradients(out: Tensor) -> Call:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = 2 * out
        return x.sin() * factor

    return f


UNUSED: dict[str, Callable[[Tensor], Call]] = {
    "attribute": _held,
    "detached": lambda out: lambda x: x.sin() * out.detach(),
    "condition": lambda out: lambda x: x.sin() if out > 0 else x.cos(),
    "without gradients": _without_gradients,
}


def _hvp_function(f: Call, x: Tensor) -> Tensor:
    return hodiff.hvp_function(lambda x: f(x).sum())(x, torch.ones_like(x))


def _adapt(f: Call, x: Tensor) -> Tensor:
    def loss(params: Tensor, batch: Any) -> Tensor:
        return f(params).sum()

    return adapt(loss, x, None, SGD(0.1), steps=2, route="forward-over-reverse")


WAYS: dict[str, Callable[[Call, Tensor], Tensor]] = {
    "checkpoint": checkpoint,
    "hvp_function": _hvp_function,
    "adapt": _adapt,
}


def _computed() -> tuple[Tensor, Tensor]:
    w = torch.tensor([0.5, 2.0], dtype=D, requires_grad=True)
    return w, (w**2).sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", UNUSED)
def test_graph_of_another_computation_is_neither_needed_nor_freed(kind: str, way: str) -> None:
    slopes = []
    for freed in (False, True):
        x = torch.tensor([0.3, -0.4], dtype=D, requires_grad=True)
        w, out = _computed()
        if freed:
            out.backward()
        WAYS[way](UNUSED[kind](out), x).sum().backward()  # torch.autograd.grad would visit no other graph
        assert x.grad is not None
        slopes.append(x.grad)
        if not freed:
            (gradient,) = torch.autograd.grad(out, w)
            torch.testing.assert_close(gradient, 2 * w)
    assert torch.equal(*slopes)
    assert slopes[0].all()


def test_slopes_of_unused_results_are_those_of_a_plain_call() -> None:
    x = torch.tensor([0.3, -0.4], dtype=D, requires_grad=True)
    factors = {"detached": 4.25, "without gradients": 8.5}
    for kind, make in UNUSED.items():
        (slope,) = torch.autograd.grad(checkpoint(make(_computed()[1]), x).sum(), x)
        torch.testing.assert_close(slope, factors.get(kind, 1.0) * x.cos())


def test_used_intermediate_results_get_their_derivatives() -> None:
    """The one that is used, of two; by an operator, and by a gradient that the function takes itself."""

    def force(x: Tensor, used: Tensor) -> Tensor:
        x = x.detach().requires_grad_() if not x.requires_grad else x
        return torch.autograd.grad((used * x**3).sum(), x, create_graph=True)[0]

    x = torch.tensor([0.3, -0.4], dtype=D, requires_grad=True)
    for f, power in ((lambda x, used: used * x**3, 3), (force, 2)):
        (a, used), (b, unused) = _computed(), _computed()
        y = checkpoint(lambda x, f=f, used=used, unused=unused: f(x, used) + unused.detach() * 0, x)
        factor = 1 if power == 3 else 3
        (slope,) = torch.autograd.grad(y.sum(), a, create_graph=True)
        torch.testing.assert_close(slope, factor * 2 * a * (x**power).sum())
        (second,) = torch.autograd.grad(slope.sum(), x)
        torch.testing.assert_close(second, factor * 2 * a.sum() * power * x ** (power - 1))
        y.sum().backward()
        torch.testing.assert_close(torch.autograd.grad(unused, b)[0], 2 * b)


def test_returned_intermediate_result_is_used() -> None:
    w, out = _computed()
    x = torch.tensor(0.3, dtype=D, requires_grad=True)
    same, other = checkpoint(lambda x: (out, x * out), x)
    assert same is out
    torch.testing.assert_close(torch.autograd.grad(same * other, w)[0], 4 * x * w * out)


def test_function_runs_once_in_the_forward_pass() -> None:
    calls = []
    _, out = _computed()

    def f(x: Tensor) -> Tensor:
        calls.append(out.item())
        return x.sin()

    x = torch.tensor(0.3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    assert calls == [4.25]
    torch.testing.assert_close(y, x.sin())


class Registry:
    """A class attribute, which the search for tensors skips."""

    w: Tensor


def test_unreachable_tensor_raises_beside_an_intermediate_result() -> None:
    w, out = _computed()
    Registry.w = w
    with pytest.raises(InputError, match=r"checkpoint: f: expected every tensor .* pass it as an argument"):
        checkpoint(lambda x: x * Registry.w * out, torch.ones(2, dtype=D))
