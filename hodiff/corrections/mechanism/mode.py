"""The mode `Corrections`: intercepts torch calls, runs their rules, and falls back to torch where a rule declines."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from hodiff.common.tensor_rules import TENSOR_RULES
from hodiff.common.trees import tensors_in
from hodiff.corrections.mechanism.argument_forms import weight_of_l1_loss
from hodiff.corrections.mechanism.declining import UNNEEDED, Declined, Redirected, unable
from hodiff.corrections.mechanism.library_operators import require_derivatives, require_no_writes, rule_for_call
from hodiff.corrections.mechanism.numbers import as_constants, makes_constants, moving_number, refused
from hodiff.corrections.mechanism.registry import Correction, correction_of, show_private_functions
from hodiff.corrections.mechanism.subclasses import ask_subclasses, without_subclasses
from hodiff.corrections.mechanism.wrapping import twin, within
from hodiff.errors import HodiffError, InputError, RouteError
from hodiff.rules.autocast import cast_by_autocast, without_autocast
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode, nothing_constant
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.compilers.dynamo import watch_compiled_code
from hodiff.torch_internals.interception import (
    RuleMode,
    autocasts,
    call_beneath_users_modes,
    function_mode_count,
    subclasses_are_asked,
)
from hodiff.torch_internals.operators import OpOverload, OpOverloadPacket
from hodiff.torch_internals.wording import Wording, says

P = ParamSpec("P")
R = TypeVar("R")

# Other subclasses of Tensor may override functions, so their `__torch_function__` runs first.
_PLAIN = {Tensor, Parameter}


# Types of operators, those of other libraries included.
_OPERATORS = frozenset({OpOverload, OpOverloadPacket})
# torch functions that may return None.
_MAY_RETURN_NONE = frozenset({
    "backward",
    "retain_grad",
    "record_stream",
    "torch.jit.ScriptFunction",
    "__get__",
    "__set__",
    "__delete__",
    "__setitem__",
})


class Corrections(RuleMode):
    """Mode in which torch functions with an entry in the table run hodiff's rule, in this thread.

    It applies to calls inside modules and third-party code. A rule returns torch's value up to rounding.

    Args:
        lean: Whether rules that are only faster are used.
        many: Whether many directions will go through the derivatives at once, as in a dense Hessian.
    """

    # Whether compiled code runs compiled inside the mode, where no mode sees its operators.
    runs_compiled_code = False

    def __init__(self, *, lean: bool = False, many: bool = False):
        super().__init__()
        compiling = is_compiling()
        show_private_functions(compiling)
        if not compiling:
            watch_compiled_code()
        self.lean = lean
        self.many = many
        # Called with each function and its arguments, if set; returns a function to call with the result, or None.
        self.watcher: Callable[[Any, Any], Callable[[Any], None] | None] | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that it runs in this mode; a generator or a coroutine leaves the mode while it waits."""
        return within(self, function)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule of a torch function, or torch's own function if there is no rule."""
        kwargs = kwargs or {}
        if self.watcher is not None:
            watcher, self.watcher = self.watcher, None
            try:
                note = watcher(func, (args, kwargs))
                result = self.__torch_function__(func, types, args, kwargs)
                if note is not None:
                    note(result)
                return result
            finally:
                self.watcher = watcher
        compiling = is_compiling()
        if func is F.l1_loss and not compiling and (weight := weight_of_l1_loss()) is not None:
            return run_in_the_mode(twin(func), *args, **{**kwargs, "weight": weight})
        # An outer mode sees the called functions, as without this mode, and not the calls inside rules.
        if not compiling and function_mode_count():
            result = call_beneath_users_modes(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        going_forward = not compiling and in_forward_mode()
        if going_forward and makes_constants(func):
            return self._constant(func, types, args, kwargs)
        if not compiling:  # compiled code would be guarded by the current content
            for tensors, rule in TENSOR_RULES:  # by a loop here, as most calls have no such tensors
                if tensors and (result := rule(func, args, kwargs, self)) is not None:
                    return result
        correction = correction_of(func, args)
        if going_forward and (number := moving_number(func, correction, args, kwargs)):
            return _with_moving_number(func, number, correction, args, kwargs)
        if types and not _PLAIN.issuperset(types) and subclasses_are_asked():
            return ask_subclasses(self, correction, func, types, args, kwargs)
        if correction is None:
            if type(func) in _OPERATORS and not compiling:
                return _by_formula(func, args, kwargs)
            return func(*args, **kwargs)
        operands, named = args, kwargs
        if kwargs and not correction.parameters.names.issuperset(kwargs):
            if kwargs.get("out") is not None and "out" not in correction.parameters.names:
                return func(*args, **kwargs)  # which torch refuses to differentiate
            named = correction.parameters.renamed(func, kwargs)
        if not compiling and not subclasses_are_asked():
            operands, named = without_subclasses(func, operands, named)
        if correction.kind == "slow" and not self._pays(correction, operands, named):
            return func(*args, **kwargs)
        cast = None if compiling or not autocasts() else cast_by_autocast(correction.name, (operands, named))
        if cast is None:
            result = self._by_rule(correction, operands, named, compiling)
        else:
            operands, named = cast[0]
            with without_autocast(cast[1]):
                result = self._by_rule(correction, operands, named, compiling)
        if type(result) is Tensor or type(result) is tuple:
            return result
        if isinstance(result, Exception):
            # Errors of the rule itself, or about tangents without memory, which transforms catch and retry.
            if isinstance(result, NotImplementedError) or says(result, Wording.CHANGES_ZERO):
                raise result
            func(*args, **kwargs)  # torch's own error, for arguments that torch does not accept either
            raise result
        if result is UNNEEDED:
            return func(*args, **kwargs)
        if type(result) is Declined:
            return self.declined(correction, result, func, args, kwargs)
        if type(result) is Redirected:
            return func(*result.args, **kwargs)
        if result is NotImplemented:
            return self.declined(correction, UNNEEDED, func, args, kwargs)
        if result is None and getattr(func, "__name__", "") not in _MAY_RETURN_NONE:
            raise _without_value(correction, func)
        return result

    def _by_rule(self, correction: Correction, args: Any, kwargs: Any, compiling: bool) -> Any:
        if correction.lean is not None and self._is_worth_it(correction, args, kwargs):
            result = correction.lean(*args, **kwargs)
            if type(result) is not Declined:
                return result
        if compiling:
            return correction.rule(*args, **kwargs)
        result = _run(correction.rule, args, kwargs)
        if isinstance(result, Exception) or (type(result) is Declined and not result.torch_is_right):
            try:
                in_numbers = correction.parameters.with_numbers(args, kwargs)
            except TypeError as error:
                return unable(f"of {error}")
            if in_numbers is not None:
                return _run(correction.rule, *in_numbers)
        return result

    def _constant(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call where derivatives are switched off, and detach its result."""
        with nothing_constant():
            return as_constants(self.__torch_function__(func, types, args, kwargs), (args, kwargs))

    def declined(self, correction: Correction, why: Declined, func: Any, args: Any, kwargs: Any) -> Any:
        """Run torch's own function for a declined call; raise if it is known to be wrong for a derivative taken."""
        result = func(*args, **kwargs)
        # torch itself raises for a missing derivative.
        mends = correction.mends
        is_wrong = correction.kind == "wrong" or (mends is not None and mends(*args, **kwargs))
        if why.torch_is_right or not is_wrong or not carry_derivatives(tensors_in((args, kwargs))):
            return result
        raise RouteError(
            f"{correction.name}: hodiff's rule does not take this call, because {why.because}; and torch's own "
            f"derivative may be wrong by {', '.join(correction.routes) or 'any route'}: {correction.reason}. "
            "Change the call so that the rule supports it, detach its inputs if you need no derivative, or use "
            "torch's own derivatives by correct=False, or by a call outside of corrected()."
        )

    def _pays(self, correction: Correction, args: Any, kwargs: Any) -> bool:
        """Whether a rule that is mostly faster is needed here, or faster."""
        mends = correction.mends
        return (mends is not None and mends(*args, **kwargs)) or self._is_worth_it(correction, args, kwargs)

    def _is_worth_it(self, correction: Correction, args: Any, kwargs: Any) -> bool:
        # A compiler fuses the passes that lean rules save, and traces torch's own functions best.
        if not self.lean or is_compiling():
            return False
        # All functions with a least size or devices name their first argument `input`.
        least = correction.least_elements
        first = args[0] if args else kwargs.get("input")
        if correction.devices and isinstance(first, Tensor) and first.device.type not in correction.devices:
            return False
        return self.many or not least or (isinstance(first, Tensor) and first.numel() >= least)


def _run(rule: Any, args: Any, kwargs: Any) -> Any:
    """Return the value of a rule, a `Declined`, or its error for arguments that torch may refuse as well."""
    try:
        return rule(*args, **kwargs)
    except InputError as error:  # hodiff's function does not accept the arguments
        return unable(str(error))
    except HodiffError:  # an error of the rule itself
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return error


def run_in_the_mode(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the twin of a Python function of torch, so that corrections apply to the calls inside."""
    with Corrections():
        return function(*args, **kwargs)


def _with_moving_number(func: Any, number: str, correction: Correction | None, args: Any, kwargs: Any) -> Any:
    """Run torch's Python code, which may use the number as a tensor; raise for other functions."""
    own_code = correction is None or getattr(correction.rule, "func", None) is run_in_the_mode
    if not own_code or not isinstance(func, FunctionType):
        raise refused(func, number)
    return run_in_the_mode(twin(func), *args, **kwargs)


def _by_formula(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator without a rule, by its formula in torch.library if there is one."""
    require_no_writes(operator, args, kwargs)
    call = rule_for_call(operator, args, kwargs)
    if call is not None:
        with Corrections():
            return call()
    result = operator(*args, **kwargs)
    if in_transform() or in_forward_mode():
        require_derivatives(operator, (args, kwargs), result)
    return result


def _without_value(correction: Correction, func: Any) -> HodiffError:
    rule = getattr(correction.rule, "__qualname__", repr(correction.rule))
    return HodiffError(
        f"{rule}, the rule registered for {correction.name}: expected it to return what {func.__name__} returns, got "
        'None. Return the value, or decline the call by hodiff.corrections.UNNEEDED or unable("...").'
    )
