"""Rules that compute functions of remembered tensors $E + O n$ by other functions that have rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.rules.distances.length_calls import Call, refused, tensors_in
from hodiff.corrections.rules.distances.lengths import root
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


def written_out(formula: Callable[..., Tensor]) -> Callable[[Call], Any]:
    """Return the rule for a function that is a formula of its arguments."""

    def rule(call: Call) -> Any:
        if call.kwargs.keys() - {"value"}:
            return None
        return call.again(formula, *call.args, **call.kwargs)

    return rule


def reversed_power(call: Call) -> Any:
    """Raise a positive number to a tensor."""
    x, base = call.args
    if not isinstance(base, (int, float)) or base <= 0:
        return None
    return call.again(lambda: torch.exp(math.log(base) * x))


def inner(call: Call) -> Any:
    """Multiply two real vectors."""
    if len(call.args) != 2 or call.kwargs or any(each.dim() != 1 or each.is_complex() for each in call.args):
        return None
    return call.again(lambda x, y: (x * y).sum(), *call.args)


def vecdot(call: Call) -> Any:
    """Multiply real vectors along a dimension."""
    if len(call.args) != 2 or call.kwargs.keys() - {"dim"} or any(each.is_complex() for each in call.args):
        return None
    return call.again(lambda x, y: (x * y).sum(call.kwargs.get("dim", -1)), *call.args)


def einsum(call: Call) -> Any:
    """Contract two tensors with the same indices: an elementwise product and a sum."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2 or call.kwargs:
        return None
    inputs, _, kept = equation.replace(" ", "").partition("->")
    first, second = inputs.split(",")
    alike = sorted(first) == sorted(second) and len({*first}) == len(first) and (first + "a").isalpha()
    if not alike or any(each.is_complex() for each in operands):
        return None

    def contract(x: Tensor, y: Tensor) -> Tensor:
        product = x * (y if first == second else y.permute([second.index(each) for each in first]))
        summed = [place for place, each in enumerate(first) if each not in kept]
        result = product.sum(summed) if summed else product
        left = [each for each in first if each in kept]
        return result if left == [*kept] else result.permute([left.index(each) for each in kept])

    return call.again(contract, *operands)


def loss_of(power: Callable[[Tensor], Tensor]) -> Callable[[Call], Any]:
    """Return the rule for a loss, by its function of differences."""

    def rule(call: Call) -> Any:
        options = {"reduction": "mean"} | {name: each for name, each in call.kwargs.items() if each is not None}
        if len(call.args) != 2 or set(options) != {"reduction"} or options["reduction"] not in ("none", "mean", "sum"):
            return None

        def loss(input: Tensor, target: Tensor) -> Any:
            terms = power(input - target)
            return terms if options["reduction"] == "none" else getattr(terms, options["reduction"])()

        return call.again(loss, *call.args)

    return rule


def called(call: Call) -> Any:
    """Call a function directly instead of by a checkpoint, which would hide that it receives a length with zeros."""
    if all(call.zeros(x) is None for x in tensors_in(call.args, call.kwargs) if id(x) in call.found):
        return None
    function, *args = call.args
    return call.again(function, *args, **call.kwargs)


def reduced(call: Call) -> Any:
    """Treat a sum or mean of one element as a reshaped tensor."""
    x = call.args[0]
    if x.numel() != 1 or call.graded(0) is None or x.is_complex():
        return None
    result = call.value()
    shape = result.shape
    return call.again(lambda x: x.reshape(shape).to(result.dtype), x)


def euclidean_norm(call: Call) -> Any:
    """Compute the Euclidean norm of a function of a length as the root of a sum of squares."""
    x, graded = call.args[0], call.graded(0)
    if graded is None or graded.even is None or call.kinks(x) is None:
        return None
    name = call.func.__name__
    defaults = NORMS[name][0], (-2, -1) if name == "linalg_matrix_norm" else None, False
    given: list[Any] = [*call.args[1:4], *defaults[len(call.args[1:4]) :]]
    order, dim, keepdim = given
    rest = dict(enumerate(call.args[4:])) | call.kwargs
    order, dim = rest.pop("p", rest.pop("ord", order)), rest.pop("dim", dim)
    keepdim = rest.pop("keepdim", keepdim)
    known = order in NORMS[name] or (order == 2 and x.dim() == 1)
    if not known or not x.is_floating_point() or any(each is not None for each in rest.values()):
        return refused(call)

    def norm() -> Tensor:
        total = x.square().sum() if dim is None else x.square().sum(dim, keepdim)
        zero = total.detach() == 0
        if bool(below_transforms(zero).all()):
            return root(total)
        return torch.where(zero, root(total), torch.where(zero, 1.0, total).sqrt())

    return call.again(norm)


# Functions whose rules use the squares of lengths.
NORMS: dict[str, tuple[Any, ...]] = {  # with the orders of Euclidean norms, the default first
    "norm": ("fro", None, 2),
    "linalg_vector_norm": (2,),
    "linalg_norm": (None,),
    "linalg_matrix_norm": ("fro",),
}
