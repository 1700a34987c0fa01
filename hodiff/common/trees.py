"""Pytrees of tensors as arguments: flatten, name the leaves, and compare structure and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from hodiff.common.complex_numbers import as_real
from hodiff.errors import InputError
from hodiff.torch_internals.tensors import stands_for_tensor

PyTree = Any

# Remedies for leaves that are no tensors; containers that torch's pytrees do not know count as leaves.
REMEDIES: dict[Any, str] = {
    (Mapping, nn.ParameterDict): "pass dict(...) of it, a pytree",
    nn.ParameterList: "pass list(...) of it, a pytree",
    nn.Module: "pass dict(module.named_parameters()), which torch.func.functional_call takes",
    object: "pass torch.tensor(...), or make it a constant argument",
}

# Layouts of dense and of nested tensors.
_STRIDED = (torch.strided, torch.jagged)


def describe(leaf: object) -> str:
    """Describe a leaf in a few words: shape and dtype of a tensor, type and value of anything else."""
    if isinstance(leaf, Tensor) and not stands_for_tensor(leaf):
        if _is_old_nested(leaf):  # which has no shape
            return f"a nested tensor of {leaf.size(0)} {str(leaf.dtype).removeprefix('torch.')}"
        device = "" if leaf.device.type == "cpu" else f" on {leaf.device}"
        layout = "" if leaf.layout is torch.strided else f" {str(leaf.layout).removeprefix('torch.')}"
        return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}{layout}{device}"
    return f"{type(leaf).__name__} {leaf!r:.40}"


_LEAF = pytree.tree_flatten(0)[1]


def flatten(tree: PyTree) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a pytree as torch does, with a fast path for the most frequent tree, a single tensor."""
    return ([tree], _LEAF) if isinstance(tree, Tensor) else pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> PyTree:
    """Rebuild a pytree from its leaves."""
    return leaves[0] if spec is _LEAF else pytree.tree_unflatten(leaves, spec)


def is_only_leaf(spec: pytree.TreeSpec) -> bool:
    """Whether a tree is a single leaf, as `flatten` returns it for a tensor."""
    return spec is _LEAF


def is_ordinary(leaf: Any) -> bool:
    """Whether a leaf is a real tensor that no check refuses and that needs no conversion, as most are."""
    # torch.compile cannot test all of this.
    return (
        not torch.compiler.is_compiling()
        and type(leaf) is Tensor
        and leaf.is_floating_point()
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not (leaf.is_nested or leaf.is_inference() or leaf.is_neg())
    )


def leaf_names(tree: PyTree) -> list[str]:
    """Return the path of each leaf of a tree, as Python would index it; a bare tensor has `''`."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def leaf_label(path: str) -> str:
    """Convert a leaf's path, `['0.weight']` or `['layer'][0]`, to a name with dots."""
    return ".".join(part.strip("'\"") for part in path.replace("].", "][").strip("[].").split("][")) or "x"


def flatten_primals(
    tree: PyTree, caller: str, argument: str, *, complex_too: bool = False, jagged_too: bool = False
) -> tuple[tuple[Tensor, ...], pytree.TreeSpec]:
    """Flatten the differentiated argument, whose leaves must be real floating-point tensors, or complex if allowed.

    Args:
        tree: The argument as the user passed it.
        caller: The public function, for the error message.
        argument: The argument's name, for the error message.
        complex_too: Whether leaves may be complex.
        jagged_too: Whether leaves may be nested tensors of the jagged layout, whose elements cannot be counted.

    Returns:
        The leaves, and the structure to rebuild the pytree.

    Raises:
        InputError: If there is no leaf, or a leaf cannot be differentiated.
    """
    leaves, spec = flatten(tree)
    if not leaves:
        raise InputError(f"{caller}: {argument} holds no tensor: expected a tensor or a pytree of tensors.")
    for index, leaf in enumerate(leaves):
        # Jets are tensor-like, but functions that support them handle them before this check.
        plain = type(leaf) is Tensor or (isinstance(leaf, Tensor) and not stands_for_tensor(leaf))
        whole = plain and has_strides(leaf) and (jagged_too or leaf.layout is not torch.jagged)
        if whole and (leaf.is_floating_point() or (complex_too and leaf.is_complex())):
            continue
        where = f"{argument}{leaf_names(tree)[index]}"
        if plain and leaf.layout is torch.jagged:
            remedy = "pass its values, and compute with the values of each sequence; hodiff.hvp supports jagged tensors"
        elif plain and not whole:
            remedy = "pass its values, and make the sparse or nested tensor of them inside the function"
        elif plain and leaf.is_complex():
            remedy = "split it with torch.view_as_real and join it again inside the function"
        elif plain:
            remedy = "convert it with .to(torch.float64), or pass it as a constant argument"
        else:
            remedy = next(words for kind, words in REMEDIES.items() if isinstance(leaf, kind))
        raise InputError(
            f"{caller}: cannot differentiate with respect to {where}: expected a real floating-point tensor, "
            f"got {describe(leaf)}; {remedy}."
        )
    return tuple(leaves), spec


