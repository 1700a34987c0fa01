"""Rules for functions that are jointly linear in some arguments, by calls for each coefficient, and their relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import along_directions, call, moves, part_of, value_of
from hodiff.taylor.registry import Rule, analytic_rule, enter, rule
from hodiff.taylor.series import Frame
from hodiff.torch_operators.operator import Operator
from hodiff.torch_operators.table import OPERATORS


@rule("as_strided")
def as_strided(frame: Frame, func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Elements at strided positions in the value's memory, which must be contiguous."""
    value = x.value
    if not value.is_contiguous() or value.storage_offset():
        raise InputError(
            "jet: as_strided is supported only for contiguous tensors: call x.contiguous().clone() before."
        )
    places = torch.arange(value.numel(), device=value.device).as_strided(size, stride, storage_offset or 0)
    return torch.take(x, places)


# torch.func.vmap refuses or exchanges tensors without dimensions in these functions.
_OF_NUMBERS = (torch.flip, Tensor.flip, torch.roll, Tensor.roll)


def linear_rule(operator: Operator) -> Rule:
    """Create the rule of a function that is jointly linear in some parameters, if the others do not move."""
    # Constants in linear parameters affect only the value.
    linear, names = operator.linear_in, [each.lstrip("*") for each in operator.parameters]
    beyond = names[-1] if operator.parameters[-1].startswith("*") else ""

    def part(name: str) -> bool:
        return name in linear

    def name_of(position: int) -> str:
        return names[position] if position < len(names) else beyond

    def rule(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, torch.dtype) for a in args) and getattr(func, "__name__", "") == "view":
            if args[1] is not args[0].dtype:
                raise InputError("jet: view(dtype) reads the bits of a jet: expected x.to(dtype).")
            args = (args[0], args[0].shape)
        if frame.directions is not None and func in _OF_NUMBERS:
            jet = jets_of(frame, (args, kwargs))[0]
            if not jet.value.ndim:
                return torch.clone(cast(Tensor, jet))
        named = {"axis": "dim"}
        fixed = [a for i, a in enumerate(args) if not part(name_of(i))]
        fixed += [a for name, a in kwargs.items() if not part(named.get(name, name))]
        if moves(frame, fixed):
            return unknown(frame, func, args, kwargs)
        parts = frame.recalled(func, (), (args, kwargs))
        if not parts:
            parts.append(call(func, value_of(frame, args), value_of(frame, kwargs)))
        if isinstance(parts[0], str):  # the name of a type
            return parts[0]
        for k in range(len(parts), frame.order + 1):
            if not any(each.coefficients[k] is not None for each in jets_of(frame, (args, kwargs))):
                parts.append(None)
                continue
            given = [part_of(frame, a, k) if part(name_of(i)) else a for i, a in enumerate(args)]
            keyed = {name: part_of(frame, a, k) if part(name) else a for name, a in kwargs.items()}
            parts.append(along_directions(func, given, keyed))
        return assembled(frame, parts)

    return rule


def jets_of(frame: Frame, tree: Any) -> list[Jet]:
    """The jets of a frame among arguments."""
    if isinstance(tree, Jet):
        return [tree] if tree.frame is frame else []
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [jet for each in tree for jet in jets_of(frame, each)] if isinstance(tree, (list, tuple)) else []


def assembled(frame: Frame, parts: Sequence[Any]) -> Any:
    """Assemble the results for each coefficient into a jet, or into a tuple or list of jets."""
    if isinstance(parts[0], (list, tuple)):
        several = (
            assembled(frame, [None if part is None else part[i] for part in parts]) for i in range(len(parts[0]))
        )
        return type(parts[0])(several) if type(parts[0]) in (list, tuple) else type(parts[0])(list(several))
    dtype = parts[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):  # such as labels that were broadcast beside a jet
        return parts[0]
    # Real coefficients take the dtype of the value, which is complex beside a complex number.
    return new_jet(frame, [each if each is None or each.dtype == dtype else each.to(dtype) for each in parts])


for _operator in OPERATORS:
    if _operator.linear_in:
        enter(_operator.name, linear_rule(_operator), analytic=True)


@analytic_rule("conj_physical")
def conj_physical(frame: Frame, func: Any, x: Any, *, out: None = None) -> Any:
    """Conjugate, written to memory; torch has no batching rule for conj_physical."""
    return torch.resolve_conj(torch.conj(x))


@rule("expand_as", analytic=True)
def expand_as(frame: Frame, func: Any, x: Any, other: Any) -> Any:
    """Expand to the shape of `other`."""
    return x.expand(other.shape)


@rule("view_as", analytic=True)
def view_as(frame: Frame, func: Any, x: Any, other: Any) -> Any:
    """View in the shape of `other`."""
    return x.view(other.shape)


@rule("reshape_as", analytic=True)
def reshape_as(frame: Frame, func: Any, x: Any, other: Any) -> Any:
    """Reshape to the shape of `other`."""
    return x.reshape(other.shape)


_linear_scatter = linear_rule(next(each for each in OPERATORS if each.name == "scatter"))


@analytic_rule("index_fill")
def index_fill(frame: Frame, func: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Choose the value at the index; torch's index_fill writes to all directions under vmap."""
    whole = value_of(frame, x)
    chosen = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device).index_fill(dim, index, True)
    filler = value.to(whole.dtype) if hasattr(value, "to") else torch.as_tensor(value, dtype=whole.dtype)
    return torch.where(chosen, filler, x)


@analytic_rule("scatter")
def scatter(frame: Frame, func: Any, x: Any, dim: Any, index: Any, src: Any, *, reduce: Any = None) -> Any:
    """Write the source or a number; a product is no linear function of its factors."""
    if reduce != "multiply":
        return _linear_scatter(frame, func, x, dim, index, src, **({} if reduce is None else {"reduce": reduce}))
    whole = value_of(frame, x)
    factors = (
        src[tuple(map(slice, index.shape))]
        if hasattr(src, "ndim")
        else torch.full(index.shape, src, dtype=whole.dtype, device=whole.device)
    )
    return torch.scatter_reduce(x, dim, index, factors, "prod")
