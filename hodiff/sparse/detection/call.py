"""A call of an operator: arguments by name, results, and what each tensor depends on.

Table of rules by the names of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hodiff.sparse.detection.memory_supports import Memory
from hodiff.sparse.detection.supports import Supports, empty


@dataclass(frozen=True)
class Call:
    """An operator call, as rules see it.

    Attributes:
        func: The operator.
        name: Name of the operator, without namespace, overload and the underscore of in-place variants.
        arguments: Arguments by the names of the schema, defaults included.
        outputs: Tensors that it returned or wrote to, in order.
        memory: Supports of tensors.
        at_point: Whether values count, so that the pattern holds at this point alone.
        in_place: Whether an argument was overwritten, so that its values are not those that the operator read.
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
        """Return an argument that not every signature has."""
        return self.arguments.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [x for x in tree_leaves(list(self.arguments.values())) if isinstance(x, Tensor)]

    def supports(self, x: Any) -> Supports:
        """Return the supports of a tensor; a number has empty supports."""
        found = self.memory.supports(x) if isinstance(x, Tensor) else None
        return self.none(x.shape if isinstance(x, Tensor) else ()) if found is None else found

    def moves(self, x: Any) -> bool:
        """Whether values of an argument depend on the inputs, with or without a derivative."""
        return isinstance(x, Tensor) and self.memory.depends(x)

    def none(self, shape: Any) -> Supports:
        """Empty supports of a shape."""
        return empty(shape, self.memory.inputs)

    def is_fixed(self, x: Any) -> bool:
        """Whether the values of a mask or of indices hold wherever the pattern does."""
        return self.at_point or not self.moves(x)

    def dense(self) -> list[Supports]:
        """Supports in which every element of every result depends on everything that any argument does."""
        moving = [self.supports(x).whole(()) for x in self.tensors]
        everything = reduce(or_, moving, self.none(()))
        return [everything.broadcast(each.shape) for each in self.outputs]


def numbers_of(x: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values as a NumPy array."""
    return x.detach().resolve_conj().resolve_neg().cpu().numpy()


# A rule returns the supports of each output in order; None for an output without a derivative.
Rule = Callable[[Call], Sequence[Supports | None]]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule under the names of operators of `torch.ops.aten`, for all of their overloads."""

    def enter(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return enter
