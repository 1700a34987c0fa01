"""In what setting a model is called, again and again: no call sees what another one changed."""

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

# What may be shared, as nobody can change it.
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _Detaching(TorchFunctionMode):
    """Copies tensors that have a graph as constants, which `copy.deepcopy` refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def deep_copy(value: Any, shared: Mapping[int, Any] | None = None) -> Any:
    """A deep copy that has no graph, but for what is shared, by the identities of objects."""
    with _Detaching():
        return copy.deepcopy(value, dict(shared or {}))


@dataclass(frozen=True)
class Setting:
    """How a model, and each of its modules, is called.

    Attributes:
        model: The model; None for a function.
        shared: What is the model's own, by identity: its modules, parameters and buffers, which no call gets a copy of.
        precision: The mode in which float64 is read for every lower precision; None to leave them as they are.
        random: The states of random generators that each call begins with; None to leave them as they are.
    """

    model: nn.Module | None = None
    shared: Mapping[int, Any] = field(default_factory=dict)
    precision: InDouble | None = None
    random: RandomState | None = None

    @staticmethod
    def of(model: nn.Module, precision: InDouble | None = None) -> Setting:
        """That of a model."""
        tensors = (*model.parameters(), *model.buffers())
        shared = {id(each): each for each in (*model.modules(), *tensors)}
        return Setting(model, shared, precision, RandomState(tensors, generators_of(model), foreign=True))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Where a call is made. What it draws, and writes into attributes of modules and their classes, is put back."""
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
        """Copies of arguments: of tensors without their graph, and of what else a call may change, such as caches."""
        return tree_map(self._copied, tree)

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if isinstance(leaf, (*_CONSTANT, nn.Module)) or callable(leaf):
            return leaf
        # What cannot be copied is shared.
        one = attempt(deep_copy, leaf, self.shared)
        return leaf if isinstance(one, Failure) else one


def generators_of(model: nn.Module) -> list[Any]:
    """The random generators that modules hold."""
    return [each for module in model.modules() for each in vars(module).values() if is_generator(each)]


@contextmanager
def surroundings_put_back(model: nn.Module) -> Iterator[None]:
    """Put back what lies outside of the modules: attributes of the user's classes, and torch's default dtype."""
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
