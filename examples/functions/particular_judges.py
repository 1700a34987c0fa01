"""Judges of exercises that need more than a comparison of derivatives; `expected.py` assigns them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from judge import close
from lesson_tools import lesson, saved_bytes
from torch import Tensor, nn

import hodiff

Judge = Callable[[Any], str | None]


def numbers(*values: Any) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def wave(*shape: int, start: float = 1.0) -> Tensor:
    """Return numbers of any shape between -1 and 1, all different and none 0."""
    return (start + torch.arange(math.prod(shape), dtype=torch.float64)).cos().reshape(shape)


X, Y = numbers(0.5, -1.2, 2.0), numbers(0.7, 0.3, -1.1)
MATRIX = numbers([0.5, -1.2, 2.0], [0.3, 0.9, -0.7])
SQUARE = numbers([0.5, -1.2, 2.0], [0.3, 0.9, -0.7], [1.1, 0.4, -0.2])


def with_derivatives_of(surrogate: Callable[..., Tensor], value: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Combine the values of one function with the derivatives of another."""
    return lambda *inputs: surrogate(*inputs) + (value(*inputs) - surrogate(*inputs)).detach()


def slope_keeps_its_digits(name: str, at: float, slope: float) -> Judge:
    """Check the first derivative at a large argument to fourteen digits."""

    def judge(module: Any) -> str | None:
        got = torch.func.grad(getattr(module, name).apply)(numbers(at)[0]).item()
        return (
            None if math.isclose(got, slope, rel_tol=1e-14) else f"the slope at {at:g} is {got:.16e}, not {slope:.16e}"
        )

    return judge


def keeps(f: Callable[[Any], Callable[[Tensor], Tensor]], most: float) -> Judge:
    """Check that at most so many bytes per number of a float64 tensor are kept in addition to the output."""

    def judge(module: Any) -> str | None:
        x = torch.randn(4096, dtype=torch.float64, requires_grad=True)

        def after_a_product(x: Tensor) -> Tensor:
            return f(module)(2 * x)  # An intermediate result is counted if it is kept.

        kept = (saved_bytes(after_a_product, x, with_output=True) - x.nbytes) / x.numel()
        return None if kept <= most else f"{kept:g} bytes a number are kept beside the output, expected {most:g}"

    return judge


def several(*judges: Judge) -> Judge:
    """Return a judge that gives the first complaint of several."""
    return lambda module: next(filter(None, (judge(module) for judge in judges)), None)


def wastes_nothing(module: Any) -> str | None:
    """Check by `hodiff.check` that no unneeded gradient is computed."""
    codes = hodiff.check(module.Bilinear, (X[:2], MATRIX, Y), order=1, scipy=False, vmap=False).codes
    return f"hodiff.check finds {', '.join(codes)}" if codes else None


def refuses(module: Any) -> str | None:
    """Check that the gradient is right, and that differentiating it in a gradient penalty raises."""
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.LoudSine.apply(x).sum(), x, create_graph=True)
    if not close(gradient, X.cos()):
        return f"the gradient is {gradient.tolist()}, expected {X.cos().tolist()}"
    try:
        torch.autograd.grad(gradient.square().sum(), x)
    except RuntimeError as error:
        silent = "does not require grad" in str(error) or "not have been used" in str(error)
        return (
            "the gradient is a constant: torch notices here, and says nothing where more depends on x"
            if silent
            else None
        )
    return "the second derivative does not raise"


def tells_transposes(module: Any) -> str | None:
    """Check that the answer is True for the cube, and False for the cube with a doubled tangent."""
    right, wrong = (module.transposed(lesson(number).Cube, X) for number in (2, 23))
    return None if right is True and wrong is False else f"the cube: {right}, with a doubled tangent: {wrong}"


def draws_inside(module: Any) -> str | None:
    """Check that values are one-hot, by the given noise."""
    hard = module.hard_sample(X, Y, 0.5)
    return None if sorted(hard.tolist()) == [0, 0, 1] else f"the values are {hard.tolist()}, not one-hot"


