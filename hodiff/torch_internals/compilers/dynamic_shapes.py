"""Sizes that a trace leaves open, by torch's symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Torch specializes the sizes 0 and 1.
LEAST = 2


class OpenSizes:
    """Symbolic replacements of tensors that have a dimension whose size may change.

    Args:
        inputs: The tensors.
        places: The open dimension of each input, by the input's position.

    Attributes:
        stand_ins: Tensors without data, to be traced.
    """

    def __init__(self, inputs: Sequence[Tensor], places: Mapping[int, int]):
        # These imports load the compiler, so they come late.
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._places = dict(places)
        self._environment: Any = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        self.stand_ins = [self._stand_in(each, f"input{i}", places.get(i)) for i, each in enumerate(inputs)]

    def _stand_in(self, tensor: Tensor, name: str, place: int | None) -> Tensor:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        sizes = [DimDynamic.DYNAMIC if d == place else DimDynamic.STATIC for d in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        found: Tensor = self._mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))
        return found

    @property
    def are_open(self) -> bool:
        """Whether the trace left all sizes open."""
        sizes: list[Any] = [self.stand_ins[i].shape[place] for i, place in self._places.items()]
        return all(is_open(each) and each.node.maybe_as_int() is None for each in sizes)

    def hold(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the trace is valid for tensors of these sizes."""
        if any(inputs[i].shape[place] < LEAST for i, place in self._places.items()):
            return False
        return bool(self._environment.evaluate_guards_for_args(self.stand_ins, list(inputs), ignore_static=False))


def is_open(size: Any) -> bool:
    """Whether a size is a symbol."""
    return isinstance(size, torch.SymInt)


def are_open(value: Any) -> bool:
    """Whether a tensor has an open size, or a number depends on one."""
    return any(map(is_open, value.shape)) if isinstance(value, Tensor) else is_open(value)
