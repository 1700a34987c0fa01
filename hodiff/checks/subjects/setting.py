"""Setting in which a model is called repeatedly, so that no call sees changes by another call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.subjects.double_precision import InDouble
from hodiff.common.module_state import attributes_put_back
from hodiff.common.randomness import RandomState, is_generator

# Immutable types, which need no copy.
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _Detaching(TorchFunctionMode):
    """Mode in which `copy.deepcopy` detaches and clones non-leaf tensors, which torch does not copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def deep_copy(value: Any, shared: Mapping[int, Any] | None = None) -> Any:
    """Return a deep copy without graphs; shared objects, given by identity, are not copied."""
    with _Detaching():
        return copy.deepcopy(value, dict(shared or {}))


@dataclass(frozen=True)
class Setting:
    """Setting in which a model, and each of its modules, is called.

    Attributes:
        model: The model; None for a function.
        shared: The model's own modules, parameters and buffers by identity, which are never copied.
        precision: The mode that replaces lower precisions by float64; None to keep precisions.
        random: States of the random generators at the beginning of each call; None to keep their states.
    """

    model: nn.Module | None = None
    shared: Mapping[int, Any] = field(default_factory=dict)
    precision: InDouble | None = None
    random: RandomState | None = None

    @staticmethod
    def of(model: nn.Module, precision: InDouble | None = None) -> Setting:
        """Return the setting in which a model is called."""
        tensors = (*model.parameters(), *model.buffers())
        shared = {id(each): each for each in (*model.modules(), *tensors)}
        return Setting(model, shared, precision, RandomState(tensors, generators_of(model), foreign=True))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the setting; on exit, restore random generators and attributes of modules and their classes."""
        with ExitStack() as stack:
            if self.random is not None:
                stack.enter_context(self.random.replayed())
            if self.precision is not None:
                stack.enter_context(self.precision)
            if self.model is not None:
                stack.enter_context(attributes_put_back(list(self.model.modules())))
                stack.enter_context(surroundings_put_back(self.model))
            yield

    def copied(self, tree: Any) -> Any:
        """Copy arguments: tensors without their graph, and other mutable objects such as caches."""
        return tree_map(self._copied, tree)

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if isinstance(leaf, (*_CONSTANT, nn.Module)) or callable(leaf):
            return leaf
        # Objects that cannot be copied are shared.
        one = attempt(deep_copy, leaf, self.shared)
        return leaf if isinstance(one, Failure) else one


def generators_of(model: nn.Module) -> list[Any]:
    """Return the random generators that modules hold as attributes."""
    return [each for module in model.modules() for each in vars(module).values() if is_generator(each)]


@contextmanager
def surroundings_put_back(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of the user's classes, and torch's default dtype, on exit."""
    classes = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.nn.")}
    kept = [(cls, dict(vars(cls))) for cls in classes]
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for cls, before in kept:
            for name in vars(cls).keys() - before.keys():
                delattr(cls, name)
            for name, value in before.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
