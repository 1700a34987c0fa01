"""Base class of functions with a custom rule: binds, checks and dispatches their calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from hodiff.authoring.closures import captured_constants, recorded
from hodiff.authoring.custom_function import RuleCall, apply
from hodiff.authoring.rule_trees import TreeLayout, flatten, plain_tensors
from hodiff.authoring.signatures import Signature
from hodiff.common.options import require_callable
from hodiff.common.overriding import overridable_in_trees
from hodiff.errors import InputError
from hodiff.recompute.reachable import names_tensors
from hodiff.torch_internals.autograd.differentiation import are_differentiated
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.compilers.dynamo import as_one_node, at_trace_time, without_compilation


class CustomRule(ABC):
    """A function with a custom derivative rule."""

    def __init__(self, f: Callable[..., Any], nondiff_argnums: int | Sequence[int], decorator: str, definer: str):
        require_callable(decorator, f=f)
        update_wrapper(self, f)
        without_compilation(self)
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self.f = f
        self.decorator = decorator
        self.definer = definer
        self.signature = Signature(f, nondiff_argnums, decorator)
        self.ready = False
        self.symbolic_zeros = False
        self._outer: list[Any] = []
        self._in_graph = _for_graph(self._bind, self._evaluate)

    @overridable_in_trees
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the function, differentiable by its rule."""
        if torch.compiler.is_dynamo_compiling():
            return self._in_graph(*_portable(args, kwargs))
        call, leaves = self._bind(args, kwargs)
        return call.give_output(self._evaluate(call, leaves))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Refuse to bind as a method: a rule would silently treat `self` as a constant."""
        if instance is None:
            return self
        raise InputError(
            f"{self.decorator}: {self.__name__}: expected a plain function, got a method of {type(instance).__name__}; "
            "decorate a function of the tensors and call it from the method."
        )

    def check_rule(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        """Check at a point that the rule returns the function's value and is linear.

        Args:
            *args: Arguments of the function.
            seed: Seed of the tangents or cotangents.
            **kwargs: Further arguments.

        Raises:
            InputError: If a check fails; the message says which.
        """
        call, leaves = self._bind(args, kwargs)
        self._check(call, [each.detach() for each in leaves], seed)

    @abstractmethod
    def _check(self, call: Any, leaves: list[Tensor], seed: int) -> None:
        """Raise if the rule fails a check at a point."""

    def _define(self, symbolic_zeros: bool, *functions: Any) -> None:
        for each in functions:
            require_callable(self.decorator, **{f"{self.__name__}.{self.definer}": each})
        self._outer = [each for each in (self.f, *functions) if names_tensors(each)]
        self.symbolic_zeros = symbolic_zeros
        self.ready = True

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[RuleCall, Sequence[Tensor]]:
        if not self.ready:
            raise InputError(
                f"{self.decorator}: {self.__name__}: expected a rule, got none; define it by "
                f"{self.__name__}.{self.definer} before the first call."
            )
        if kwargs or len(args) != self.signature.exact:
            args = self.signature.positional(args, kwargs)
        static: tuple[Any, ...] = ()
        if self.signature.static:
            static, args = self.signature.split(args)
        transformed = in_transform()
        captured: Sequence[Tensor] = ()
        if transformed and (self._outer or static):
            captured = captured_constants(self.__name__, *self._outer, *static)
        leaves, layout = (args, None) if plain_tensors(args) else flatten(args)
        call = self._call(static, layout, transformed)
        call.captured = captured
        return call, leaves

    @abstractmethod
    def _call(self, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool) -> RuleCall:
        """Create the `RuleCall` of one call of the function."""

    def _evaluate(self, call: RuleCall, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        if are_differentiated(leaves):
            return apply(call, leaves)[: len(call.like)]
        arguments = call.all_arguments(leaves)
        if torch.is_grad_enabled():
            return call.take_output(recorded(self.__name__, self.f, arguments))
        return call.take_output(self.f(*arguments))


def _for_graph(bind: Callable[..., Any], evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Make the call one node of a compiled graph; torch differentiates it by the rule, as in eager code."""
    # Torch must not trace into the Function: it would ignore or reject its jvp.

    def call(arguments: list[Any], keywords: dict[str, Any], keys: list[int]) -> Any:
        args = tuple(_OPAQUE[key] if key else each for each, key in zip(arguments, keys, strict=False))
        kwargs = {
            name: _OPAQUE[key] if key else each
            for (name, each), key in zip(keywords.items(), keys[len(args) :], strict=True)
        }
        bound, leaves = bind(args, kwargs)
        return bound.give_output(evaluate(bound, leaves))

    return as_one_node(call)


# Types that a graph can hold as arguments of a node, alone or in containers.
_HELD = (Tensor, bool, int, float, complex, str, tuple, list, dict)
# Values that a graph cannot hold, keyed by the integer that it holds instead.
_OPAQUE: dict[int, Any] = {}


@at_trace_time
def _key(value: Any) -> int:
    if getattr(value, "__closure__", None):
        raise InputError(
            f"{value.__name__}: expected a function without closure under torch.compile, which would keep the current "
            "values; pass them as arguments, or define the function at the top of a module."
        )
    _OPAQUE[id(value)] = value
    return id(value)


def _portable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any], list[int]]:
    """Replace arguments that a graph cannot hold by zeros; return their keys as well."""
    values = [*args, *kwargs.values()]
    opaque = [not isinstance(each, _HELD) for each in values]
    # Adding 0 makes the key a number of the graph; torch cannot guard on the result of a function treated as constant.
    keys = [_key(each) + 0 if hidden else 0 for each, hidden in zip(values, opaque, strict=True)]
    shown = [0 if hidden else each for each, hidden in zip(values, opaque, strict=True)]
    return shown[: len(args)], dict(zip(kwargs, shown[len(args) :], strict=True)), keys
