r"""Linear functions of tensors $E + O\, n$ that are computed from lengths, and functions that select elements.

An element of the result is $E' + \sum_i a_i O_i n_i$. If all lengths that are 0 in the sum are one length $n$, it is
$E' + O' n$ with $O' = a\, O$, and $s$ is the result for $O\, s$ divided by $O'$. Random labels of lengths tell
whether they are one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.rules.distances.graded import SELECTING, NotKnown
from hodiff.corrections.rules.distances.length_calls import Call, noticed, refused, tensors_in, warn_of_kinks
from hodiff.corrections.rules.distances.lengths import Root, remember
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


def linear(call: Call, function: Callable[..., Any] | None = None, *, elementwise: bool = False) -> Any:
    """Apply a function that is linear in its remembered tensors together, or selects their elements."""
    # `function` stands for a called one that writes in place. The call is `elementwise` if it is a sum or a product of
    # elements at equal places: there, nonlinear functions of two different lengths that are 0 have NaN as second
    # derivatives. Return None if torch's own function is right.
    function = function or call.func
    moving = {}
    for x in tensors_in(call.args, call.kwargs):
        zero = call.zeros(x) if id(x) in call.found else None
        if zero is not None and call.found[id(x)].root.kind != "root" and torch.finfo(x.dtype).bits > 16:
            odd = call.parts(x)[1]
            at = zero & (odd.detach() != 0)
            if bool(below_transforms(at).any()):
                moving[id(x)] = x, at, odd
    if not moving or call.kwargs.get("out") is not None:
        return None

    def evaluate(changed: dict[int, Tensor]) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: changed.get(id(x), x), (call.args, call.kwargs))
        with call.mode, noticed(False):
            return function(*args, **kwargs)

    def response(
        part: Callable[[int, Tensor], Tensor], beside: Callable[[int, Tensor], Tensor] = lambda _, even: even
    ) -> list[Tensor]:
        """Evaluate the function on O times a part of the lengths that are 0, and on 0 elsewhere."""
        points = tuple(beside(name, even) for name, even in smooth.items())
        names = list(moving)
        tangents = tuple(torch.where(at, odd * part(name, x), 0).to(x.dtype) for name, (x, at, odd) in moving.items())

        def outputs_of(*changed: Tensor) -> list[Tensor]:
            return _floating(evaluate(dict(zip(names, changed, strict=True))))

        found: list[Tensor] = torch.func.jvp(outputs_of, points, tangents)[1]
        return found

    def square(i: int, tangled: Tensor | None) -> Tensor:
        found = response(lambda name, x: call.found[name].root.square().to(x.dtype))[i] / safe[i]
        if tangled is None or not bool(below_transforms(tangled).any()):
            return found
        warn_of_kinks("a sum of lengths", "Two of them are 0 at once, and hodiff does not know whether they are equal")
        return found + NotKnown.call(found, tangled, 1)

    value = evaluate({})
    outputs = _floating(value)
    if any(each.is_complex() for each in outputs):
        return refused(call)
    smooth = {name: torch.where(at, call.parts(x)[0], x).to(x.dtype) for name, (x, at, _) in moving.items()}
    labels = {name: call.found[name].root.label(call.length(x)) for name, (x, _, _) in moving.items()}
    kind = max(call.found[name].root.kind for name in moving)
    try:
        selects = kind == "length" and getattr(function, "__name__", "") in SELECTING
        if selects and _has_ties(moving, labels, response):
            return refused(call)
        factor = response(lambda name, x: torch.ones_like(x.detach()))
        first = response(lambda name, x: labels[name])
        second = response(lambda name, x: labels[name] ** 2)
        lengths = response(lambda name, x: call.length(x))
    except (RuntimeError, NotImplementedError):  # torch nests no forward mode in torch.autograd.forward_ad
        return None
    evens = _floating(evaluate(smooth))
    # The parity keeps the factor apart, whose square may leave the range of the dtype.
    safe = [torch.where(each == 0, 1, each) for each in factor]
    results = []
    for i, output in enumerate(outputs):
        a, b, c = (each[i].detach() for each in (factor, first, second))
        # Ratios neither over- nor underflow where the factor is large or small.
        mean, mean_square = b / a, c / a
        one = (mean_square - mean * mean).abs() <= 1e-4 * torch.finfo(output.dtype).eps ** 0.25 * mean * mean
        tangled = (b != 0) & ~one if elementwise and kind == "length" else None
        zero = (b != 0) & (one if tangled is None else one | tangled)
        root = Root(partial(square, i, tangled), (), kind, partial(_labels, a, b))
        root.set_zeros(zero)
        if root.has_zeros:
            result = torch.where(zero, evens[i] + lengths[i], output)
            output = remember(result, root, evens[i], safe[i], lengths[i] / safe[i], ())
        results.append(output)
    if isinstance(value, Tensor):
        return results[0]
    rest = iter(results)
    return type(value)([next(rest) if _is_floating(each) else each for each in value])


def _has_ties(moving: dict[int, Any], labels: dict[int, Tensor], response: Callable[..., list[Tensor]]) -> bool:
    """Whether an element is selected among equal ones, of which a length that is 0 moves one away."""

    def selected(sign: int) -> list[Tensor]:
        def beside(name: int, even: Tensor) -> Tensor:
            digit = torch.finfo(even.dtype)
            order = torch.arange(1, even.numel() + 1, dtype=even.dtype, device=even.device).view(even.shape)
            step = 2**8 * order / even.numel() * torch.clamp(digit.eps * even.detach().abs(), min=digit.tiny)
            return even + torch.where(moving[name][1], sign * step, 0)

        return response(lambda name, x: labels[name], beside)

    pairs = ((one.detach(), other.detach()) for one, other in zip(selected(1), selected(-1), strict=True))
    return any(bool(below_transforms((one - other).abs() > 1e-3 * one.abs()).any()) for one, other in pairs)


def _labels(factor: Tensor, first: Tensor) -> Tensor:
    return torch.where(first != 0, first / factor, 0)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _floating(value: Any) -> list[Tensor]:
    return [each for each in ((value,) if isinstance(value, Tensor) else value) if _is_floating(each)]
