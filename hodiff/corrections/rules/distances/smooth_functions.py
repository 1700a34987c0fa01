"""Choice of the rule for a function of remembered tensors $E + O n$, and a fallback for functions without a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hodiff.common.trees import describe
from hodiff.corrections.rules.distances import arithmetic, formulas, in_place, movement
from hodiff.corrections.rules.distances.formulas import NORMS
from hodiff.corrections.rules.distances.graded import LINEAR, MULTILINEAR, STRUCTURAL, UNARY
from hodiff.corrections.rules.distances.length_calls import NOTICE, Call, noticed, refused, tensors_in
from hodiff.corrections.rules.distances.lengths import find
from hodiff.corrections.rules.distances.linear import linear
from hodiff.errors import RouteError
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.compilers.scripts import call_script
from hodiff.torch_operators.table import with_aliases


def of_lengths(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """Compute a function of remembered tensors by hodiff's rules; None where torch's own function is right."""
    if not NOTICE.on:
        return None
    found = {id(each): graded for each in tensors_in(args, kwargs) if (graded := find(each)) is not None}
    if not found:
        return None
    with noticed(False):
        return _of_remembered(Call(func, args, kwargs, found, mode))


def _of_remembered(call: Call) -> Any:
    func = call.func
    if func is torch.autograd.grad:
        return _gradient(call)
    name = getattr(func, "__name__", "")
    if not call.args:
        # Rules take the first argument by position.
        first = next((each for each in ("input", "A", "x", "self") if each in call.kwargs), None)
        rest = {key: each for key, each in call.kwargs.items() if key != first}
        call = call if first is None else replace(call, args=(call.kwargs[first],), kwargs=rest)
    if name == "__get__":
        name = func.__self__.__name__
        if name not in STRUCTURAL:
            return None
    if name == "detach" or name.endswith("_like"):
        return None
    place = in_place.place_of_option(func)
    if call.kwargs.get("inplace") or (place is not None and call.args[place : place + 1] == (True,)):
        return in_place.write_result(replace(call, args=call.args[:place]), partial(func, inplace=False))
    if name in _RULES:
        result = _RULES[name](call)
    elif name in STRUCTURAL:
        result = movement.moved(call)
    elif name in UNARY:
        result = arithmetic.unary(call, name)
    elif (function := in_place.out_of_place(name)) is not None:
        return in_place.write_result(call, function)
    elif name in in_place.WRITES:
        return in_place.write_tensors(call, in_place.WRITES[name])
    elif name in NORMS:
        result = formulas.euclidean_norm(call)
    else:
        result = None
    remembered = [each for each in tensors_in(call.args, call.kwargs) if id(each) in call.found]
    if result is not None:
        return result
    if name in LINEAR or (name in MULTILINEAR and len(remembered) == 1):
        return linear(call, elementwise=name in _RULES and len(remembered) > 1)
    return _unknown(call, name)


def _dropout(call: Call) -> Any:
    """Refuse random masks, which would differ between evaluations."""
    x, *rest = call.args
    p = rest[0] if rest else call.kwargs.get("p", 0.5)
    training = rest[1] if len(rest) > 1 else call.kwargs.get("training", True)
    if training and p:
        return _unknown(call, "dropout")
    return call.again(torch.clone, x)


_GRADIENT = inspect.signature(torch.autograd.grad)


def _gradient(call: Call) -> None:
    """Refuse derivatives by tensors at zeros of a length, where functions of them do not depend on the tensors."""
    given = _GRADIENT.bind(*call.args, **call.kwargs).arguments
    for x in tensors_in(given["inputs"]):
        graded = call.found.get(id(x))
        if graded is None or call.zeros(x) is None:
            continue
        # The first derivative of an even function of a length is 0 at 0.
        if given.get("create_graph") or graded.even is not None:
            raise RouteError(
                "torch.autograd.grad: inputs: expected a length, a distance or a deviation without zeros, or another "
                f"tensor, got {describe(x)}, which is or is computed from one that is 0 somewhere, where it has no "
                "derivative. Leave the zeros out, such as by pairs i < j, add a small number under the root, or "
                "differentiate with respect to the square."
            )


_OPERATORS = ("__matmul__", "__rmatmul__", "__pow__", "__rpow__", "__mod__", "__rmod__", "__floordiv__")


def _computes(func: Any, name: str) -> bool:
    """Whether a function only computes a value: no hook, property or in-place change."""
    if name.startswith(("linalg_", "special_", "fft_")) or name in _OPERATORS or hasattr(func, "is_of_hodiff"):
        return True
    if func is call_script:
        return True
    if name.startswith("_"):
        return False
    public = [each for each in (getattr(torch, name, None), getattr(F, name, None)) if callable(each)]
    return bool(public) and not name.endswith("_")


def _unknown(call: Call, name: str) -> Any:
    """Return None where torch's function is right; at kinks the value, with NaN as second derivatives."""
    if name in NORMS or not _computes(call.func, name):
        return None
    if all(call.kinks(x) is None for x in tensors_in(call.args, call.kwargs) if id(x) in call.found):
        return None
    result = call.value()
    moving = (each for each in tensors_in((result,)) if each.is_floating_point() or each.is_complex())
    if not any(each.requires_grad or is_wrapped(each) for each in moving):
        return result
    return refused(call)


_SUM, _DIFFERENCE, _REVERSED = arithmetic.sum_of(1, 1), arithmetic.sum_of(1, -1), arithmetic.sum_of(-1, 1)
_RULES_BY_OPERATOR: dict[str, Callable[[Call], Any]] = {
    "square": arithmetic.power,
    "pow": arithmetic.power,
    "mul": arithmetic.product,
    "div": arithmetic.quotient,
    "rdiv": arithmetic.reversed_quotient,
    "add": _SUM,
    "sub": _DIFFERENCE,
    "rsub": _REVERSED,
    "neg": arithmetic.negative,
    "checkpoint": formulas.called,
    **dict.fromkeys(("sum", "mean"), formulas.reduced),
    **dict.fromkeys(("dot", "vdot", "inner", "matmul"), formulas.inner),
    "linalg_vecdot": formulas.vecdot,
    "einsum": formulas.einsum,
    "rpow": formulas.reversed_power,
    "addcmul": formulas.written_out(lambda a, b, c, value=1: a + value * (b * c)),
    "hypot": formulas.written_out(lambda a, b: torch.sqrt(a * a + b * b)),
    "masked_fill": movement.masked_fill,
    "dropout": _dropout,
    "where": movement.where,
    "mse_loss": formulas.loss_of(torch.square),
    "l1_loss": formulas.loss_of(torch.abs),
}
_RULES = {name: rule for operator, rule in _RULES_BY_OPERATOR.items() for name in with_aliases(operator)}
