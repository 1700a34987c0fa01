"""Batches of implicit functions, some of whose arguments have no tangent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hodiff.authoring.function import Batched, Call, CustomFunction, Tensors


class ImplicitFunction(CustomFunction):
    """The Function behind implicit functions."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Call, *leaves: Any) -> tuple[Any, int]:
        """Make one call of the batch, with the batch of the outputs in front."""
        return ImplicitFunction.apply(ImplicitBatch(call, in_dims[1:], info.randomness), *leaves), 0


class ImplicitBatch(Batched):
    """The same call of every element of a batch; a tangent keeps its place whatever others are missing."""

    __slots__ = ()

    def pushforward(self, leaves: Tensors, tangents: Sequence[Any]) -> list[Tensor | None]:
        """The rule over the batch: a tangent is batched as its primal is."""
        given = [i for i, each in enumerate(tangents) if each is not None]
        return self._over_some(
            lambda leaves, some: self.inner.pushforward(leaves, replaced([None] * len(leaves), given, some)),
            (tuple(leaves), tuple(tangents[i] for i in given)),
            (self.in_dims, tuple(self.in_dims[i] for i in given)),
        )


def replaced(values: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with others at some positions."""
    result = list(values)
    for i, each in zip(positions, others, strict=True):
        result[i] = each
    return result
