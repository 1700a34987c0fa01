"""`hodiff.check` and torch's own checks on the same inputs: their costs, and the defects that they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, gradcheck, gradgradcheck

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from hodiff.functions import nestable_jvp

Inputs = tuple[Tensor, ...]
Way = Callable[[type[Function], Inputs], bool]


class _Saving(Function):
    """Function that saves its inputs for both modes."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class Cube(_Saving):
    """Elementwise third power."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the third power."""
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        return 3 * ctx.saved_tensors[0] ** 2 * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        return 3 * ctx.saved_tensors[0] ** 2 * t


class Affine(_Saving):
    """Linear layer with three arguments."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """Compute a linear layer."""
        return x @ w.mT + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of x, w and b."""
        x, w, _ = ctx.saved_tensors
        return g @ w, g.mT @ x, g.sum(0)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, t_x: Tensor, t_w: Tensor, t_b: Tensor) -> Tensor:
        """Apply the product rule."""
        x, w, _ = ctx.saved_tensors
        return t_x @ w.mT + x @ t_w.mT + t_b


class Gram(_Saving):
    """Gram matrix of the columns of a matrix."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the inner products of the columns."""
        return x.mT @ x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Sum the gradients of both factors, which are x."""
        return ctx.saved_tensors[0] @ (g + g.mT)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        """Apply the product rule."""
        (x,) = ctx.saved_tensors
        return t.mT @ x + x.mT @ t


def doubled(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that is wrong by a factor of 2."""

    def wrong(ctx: Any, *args: Any) -> Any:
        result = rule(ctx, *args)
        return tuple(2 * each for each in result) if isinstance(result, tuple) else 2 * result

    return wrong


def constant(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that detaches the tensors it reads: right, but constant to the next derivative."""

    def wrong(ctx: Any, *args: Any) -> Any:
        return rule(SimpleNamespace(saved_tensors=tuple(each.detach() for each in ctx.saved_tensors)), *args)

    return wrong


def wrong_batches(function: type[Function]) -> Callable[..., Any]:
    """Return a batching rule that is wrong by a factor of 2."""

    def vmap(info: Any, in_dims: Any, *args: Tensor) -> tuple[Tensor, int]:
        rows = (
            [each if dim is None else each.select(dim, i) for each, dim in zip(args, in_dims, strict=True)]
            for i in range(info.batch_size)
        )
        return 2 * torch.stack([function.apply(*row) for row in rows]), 0

    return vmap


def wrong_twins(function: type[Any]) -> dict[str, type[Function]]:
    """Return one subclass per defect, by a word for the defect."""
    changes: dict[str, dict[str, Any]] = {
        "gradient": {"backward": staticmethod(doubled(function.backward))},
        "tangent": {"jvp": staticmethod(doubled(function.jvp))},
        "cut gradient": {"backward": staticmethod(constant(function.backward))},
        "cut tangent": {"jvp": staticmethod(constant(function.jvp))},
        "batches": {"generate_vmap_rule": False, "vmap": staticmethod(wrong_batches(function))},
    }
    return {word: type(function.__name__, (function,), change) for word, change in changes.items()}


FIRST = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
SECOND = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "check_batched_grad": True}


def by_torch(function: type[Function], inputs: Inputs, *, every_switch: bool) -> bool:
    """Run gradcheck and gradgradcheck; True if both pass."""
    leaves = tuple(each.clone().requires_grad_() for each in inputs)
    first: dict[str, Any] = FIRST if every_switch else {}
    second: dict[str, Any] = SECOND if every_switch else {}
    with torch.random.fork_rng():
        return gradcheck(function.apply, leaves, raise_exception=False, **first) and gradgradcheck(
            function.apply, leaves, raise_exception=False, **second
        )


WAYS: Mapping[str, tuple[str, Way]] = {
    "hodiff.check": ("hodiff", lambda function, inputs: hodiff.check(function, inputs).ok),
    "gradcheck and gradgradcheck": ("torch", partial(by_torch, every_switch=False)),
    "the same, every switch on": ("torch", partial(by_torch, every_switch=True)),
}


def problem(name: str, title: str, function: type[Function], inputs: Inputs) -> Problem:
    """Return a problem that times checks of the right Function and lists the defects found in its wrong twins."""

    def gradient() -> Inputs:
        leaves = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(function.apply(*leaves).sum(), leaves)

    twins = wrong_twins(function)
    seen = {way: [word for word, twin in twins.items() if not run(twin, inputs)] for way, (_, run) in WAYS.items()}
    return Problem(
        name=name,
        title=title,
        contestants=[
            Contestant("one gradient, eager", "unit", gradient),
            *(Contestant(way, group, partial(run, function, inputs)) for way, (group, run) in WAYS.items()),
        ],
        error=lambda passed: float(not passed),
        tolerance=0.5,
        remarks={way: f"{len(words)} of {len(twins)}: {', '.join(words)}" for way, words in seen.items()},
        remarks_title="defects seen",
    )


def problems(quick: bool) -> Iterator[Problem]:
    """Yield problems with small inputs, as in ordinary checks; the first problem is quick."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield problem("elementwise", "an elementwise Function of 12 elements", Cube, (normal(12),))
    if not quick:
        affine = (normal(2, 3), normal(2, 3), normal(2))
        yield problem("three arguments", "a linear layer of x (2, 3), w (2, 3) and b (2)", Affine, affine)
        yield problem("matrix", "inner products of the columns of a (4, 3) matrix", Gram, (normal(4, 3),))
