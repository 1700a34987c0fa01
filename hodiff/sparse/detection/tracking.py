"""Tracking of operators as they run, and of the inputs that each tensor depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hodiff.derivatives.capture.refusals import called_by_library, line_now
from hodiff.errors import HodiffError, InputError
from hodiff.sparse.detection.call import RULES, Call, Rule
from hodiff.sparse.detection.memory_supports import Memory, has_derivatives
from hodiff.sparse.detection.rules import rule_of
from hodiff.sparse.detection.supports import Supports, TooManyError, most_entries
from hodiff.torch_internals.interception import EagerDispatchMode, run_operator
from hodiff.torch_internals.operators import arguments_of, decomposition_of, plain_name
from hodiff.torch_internals.tensors import share_storage

# Errors that a rule, or a decomposition of torch's, raises for a call that it does not support.
_UNFIT = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
_MASKS = {torch.bool, torch.uint8}
# Description of operators that users do not know by name.
_READING = {"local_scalar_dense": "the value (.item(), float(), bool() or an if)"}


class TooDenseError(HodiffError):
    """More dependencies than a sparse pattern has; corrections take an `InputError` for one about their arguments."""


class ValuesDecideError(InputError):
    """Values of the argument decide what the function computes."""


class Tracking(EagerDispatchMode):
    """Mode in which operators run as usual, while `memory` records the inputs that each tensor depends on.

    An operator is handled as a view, which needs no rule; by its rule, or the rule of its kind; or by its decomposition
    into other operators. All others are assumed to be dense, and are listed in `unknown`.
    """

    def __init__(self, caller: str, inputs: int, *, at_point: bool) -> None:
        super().__init__()
        self.caller = caller
        self.memory = Memory(inputs)
        self.at_point = at_point
        self.unknown: dict[str, str] = {}
        # True while a Function with its own derivative runs.
        self.paused = False
        # Some operators decompose into themselves.
        self._open: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if self.paused or func.namespace == "prim" or not any(map(self.memory.depends, given)):
            return run_operator(func, args, kwargs)  # subclasses read their own device by an operator of prim
        name = plain_name(func)
        if not self.at_point and self._steers(name, func, given):
            raise self._refusal(name)
        rule = rule_of(name, func)
        if rule is None and torch.Tag.inplace_view not in func.tags:
            decomposed = self._decomposed(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        result = run_operator(func, args, kwargs)
        if torch.Tag.inplace_view not in func.tags:
            self._record(name, rule, func, args, kwargs, result)
        return result

    def _record(self, name: str, rule: Rule | None, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record what the results, and the arguments that were written to, depend on."""
        arguments, written = arguments_of(func, args, kwargs)
        given = _tensors(arguments)
        changed = _tensors([arguments[each] for each in written])
        outputs = _tensors(result)
        # A view of an argument shares memory that is tracked already.
        new = outputs if changed else [y for y in outputs if not any(_share(y, x) for x in given)]
        new += [x for x in changed if not any(_share(x, y) for y in new)]
        if not new:
            return
        if any(x.is_nested for x in (*given, *new)):
            raise InputError(
                f"{self.caller}: f: expected torch's operators on dense tensors that depend on x, got {name} of "
                f"a nested tensor{_at_line()}, which has no pattern; use a list of tensors, or a padded tensor and a "
                "mask. For products, use hodiff.hvp."
            )
        call = Call(func, name, arguments, new, self.memory, self.at_point, bool(changed))
        try:
            supports = self._supports(rule if len(new) == len(outputs) else None, call)
        except TooManyError:
            raise self.too_dense(name) from None
        for x, found in zip(new, supports, strict=True):
            self.memory.write(x, found, depends=True)

    def _supports(self, rule: Rule | None, call: Call) -> Sequence[Supports | None]:
        """Apply the rule; results are dense if there is no rule, or it does not support the call."""
        # A rule may run the operator, which must not write to an overwritten tensor of integers again.
        if not any(map(has_derivatives, call.outputs)):
            return [None] * len(call.outputs)
        if rule is not None:
            try:
                return rule(call)
            except _UNFIT:
                pass
        self.unknown.setdefault(call.name, line_now())
        return call.dense()

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator's decomposition, if torch has one that takes the arguments; else NotImplemented."""
        decomposition = None if func in self._open else decomposition_of(func)
        if decomposition is None:
            return NotImplemented
        self._open.append(func)
        try:
            with self:
                return decomposition(*args, **kwargs)
        except HodiffError:
            raise
        except _UNFIT:  # such as for empty tensors
            return NotImplemented
        finally:
            self._open.pop()

    def _steers(self, name: str, func: Any, given: list[Tensor]) -> bool:
        """Whether later operators may depend on values of the inputs."""
        if torch.Tag.data_dependent_output in func.tags:
            # Torch's own modules, and corrections, read values to validate their arguments.
            return not called_by_library()
        if torch.Tag.dynamic_output_shape not in func.tags:
            return False
        # If the operator has a rule, a mask decides how large the result is.
        return name not in RULES or any(x.dtype in _MASKS and self.memory.depends(x) for x in given)

    def too_dense(self, name: str) -> TooDenseError:
        """Return the error for an operator whose result depends on too many inputs."""
        most = most_entries(self.memory.inputs)
        return TooDenseError(
            f"{self.caller}: f: expected results that each depend on few inputs, got more than {most:,} pairs of a "
            f"number and an input from {name}{_at_line()}: this is not sparse. hodiff.hvp gives products, "
            f"hodiff.hessian the dense matrix."
        )

    def _refusal(self, name: str) -> InputError:
        what = _READING.get(name, name)
        finding = (
            f"{self.caller}: f: expected a course that does not depend on the values of x, got {what} of a tensor "
            f"that does{_at_line()}: at another x other operators may run."
        )
        if self.caller.endswith("_pattern"):
            return InputError(f"{finding} at_point=True returns the pattern at this x only.")
        return ValuesDecideError(finding)


def _at_line() -> str:
    line = line_now()
    return f" ({line})" if line else ""


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _share(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.layout is y.layout is torch.strided and share_storage(x, y))
