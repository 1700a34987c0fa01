"""Sizes that a trace leaves open, by torch's symbols for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Of sizes 0 and 1 torch takes other ways.
LEAST = 2


class OpenSizes:
    """Stand-ins for tensors of which one dimension may have another size the next time.

    Args:
        inputs: The tensors.
        places: The open dimension of an input, by its position.

    Attributes:
        stand_ins: Tensors without numbers, to be traced.
    """

    def __init__(self, inputs: Sequence[Tensor], places: Mapping[int, int]):
        # Which load the compiler.
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
        """Whether what was traced left all of them open."""
        sizes: list[Any] = [self.stand_ins[i].shape[place] for i, place in self._places.items()]
        return all(is_open(each) and each.node.maybe_as_int() is None for each in sizes)

    def hold(self, inputs: Sequence[Tensor]) -> bool:
        """Whether what was traced is right for tensors of these sizes."""
        if any(inputs[i].shape[place] < LEAST for i, place in self._places.items()):
            return False
        return bool(self._environment.evaluate_guards_for_args(self.stand_ins, list(inputs), ignore_static=False))


def is_open(size: Any) -> bool:
    """Whether a size is a symbol."""
    return isinstance(size, torch.SymInt)


def are_open(value: Any) -> bool:
    """Whether a tensor has such a size, or a number is made of one."""
    return any(map(is_open, value.shape)) if isinstance(value, Tensor) else is_open(value)
