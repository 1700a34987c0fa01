"""Rules for functions that are jointly linear in some arguments, by calls for each coefficient, and for as_strided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import along_directions, call, moves, part_of, value_of
from hodiff.taylor.registry import MOVING, POINTWISE, Rule, analytic_rule, enter, rule
from hodiff.taylor.series import Frame
from hodiff.taylor.views import MOVING_VIEWS


@rule("as_strided")
def as_strided(frame: Frame, func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Elements at strided positions in the value's memory, which must be contiguous."""
    value = x.value
    if not value.is_contiguous() or value.storage_offset():
        raise InputError("jet: as_strided is known for contiguous tensors alone: call x.contiguous().clone() before.")
    places = torch.arange(value.numel(), device=value.device).as_strided(size, stride, storage_offset or 0)
    return torch.take(x, places)


# Functions and their parameters in order. `!` marks parameters in which a function is jointly linear; without a list,
# this is `input!`. A last parameter with `*` takes all further arguments. Constants in linear parameters affect only
# the value.
_ELEMENTWISE = "pos neg clone contiguous to float double half bfloat16 type type_as"
_MOVING = f"""
    {MOVING_VIEWS} reshape flatten getitem ravel
    unsafe_split unsafe_chunk unsafe_split_with_sizes linalg.diagonal diagonal_copy alias
    flip fliplr flipud roll rot90 diag diag_embed diagflat tril triu
    index_select gather take take_along_dim masked_select repeat tile repeat_interleave atleast_1d atleast_2d atleast_3d
    nn.pixel_shuffle nn.pixel_unshuffle nn.unfold nn.channel_shuffle
"""
_LINEAR = """
    real imag view_as_real view_as_complex conj resolve_conj cpu sum mean cumsum trace
    cfloat cdouble chalf to_dense sum_to_size
    fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.fftn fft.ifftn
    fft.rfftn fft.irfftn fft.fftshift fft.ifftshift
    nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d nn.adaptive_avg_pool3d
    nn.fold nn.interpolate nn.upsample resolve_neg nn.affine_grid gradient
    expand_copy alias_copy view_copy narrow_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy
    unfold_copy unbind_copy split_copy split_with_sizes_copy slice_copy select_copy
"""
_JOINTLY_ELEMENTWISE = """
    where condition input! other!
    masked_fill input! mask value!
"""
_JOINTLY_MOVING = """
    cat tensors!
    stack tensors!
    hstack tensors!
    vstack tensors!
    dstack tensors!
    column_stack tensors!
    nn.pad input! pad mode value!
    masked_scatter input! mask source!
    index_copy input! dim index source!
    index_fill input! dim index value!
    select_scatter input! src!
    slice_scatter input! src!
    diagonal_scatter input! src!
    block_diag tensors!*
    broadcast_tensors tensors!*
    atleast_1d tensors!*
    meshgrid tensors!*
"""
_JOINTLY_LINEAR = """
    diff input! n dim prepend! append!
    constant_pad_nd input! pad value!
    index_add input! dim index source!
    index_put input! indices values!
    scatter input! dim index src!
    scatter_add input! dim index src!
"""


# torch.func.vmap refuses or exchanges tensors without dimensions in these functions.
_OF_NUMBERS = (torch.flip, Tensor.flip, torch.roll, Tensor.roll)


def linear_rule(parameters: Sequence[str]) -> Rule:
    """Create the rule of a function from its parameters."""
    names = [each.rstrip("!*").rstrip("!") for each in parameters]
    linear = {name for name, each in zip(names, parameters, strict=True) if "!" in each}

    def part(name: str) -> bool:
        return name in linear

    def name_of(position: int) -> str:
        if position < len(names):
            return names[position]
        return names[-1] if parameters[-1].endswith("*") else ""

    def rule(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, torch.dtype) for a in args) and getattr(func, "__name__", "") == "view":
            raise InputError("jet: view(dtype) reads the bits of a value that moves: expected x.to(dtype).")
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
    # Real coefficients take the dtype of the value, which is complex beside a complex number.
    dtype = parts[0].dtype
    return new_jet(frame, [each if each is None or each.dtype == dtype else each.to(dtype) for each in parts])


for _of_one, _of_several, _kind in (
    (_ELEMENTWISE, _JOINTLY_ELEMENTWISE, POINTWISE),
    (_MOVING, _JOINTLY_MOVING, MOVING),
    (_LINEAR, _JOINTLY_LINEAR, None),
):
    for _name in _of_one.split():
        enter(_name, linear_rule(["input!"]), analytic=True, among=_kind)
    for _row in _of_several.strip().splitlines():
        _name, *_parameters = _row.split()
        enter(_name, linear_rule(_parameters), analytic=True, among=_kind)


@analytic_rule("conj_physical")
def conj_physical(frame: Frame, func: Any, x: Any, *, out: None = None) -> Any:
    """Conjugate, written to memory; torch has no batching rule for conj_physical."""
    return torch.resolve_conj(torch.conj(x))


@rule("expand_as", analytic=True, among=MOVING)
def expand_as(frame: Frame, func: Any, x: Any, other: Any) -> Any:
    """Expand to the shape of `other`."""
    return x.expand(other.shape)


@rule("view_as", analytic=True, among=MOVING)
def view_as(frame: Frame, func: Any, x: Any, other: Any) -> Any:
    """View in the shape of `other`."""
    return x.view(other.shape)


@rule("reshape_as", analytic=True, among=MOVING)
def reshape_as(frame: Frame, func: Any, x: Any, other: Any) -> Any:
    """Reshape to the shape of `other`."""
    return x.reshape(other.shape)