def checkpoints(module: Any) -> str | None:
    """Check gradients against those without checkpoint, and that only parameters and x are kept."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh()).double()
    x = MATRIX.clone().requires_grad_()
    leaves = [x, *network.parameters()]
    right = torch.autograd.grad(network(x).square().sum(), leaves)
    got = torch.autograd.grad(module.checkpoint_module(network, x).square().sum(), leaves, allow_unused=True)
    for k, (ours, theirs) in enumerate(zip(got, right, strict=True)):
        if ours is None or not close(ours, theirs):
            return f"the gradient of {'x' if k == 0 else f'parameter {k - 1}'} is {ours}, expected {theirs}"
    kept = saved_bytes(lambda *_: module.checkpoint_module(network, x), *leaves)
    return f"{kept} bytes are kept" if kept else None


def survives_infinities(module: Any) -> str | None:
    """Check values and two derivatives where a, b or both are -∞."""
    low = -math.inf
    hard_pairs = (
        (0.5, low, 0.5, 1.0),
        (low, 0.5, 0.5, 0.0),
        (low, low, low, 0.0),
        (900.0, 900.0, 900 + math.log(2), 0.5),
    )
    for a, b, value, slope in hard_pairs:
        x = numbers(a)[0]

        def f(x: Tensor, b: float = b) -> Tensor:
            value: Tensor = module.LogAddExp.apply(x, torch.full_like(x, b))
            return value

        first, second = torch.func.grad(f)(x).item(), torch.func.grad(torch.func.grad(f))(x).item()
        got = f(x).item()
        if (
            not (got == value or math.isclose(got, value))
            or not math.isclose(first, slope)
            or not math.isfinite(second)
        ):
            return f"at {a:g}, {b:g}: value {got:g}, slope {first:g}, second derivative {second:g}"
    return None


def is_in_place(module: Any) -> str | None:
    """Check that the result shares the input's memory, and that torch knows."""
    x = X.clone()
    if module.InPlaceNegation.apply(x).data_ptr() != x.data_ptr():
        return "the result is not the input"
    leaf = X.clone().requires_grad_()
    copy = leaf.clone()
    module.InPlaceNegation.apply(copy)
    (gradient,) = torch.autograd.grad(copy.sum(), leaf)
    return None if close(gradient, -torch.ones_like(X)) else "without ctx.mark_dirty gradients go past the Function"


def reverses_by_a_constant(module: Any) -> str | None:
    """Check that the strength has no gradient."""
    strength = numbers(0.3)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(
        module.scheduled(X.clone().requires_grad_(), strength).sum(), strength, allow_unused=True
    )
    return None if gradient is None or not gradient.any() else f"the strength has a gradient, {gradient.item():g}"


def batches_the_operator(module: Any) -> str | None:
    """Check the batching rule, called as torch calls it, with the batch in either dimension."""
    operator = lesson(39).load_operator()
    for dim in (0, 1):
        y, out = module.batching_rule(None, (dim, None), MATRIX, 1)
        right = torch.stack([operator(each, 1) for each in MATRIX.unbind(dim)])
        if not close(y.movedim(out, 0), right):
            return f"with the batch at {dim} the rule differs from a loop"
    return None


def quantizes_rows(module: Any) -> str | None:
    """Check that each row has 2^bits - 1 levels up to its largest number, and that gradients pass."""
    w = torch.stack([X, X / 100, torch.zeros(3, dtype=torch.float64)]).requires_grad_()
    for bits in (3, 8):
        got, highest = module.quantize_rows(w, bits), 2 ** (bits - 1) - 1
        step = w.detach().abs().amax(1, keepdim=True) / highest
        if not close(
            got.detach(), torch.where(step == 0, 0.0, (w.detach() / step.where(step > 0, 1.0)).round() * step)
        ):
            return f"with {bits} bits, {w.tolist()} became {got.tolist()}"
        (gradient,) = torch.autograd.grad(got.sum(), w)
        if not close(gradient, torch.ones_like(w)):
            return f"the gradient is {gradient.tolist()}, expected ones"
    return None


def exports_rows(module: Any) -> str | None:
    """Check that the program runs at other sizes."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    program = module.export_rows(network).module()
    for shape in ((2, 5, 3), (3, 4, 3), (7, 2, 3)):
        x = torch.randn(shape)
        try:
            same = torch.allclose(program(x), network(x), atol=1e-6)
        except (RuntimeError, AssertionError) as error:
            return f"at {shape} it raises {type(error).__name__}"
        if not same:
            return f"at {shape} it differs from the module"
    return None
