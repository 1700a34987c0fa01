"""Functions whose forward stores a factor for backward in objects, classes, globals, thread or context variables."""

import collections
import contextvars
import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff.errors import RouteError

X = torch.tensor([0.3, 0.5], dtype=torch.float64)
ONES = torch.ones_like(X)
HELD: dict[str, Tensor] = {}
VARIABLE: contextvars.ContextVar[Tensor] = contextvars.ContextVar("slope")
THREAD = threading.local()


@dataclass
class Box:
    slope: Any


class Slotted:
    __slots__ = ("slope",)


def _object_with_slots(slope: Tensor) -> Slotted:
    box = Slotted()
    box.slope = slope
    return box


def _buffer(slope: Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("slope", slope)
    return module


# How forward stores a derivative on the context, and how backward reads it.
ON_THE_CONTEXT: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "object": (Box, lambda kept: kept.slope),
    "slots": (_object_with_slots, lambda kept: kept.slope),
    "deque": (lambda s: collections.deque([s]), lambda kept: kept[0]),
    "partial": (lambda s: functools.partial(torch.add, s), lambda kept: kept(0)),
    "closure": (lambda s: lambda: s, lambda kept: kept()),
    "default": (lambda s: lambda s=s: s, lambda kept: kept()),
    "method": (lambda s: s.mul, lambda kept: kept(1)),
    "set": (lambda s: {s}, lambda kept: next(iter(kept))),
    "key": (lambda s: {s: 0}, lambda kept: next(iter(kept))),
    "view of a dict": (lambda s: types.MappingProxyType({0: s}), lambda kept: kept[0]),
    "buffer": (_buffer, lambda kept: kept.slope),
    "list": (lambda s: [s], lambda kept: kept[0]),
}


def _cube_that_keeps(put: Callable[[Any, Tensor], Any], get: Callable[[Any], Tensor]) -> Any:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            put(ctx, 3 * inputs[0] ** 2)

        @staticmethod
        def backward(ctx, g):
            return get(ctx) * g

    return Cube


def _on_class() -> Any:
    class Cube(torch.autograd.Function):
        slope: Any = None

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            Cube.slope = 3 * inputs[0] ** 2

        @staticmethod
        def backward(ctx, g):
            return Cube.slope * g

    return Cube


FUNCTIONS = {
    **{
        name: _cube_that_keeps(lambda ctx, s, put=put: setattr(ctx, "kept", put(s)), lambda ctx, get=get: get(ctx.kept))
        for name, (put, get) in ON_THE_CONTEXT.items()
    },
    "class": _on_class(),
    "global": _cube_that_keeps(lambda _, s: HELD.__setitem__("slope", s), lambda _: HELD["slope"]),
    "context variable": _cube_that_keeps(lambda _, s: VARIABLE.set(s), lambda _: VARIABLE.get()),
    "thread": _cube_that_keeps(lambda _, s: setattr(THREAD, "slope", s), lambda _: THREAD.slope),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_slope_kept_outside_saved_tensors_is_rejected(name: str) -> None:
    f = lambda x: (FUNCTIONS[name].apply(x) * x).sum()  # noqa: E731
    for lost in (
        lambda: hodiff.hvp(f, X, ONES),
        lambda: hodiff.HessianOperator(f, X) @ ONES,
        lambda: hodiff.laplacian(f)(X),
        lambda: hodiff.jacobian(torch.func.grad(f))(X),
    ):
        with pytest.raises(RouteError, match=r"Cube\.backward .* for a constant|must implement the jvp"):
            lost()


@pytest.mark.parametrize("name", ON_THE_CONTEXT)
def test_constant_kept_outside_saved_tensors_is_allowed(name: str) -> None:
    put, get = ON_THE_CONTEXT[name]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = put(torch.full_like(x, 2))
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return get(ctx.kept) * g

    torch.testing.assert_close(hodiff.hvp(lambda x: Scaled.apply(x).pow(3).sum(), X, ONES), 48 * X)


def test_checks_do_not_overwrite_state_of_a_pending_backward() -> None:
    """Checks run the function at other points, which must not overwrite what its forward kept."""

    class Mask(torch.autograd.Function):
        mask: Any = None

        @staticmethod
        def forward(ctx, x):
            Mask.mask = x > 0.5 - 1e-9
            return x * Mask.mask

        @staticmethod
        def backward(ctx, g):
            return g * Mask.mask

    x = torch.tensor([0.5, 0.5 - 1e-6], dtype=torch.float64)
    f = lambda x: Mask.apply(x).pow(3).sum()  # noqa: E731
    for _ in range(2):
        _, gradient, product = hodiff.value_grad_hvp(f, x, ONES)
        torch.testing.assert_close(gradient, torch.tensor([0.75, 0.0], dtype=torch.float64))
        torch.testing.assert_close(product, torch.tensor([3.0, 0.0], dtype=torch.float64))


def test_kept_result_for_an_unneeded_gradient_is_allowed() -> None:
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x)
            ctx.turned = w.mT.contiguous()
            return x @ ctx.turned

        @staticmethod
        def backward(ctx, g):
            return g @ ctx.turned.mT, g.mT @ ctx.saved_tensors[0]

    x, w, v = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3, 4)
    f = lambda x, w: Linear.apply(x, w).tanh().sum()  # noqa: E731
    plain = lambda w: (x @ w.mT).tanh().sum()  # noqa: E731
    torch.testing.assert_close(hodiff.hvp(lambda w: f(x, w), w, v), hodiff.hvp(plain, w, v))
    with pytest.raises(RouteError, match=r"Linear\.backward .* for a constant"):
        hodiff.hvp(lambda both: f(*both), (x, w), (x, v))
