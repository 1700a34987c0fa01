"""The rule for any call with tensors computed from a length n: as a function of $E + O n$, or with a warning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.rules.distances import arithmetic
from hodiff.corrections.rules.distances.graded import LINEAR, MULTILINEAR, STRUCTURAL, UNARY
from hodiff.corrections.rules.distances.length_calls import NOTICE, Call, noticed, refused, tensors_in
from hodiff.corrections.rules.distances.linear import linear
from hodiff.corrections.rules.distances.squares import Root, even_power, find, remember, root
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_wrapped
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
    place = _place_of_inplace(func)
    if call.kwargs.get("inplace") or (place is not None and call.args[place : place + 1] == (True,)):
        return _in_place(replace(call, args=call.args[:place]), partial(func, inplace=False))
    if name in _RULES:
        result = _RULES[name](call)
    elif name in STRUCTURAL:
        result = _moved(call)
    elif name in UNARY:
        result = arithmetic.unary(call, name)
    elif (function := _out_of_place(name)) is not None:
        return _in_place(call, function)
    elif name in _WRITES:
        return _written(call, _WRITES[name])
    elif name in _NORMS:
        result = _norm(call)
    else:
        result = None
    remembered = [each for each in tensors_in(call.args, call.kwargs) if id(each) in call.found]
    if result is not None:
        return result
    if name in LINEAR or (name in MULTILINEAR and len(remembered) == 1):
        return linear(call, elementwise=name in _RULES and len(remembered) > 1)
    return _unknown(call, name)


def _moved(call: Call) -> Any:
    """Move or convert the elements of remembered tensors, perhaps together with other tensors."""
    leaves = [each for each in tensors_in(call.args, call.kwargs) if each.is_floating_point()]
    x = next((each for each in leaves if id(each) in call.found), None)
    if x is None or call.kwargs.get("out") is not None:
        return None
    graded = call.found[id(x)]
    if len(leaves) == 1 and graded.even is None:
        result = call.value()
        # Equal moves of one length have equal keys.
        key = (*graded.root.key, call.func, repr(call.args[1:]), repr(call.kwargs)) if graded.odd is None else ()

        def zeros() -> Tensor:
            """Move the zeros of the length, as a factor or the function itself may set other elements to 0."""
            zero = call.zeros(x)
            if zero is None:
                return torch.zeros_like(result.detach(), dtype=torch.bool)
            moved: Tensor = call.value(lambda x: zero.to(x.dtype).expand(x.shape))
            return moved != 0

        root = Root(
            lambda: call.value(lambda _: even_power(graded, 2)),
            key,
            graded.root.kind,
            lambda: call.value(lambda x: graded.root.label(call.length(x)).expand(x.shape)),
            zeros,
        )
        held = tuple(each for each, _ in graded.held)
        return remember(result, root, None, None, None, held) if isinstance(result, Tensor) else None
    if all(id(each) not in call.found or call.zeros(each) is None for each in leaves):
        return None
    return _moved_parts(call, leaves)


def _moved_parts(call: Call, leaves: list[Tensor]) -> Any:
    parts: dict[int, tuple[Tensor, ...]] = {}
    for each in leaves:
        zero = call.zeros(each) if id(each) in call.found else None
        nothing = torch.zeros_like(each.detach())
        if zero is None:
            parts[id(each)] = (each, *[nothing] * 5)
        else:
            root, length = call.found[id(each)].root, call.length(each)
            given = *call.parts(each), zero.to(each.dtype), root.square(), length, root.label(length)
            parts[id(each)] = tuple(part.to(each.dtype).expand(each.shape) for part in given)

    def moved(i: int) -> list[Tensor]:
        def part(x: Any) -> Any:
            return parts[id(x)][i] if id(x) in parts else x

        with call.mode:
            found = call.func(*pytree.tree_map(part, call.args), **pytree.tree_map(part, call.kwargs))
        return [found] if isinstance(found, Tensor) else list(found)

    value = call.value()
    results = []
    for each, even, odd, at, square, length, labels in zip(
        [value] if isinstance(value, Tensor) else value, *map(moved, range(6)), strict=True
    ):
        root = Root(square.clone, (), max(graded.root.kind for graded in call.found.values()), labels.clone)
        zero = at != 0
        root.set_zeros(zero)
        result = torch.where(zero, even + odd * length, each)
        results.append(remember(result, root, even, odd, length, ()))
    return results[0] if isinstance(value, Tensor) else type(value)(results)


def _where(call: Call) -> Any:
    """Apply `torch.where`, with numbers converted to tensors."""
    if len(call.args) != 3 or call.kwargs:
        return None
    condition, *given = call.args
    if call.func is Tensor.where:
        return call.again(torch.where, call.args[1], call.args[0], call.args[2])
    dtype = next(each.dtype for each in given if isinstance(each, Tensor))
    given = [each if isinstance(each, Tensor) else torch.as_tensor(each, dtype=dtype) for each in given]
    return _moved(replace(call, args=(condition, *given)))


def _masked_fill(call: Call) -> Any:
    if len(call.args) != 3 or call.kwargs or call.graded(0) is None:
        return None
    x, mask, value = call.args
    return call.again(torch.where, mask, value, x)


def _written_out(formula: Callable[..., Tensor]) -> Callable[[Call], Any]:
    def rule(call: Call) -> Any:
        if call.kwargs.keys() - {"value"}:
            return None
        return call.again(formula, *call.args, **call.kwargs)

    return rule


def _reversed_power(call: Call) -> Any:
    x, base = call.args
    if not isinstance(base, (int, float)) or base <= 0:
        return None
    return call.again(lambda: torch.exp(math.log(base) * x))


def _inner(call: Call) -> Any:
    if len(call.args) != 2 or call.kwargs or any(each.dim() != 1 or each.is_complex() for each in call.args):
        return None
    return call.again(lambda x, y: (x * y).sum(), *call.args)


def _vecdot(call: Call) -> Any:
    if len(call.args) != 2 or call.kwargs.keys() - {"dim"} or any(each.is_complex() for each in call.args):
        return None
    return call.again(lambda x, y: (x * y).sum(call.kwargs.get("dim", -1)), *call.args)


def _einsum(call: Call) -> Any:
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


def _loss(power: Callable[[Tensor], Tensor]) -> Callable[[Call], Any]:
    def rule(call: Call) -> Any:
        options = {"reduction": "mean"} | {name: each for name, each in call.kwargs.items() if each is not None}
        if len(call.args) != 2 or set(options) != {"reduction"} or options["reduction"] not in ("none", "mean", "sum"):
            return None

        def loss(input: Tensor, target: Tensor) -> Any:
            terms = power(input - target)
            return terms if options["reduction"] == "none" else getattr(terms, options["reduction"])()

        return call.again(loss, *call.args)

    return rule


@cache
def _place_of_inplace(func: Any) -> int | None:
    """Position of the option `inplace` of a function in `torch.nn.functional`, which is its last one."""
    parameters = getattr(getattr(func, "__code__", None), "co_varnames", ())
    return parameters.index("inplace") if "inplace" in parameters else None


def _out_of_place(name: str) -> Callable[..., Any] | None:
    """Return the function that an in-place function writes, if it has a rule."""
    plain = name.removesuffix("_")
    if name in _IN_PLACE or not name.endswith("_") or plain not in UNARY or plain.startswith("_"):
        return _IN_PLACE.get(name)
    return getattr(Tensor, plain, None) or getattr(F, plain, None)


def _in_place(call: Call, function: Callable[..., Any]) -> Any:
    """Compute the value out of place, write it, and record its parity for the tensor written to."""
    x = call.args[0]
    # The overwritten value may be a factor in the parity, and a graph may keep it.
    before = call.again(torch.clone, x)
    args, kwargs = pytree.tree_map_only(Tensor, lambda each: before if each is x else each, (call.args, call.kwargs))
    kwargs.pop("inplace", None)
    value = call.again(function, *args, **kwargs)
    return _copied(x, value)


def _copied(x: Tensor, value: Tensor) -> Tensor:
    """Write a value to a tensor, and remember its parity for the tensor."""
    result = find(value)
    x.copy_(value)
    if result is not None:
        length = value if result.length is None else result.length
        remember(x, result.root, result.even, result.odd, length, tuple(each for each, _ in result.held))
    return x


def _written(call: Call, function: Callable[..., Any]) -> Any:
    """Write to a tensor what the out-of-place function returns; None if torch's own function is right."""
    if all(call.zeros(each) is None for each in tensors_in(call.args, call.kwargs) if id(each) in call.found):
        return None
    x = call.args[0]
    before = x.clone()  # a graph may keep the overwritten value
    found = call.found | ({id(before): call.found[id(x)]} if id(x) in call.found else {})
    result = linear(replace(call, args=(before, *call.args[1:]), found=found), function)
    return None if result is None else _copied(x, result)


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    result = x.clone()
    result[index] = value
    return result


