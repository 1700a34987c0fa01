"""Operators restricted to some leaves of the parameters, with the other leaves constant."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial, update_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.complex_numbers import as_complex, as_real
from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linear.linear_product import multiply
from hodiff.operators.linear.spaces import Space

A = TypeVar("A")


def leaves_named(domain: Space, names: str | Sequence[str]) -> tuple[list[int], list[str]]:
    """Indices and names of the leaves selected by names or leading parts: "0" selects "0.weight" and "0.bias"."""
    labels = domain.labels
    indices: list[int] = []
    wanted = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else []
    if not wanted or not all(isinstance(name, str) for name in wanted):
        raise InputError(
            f"block: names: expected one or more names of parameters, from {', '.join(labels)}, got {names!r}."
        )
    for name in wanted:
        found = [i for i, label in enumerate(labels) if label == name or label.startswith(f"{name}.")]
        if not found:
            raise InputError(
                f"block: names: expected names of parameters or prefixes of them, from {', '.join(labels)}, "
                f"got {name!r}."
            )
        indices += [i for i in found if i not in indices]
    return indices, [labels[i] for i in indices]


def subspace(domain: Space, indices: Sequence[int], labels: Sequence[str]) -> Space:
    """Return the space of dicts with some of the leaves, under their names."""
    return Space.of({
        label: as_complex(
            torch.empty(domain.shapes[i], dtype=domain.dtypes[i], device=domain.devices[i]), domain.joined[i]
        )
        for i, label in zip(indices, labels, strict=True)
    })


def restrict(operator: Any, names: str | Sequence[str], functions: Sequence[str]) -> Any:
    """Restrict a curvature operator to some leaves; other leaves are constants of the attributes `functions`."""
    indices, labels = leaves_named(operator.domain, names)
    other = copy.copy(operator)
    other.relocate(tuple(operator.leaves[i] for i in indices), subspace(operator.domain, indices, labels))
    for name in functions:
        f = getattr(operator, name)
        # A partial can be pickled, a closure cannot.
        some = partial(_of_some, f, tuple(operator.leaves), operator.domain, tuple(indices))
        setattr(other, name, update_wrapper(some, f))
    return other


def is_restricted(f: Any) -> bool:
    """Whether a function is restricted by `restrict`, with some leaves held constant."""
    return isinstance(f, partial) and f.func is _of_some


def _of_some(
    f: Callable[..., A], leaves: Sequence[Tensor], domain: Space, indices: Sequence[int], x: PyTree, *args: Any
) -> A:
    """Call a function of all leaves with some of its leaves replaced by x."""
    filled = list(leaves)
    for index, leaf in zip(indices, pytree.tree_leaves(x), strict=True):
        filled[index] = as_real(leaf)
    return f(domain.tree_of(filled), *args)


class RestrictedOperator(LinearOperator):
    r"""A principal block $P A P^\top$: some leaves of the pytree, with the other leaves held at zero."""

    composed = True

    def __init__(self, operator: LinearOperator, indices: Sequence[int], domain: Space):
        super().__init__(domain, symmetric=operator.symmetric)
        self.operator = operator
        self._slices = operator.domain.select(indices)

    def multiply(self, block: Tensor) -> Tensor:
        """Pad with zeros, multiply, and keep the wanted rows."""
        return self._keep(multiply(self.operator, self._pad(block)))

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Pad with zeros, multiply by the transpose, and keep the wanted rows."""
        return self._keep(multiply(self.operator.T, self._pad(block)))

    def _pad(self, block: Tensor) -> Tensor:
        padded = block.new_zeros(self.operator.domain.size, block.shape[1])
        for place, piece in zip(self._slices, block.split(self.domain.sizes), strict=True):
            padded[place] = piece
        return padded

    def _keep(self, product: Tensor) -> Tensor:
        return torch.cat([product[place] for place in self._slices])


def block(operator: LinearOperator, names: str | Sequence[str]) -> RestrictedOperator:
    """Return the principal block of some leaves; see `LinearOperator.block`."""
    if not operator.domain.same(operator.codomain):
        raise InputError(
            f"block: expected an operator that maps a space to itself, got {operator}; use the block of A.T @ A."
        )
    operator.domain.require_whole("block", "an operator whose x has only these parameters")
    indices, labels = leaves_named(operator.domain, names)
    return RestrictedOperator(operator, indices, subspace(operator.domain, indices, labels))