def flatten_tangents(
    tangents: PyTree, primals: Sequence[Tensor], spec: pytree.TreeSpec, caller: str
) -> tuple[Tensor, ...]:
    """Flatten a tangent, which must match its primal in structure, shape, dtype and device.

    Args:
        tangents: The tangent as the user passed it.
        primals: Leaves of the primal.
        spec: Structure of the primal.
        caller: The public function, for the error message.

    Returns:
        The leaves of the tangent.

    Raises:
        InputError: If the tangent does not match; the message names the first leaf at fault.
    """
    leaves, tangent_spec = flatten(tangents)
    if tangent_spec is not spec and tangent_spec != spec:
        expected = set(leaf_names(pytree.tree_unflatten(list(primals), spec)))
        got = set(leaf_names(tangents))
        differences = [f"missing {name or 'a tensor'}" for name in sorted(expected - got)]
        differences += [f"unexpected {name or 'a tensor'}" for name in sorted(got - expected)]
        detail = ", ".join(differences[:5]) or otherwise_arranged(spec, tangent_spec)
        raise InputError(
            f"{caller}: v does not have the structure of x: {detail}; pass one tangent for each leaf of x."
        )
    for index, (leaf, primal) in enumerate(zip(leaves, primals, strict=True)):
        if (
            isinstance(leaf, Tensor)
            and leaf.shape == primal.shape
            and leaf.dtype == primal.dtype
            and leaf.device == primal.device
            and leaf.layout == primal.layout
        ):
            continue
        where = leaf_names(tangents)[index]
        at = f" at {where}" if where else ""
        raise InputError(
            f"{caller}: v does not match x{at}: expected {describe(primal)}, got {describe(leaf)}; "
            "create v with torch.zeros_like or torch.randn_like of the leaf."
        )
    return tuple([dense(recordable(leaf)) for leaf in leaves])


def otherwise_arranged(expected: pytree.TreeSpec, got: pytree.TreeSpec) -> str:
    """Describe how two structures with leaves of the same names differ."""
    if expected.type is dict and got.type is dict:
        return "the same keys in another order, for which {key: v[key] for key in x} is right"
    return f"expected {expected}, got {got}"


def tensors_in(tree: PyTree) -> list[Tensor]:
    """Return all tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def recordable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that autograd can record if it was made under `torch.inference_mode`."""
    # torch.compile cannot test this, and has handled it when it captured its inputs.
    return tensor.clone() if not torch.compiler.is_compiling() and tensor.is_inference() else tensor


def recordable_tree(tree: PyTree) -> PyTree:
    """Apply `recordable` to all tensors in a tree."""
    return recordable(tree) if isinstance(tree, Tensor) else pytree.tree_map_only(Tensor, recordable, tree)


def is_of_subclass(tensor: Tensor) -> bool:
    """Whether a tensor has a user's subclass, whose `__torch_function__` and methods transforms would lose."""
    kind = type(tensor)
    return (
        kind is not Tensor
        and kind.__torch_function__ is not Parameter.__torch_function__  # the one that is switched off
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def overrides_functions(tensor: Tensor) -> bool:
    """Whether a tensor has a subclass with a `__torch_function__` of its own."""
    own, plain = (getattr(kind.__torch_function__, "__func__", None) for kind in (type(tensor), Tensor))
    return own is not plain and is_of_subclass(tensor)


def as_plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its subclass, which could change hodiff's own arithmetic."""
    return tensor.as_subclass(Tensor) if is_of_subclass(tensor) else tensor


def as_given(tensor: Tensor, given: Tensor) -> Tensor:
    """Return the tensor with subclass and attributes of another, also inside transforms."""
    result = tensor.as_subclass(type(given))
    result.__dict__.update(given.__dict__)
    return result


def as_point(leaf: Tensor) -> Tensor:
    """Return a leaf detached and as real numbers, with its subclass unless it is complex."""
    real = dense(recordable(as_real(as_plain(leaf).detach())))
    return as_given(real, leaf) if is_of_subclass(leaf) and not leaf.is_complex() else real


def has_strides(tensor: Tensor) -> bool:
    """Whether a tensor stores its elements by strides, unlike sparse and strided nested tensors."""
    return tensor.layout in _STRIDED and not _is_old_nested(tensor)


def _is_old_nested(tensor: Tensor) -> bool:
    """Whether a tensor is nested in the strided layout; jagged tensors have a shape and derivatives."""
    return tensor.is_nested and tensor.layout is torch.strided


def strided(tensor: Tensor) -> Tensor:
    """Return a sparse tensor, such as the gradient of a sparse embedding, as dense; return other tensors unchanged."""
    return tensor if tensor.layout in _STRIDED else tensor.to_dense()


def dense(leaf: Tensor) -> Tensor:
    """Return the tensor, or a copy if its elements share memory, or memory holds their negatives or conjugates."""
    # Forward mode makes no views of such tensors as `z.conj().imag`. torch.compile cannot test this.
    if not torch.compiler.is_compiling() and (leaf.is_neg() or leaf.is_conj()):
        leaf = leaf.resolve_conj().resolve_neg()
    # Forward mode gives tangents the strides of their primals, and so would write several elements to one place.
    return leaf if leaf.is_contiguous() or not _overlaps(leaf) else leaf.contiguous()


def _overlaps(leaf: Tensor) -> bool:
    """Whether elements may share memory; True also for some unusual strides without overlap."""
    # No sorting: in a graph strides may be symbols, which support comparison only.
    dims = [(stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
    for i, (stride, _) in enumerate(dims):
        # A step along a dimension must go beyond all elements that shorter steps reach.
        shorter = [each for j, each in enumerate(dims) if each[0] < stride or (each[0] == stride and j < i)]
        if stride <= sum(step * (size - 1) for step, size in shorter):
            return True
    return False


def one_hot_rows(start: int, stop: int, like: Tensor) -> Tensor:
    """Rows `start` to `stop` of the identity on the space of `like`, each in its shape: (stop - start, *like.shape)."""
    return unit_rows(start, stop, like.numel(), like.dtype, like.device).view(stop - start, *like.shape)


def unit_rows(start: int, stop: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows `start` to `stop` of the identity matrix of a size: (stop - start, size)."""
    # Without in-place writes: torch.func.linearize folds constants of its graph before the graph writes into them.
    rows = torch.eye(stop - start, size - start, dtype=dtype, device=device)
    return F.pad(rows, (start, 0)) if start else rows