def _norm(call: Call) -> Any:
    """Compute the Euclidean norm of a function of a length as the root of a sum of squares."""
    x, graded = call.args[0], call.graded(0)
    if graded is None or graded.even is None or call.kinks(x) is None:
        return None
    name = call.func.__name__
    defaults = _NORMS[name][0], (-2, -1) if name == "linalg_matrix_norm" else None, False
    given: list[Any] = [*call.args[1:4], *defaults[len(call.args[1:4]) :]]
    order, dim, keepdim = given
    rest = dict(enumerate(call.args[4:])) | call.kwargs
    order, dim = rest.pop("p", rest.pop("ord", order)), rest.pop("dim", dim)
    keepdim = rest.pop("keepdim", keepdim)
    known = order in _NORMS[name] or (order == 2 and x.dim() == 1)
    if not known or not x.is_floating_point() or any(each is not None for each in rest.values()):
        return refused(call)

    def norm() -> Tensor:
        total = x.square().sum() if dim is None else x.square().sum(dim, keepdim)
        zero = total.detach() == 0
        if bool(below_transforms(zero).all()):
            return root(total)
        return torch.where(zero, root(total), torch.where(zero, 1.0, total).sqrt())

    return call.again(norm)


def _dropout(call: Call) -> Any:
    """Refuse random masks, which would differ between evaluations."""
    x, *rest = call.args
    p = rest[0] if rest else call.kwargs.get("p", 0.5)
    training = rest[1] if len(rest) > 1 else call.kwargs.get("training", True)
    if training and p:
        return _unknown(call, "dropout")
    return call.again(torch.clone, x)


