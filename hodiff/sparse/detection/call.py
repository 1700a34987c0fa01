"""One operator that ran: its arguments by name, its results, and what each tensor depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hodiff.sparse.detection.memory import Memory
from hodiff.sparse.detection.supports import Supports, empty


@dataclass(frozen=True)
class Call:
    """What a rule may look at.

    Attributes:
        func: The operator.
        name: Its name, without namespace, overload and the underscore of those that work in place.
        arguments: By the names of its schema, defaults included.
        outputs: Tensors that it returned, in order.
        memory: What tensors depend on.
        at_point: Whether values count, so that the pattern holds at this point alone.
        in_place: Whether an argument was overwritten, so that its values are not those that were read.
    """

    func: Any
    name: str
    arguments: dict[str, Any]
    outputs: list[Tensor]
    memory: Memory
    at_point: bool
    in_place: bool

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that not every signature has."""
        return self.arguments.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [x for x in tree_leaves(list(self.arguments.values())) if isinstance(x, Tensor)]

    def supports(self, x: Any) -> Supports:
        """Of a tensor, or of a number, which has none."""
        found = self.memory.supports(x) if isinstance(x, Tensor) else None
        return self.none(x.shape if isinstance(x, Tensor) else ()) if found is None else found

    def moves(self, x: Any) -> bool:
        """Whether values of an argument depend on the inputs, be it without a derivative."""
        return isinstance(x, Tensor) and self.memory.depends(x)

    def none(self, shape: Any) -> Supports:
        """No dependence."""
        return empty(shape, self.memory.inputs)

    def is_fixed(self, x: Any) -> bool:
        """Whether the values of a mask or of indices hold wherever the pattern does."""
        return self.at_point or not self.moves(x)

    def dense(self) -> list[Supports]:
        """Every element of every result depends on all that any argument does."""
        moving = [self.supports(x).whole(()) for x in self.tensors]
        everything = reduce(or_, moving, self.none(()))
        return [everything.broadcast(each.shape) for each in self.outputs]


def numbers_of(x: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values for NumPy."""
    return x.detach().resolve_conj().resolve_neg().cpu().numpy()