def _reduced(call: Call) -> Any:
    """Treat a sum or mean of one element as a reshaped tensor."""
    x = call.args[0]
    if x.numel() != 1 or call.graded(0) is None or x.is_complex():
        return None
    result = call.value()
    shape = result.shape
    return call.again(lambda x: x.reshape(shape).to(result.dtype), x)


def _computes(func: Any, name: str) -> bool:
    """Whether a function only computes a value: no hook, property or in-place change."""
    if name.startswith(("linalg_", "special_", "fft_")) or name in ("__matmul__", "__rmatmul__"):
        return True
    if name.startswith("_"):
        return False
    public = [each for each in (getattr(torch, name, None), getattr(F, name, None)) if callable(each)]
    return bool(public) and (func in public or func is getattr(Tensor, name, None)) and not name.endswith("_")


def _unknown(call: Call, name: str) -> Any:
    """Return None where torch's function is right; at kinks the value, with NaN as second derivatives."""
    if name in _NORMS or not _computes(call.func, name):
        return None
    if all(call.kinks(x) is None for x in tensors_in(call.args, call.kwargs) if id(x) in call.found):
        return None
    result = call.value()
    moving = (each for each in tensors_in((result,)) if each.is_floating_point() or each.is_complex())
    if not any(each.requires_grad or is_wrapped(each) for each in moving):
        return result
    return refused(call)


# Functions whose rules use the squares of lengths.
_NORMS: dict[str, tuple[Any, ...]] = {  # with the orders of Euclidean norms, the default first
    "norm": ("fro", None, 2),
    "linalg_vector_norm": (2,),
    "linalg_norm": (None,),
    "linalg_matrix_norm": ("fro",),
}
# Functions that write other tensors to their first argument.
_WRITES: dict[str, Callable[..., Any]] = {
    "__setitem__": _set,
    "copy_": lambda x, other, *_: other.to(x.dtype).expand(x.shape),
    **{
        f"{name}_": getattr(Tensor, name) for name in ("index_add", "index_copy", "index_put", "scatter", "scatter_add")
    },
}
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
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(("dot", "vdot", "inner", "matmul"), _inner),
    "linalg_vecdot": _vecdot,
    "einsum": _einsum,
    "rpow": _reversed_power,
    "addcmul": _written_out(lambda a, b, c, value=1: a + value * (b * c)),
    "hypot": _written_out(lambda a, b: torch.sqrt(a * a + b * b)),
    "masked_fill": _masked_fill,
    "dropout": _dropout,
    "where": _where,
    "mse_loss": _loss(torch.square),
    "l1_loss": _loss(torch.abs),
}
_RULES = {name: rule for operator, rule in _RULES_BY_OPERATOR.items() for name in with_aliases(operator)}
_IN_PLACE: dict[str, Callable[..., Any]] = {
    **{f"{name}_": getattr(Tensor, name) for name in ("mul", "div", "add", "sub", "neg")},
    **{f"__i{name[2:]}": getattr(Tensor, name) for name in ("__mul__", "__truediv__", "__add__", "__sub__", "__pow__")},
}
