"""The mode that puts corrections in the place of torch's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from hodiff.corrections.declining import UNNEEDED, Declined, unable
from hodiff.corrections.registry import CORRECTIONS, Correction
from hodiff.errors import HodiffError, InputError

P = ParamSpec("P")
R = TypeVar("R")

# Other subclasses of Tensor bring rules of their own, which must be asked.
_PLAIN = {Tensor, Parameter}


# torch's functions that return None, if only at times.
_MAY_RETURN_NONE = frozenset({
    "backward",
    "retain_grad",
    "record_stream",
    "__get__",
    "__set__",
    "__delete__",
    "__setitem__",
})


class Corrections(TorchFunctionMode):
    """While active, in this thread, torch functions with an entry in the table run hodiff's rule.

    It reaches calls inside modules and third-party code. A rule returns torch's value to rounding.

    Args:
        lean: Whether rules that are only faster take part.
        many: Whether many directions will go through the derivatives at once, as in a dense Hessian.
    """

    def __init__(self, *, lean: bool = False, many: bool = False):
        super().__init__()
        self.lean = lean
        self.many = many

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that it runs in this mode."""

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule of a torch function, and torch's own where there is none."""
        kwargs = kwargs or {}
        correction = CORRECTIONS.get(func)
        if (
            correction is None
            or not _PLAIN.issuperset(types)
            or (correction.kind == "slow" and not self._pays(correction.least_elements, args, kwargs))
        ):
            return func(*args, **kwargs)
        if is_compiling():
            result = correction.rule(*args, **kwargs)
        else:
            try:
                result = correction.rule(*args, **kwargs)
            except InputError as error:  # hodiff's function does not take them
                result = unable(str(error))
            except HodiffError:
                raise
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                func(*args, **kwargs)  # torch's own error, for arguments that torch does not take either
                raise
        if type(result) is Declined:
            return self.declined(correction, result, func, args, kwargs)
        if result is NotImplemented:
            return self.declined(correction, UNNEEDED, func, args, kwargs)
        if result is None and getattr(func, "__name__", "") not in _MAY_RETURN_NONE:
            raise _without_value(correction, func)
        return result

    def declined(self, correction: Correction, why: Declined, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that its rule declined. This one method decides how: by torch's own function, whatever the reason.

        Args:
            correction: The entry of the rule.
            why: The reason; `torch_is_right` says whether torch's derivatives of this call are to be trusted.
            func: The torch function.
            args: Its arguments.
            kwargs: Its arguments by keyword.

        Returns:
            Its value.
        """
        del correction, why
        return func(*args, **kwargs)

    def _pays(self, least_elements: int, args: Any, kwargs: Any) -> bool:
        # A compiler fuses what the lean rules spare, and traces torch's own functions best.
        if not self.lean or is_compiling():
            return False
        # All functions with a least size call their first argument so.
        return self.many or not least_elements or (args[0] if args else kwargs["input"]).numel() >= least_elements


def _without_value(correction: Correction, func: Any) -> HodiffError:
    """The error of a rule that returns None."""
    rule = getattr(correction.rule, "__qualname__", repr(correction.rule))
    return HodiffError(
        f"{rule}, the rule registered for {correction.name}: expected it to return what {func.__name__} returns, got "
        'None. Return the value, or decline the call by hodiff.corrections.UNNEEDED or unable("...").'
    )


def corrected() -> Corrections:
    r"""Context manager and decorator: derivatives of torch functions are hodiff's where torch's are wrong or missing.

    Every transform of hodiff does so by itself. Use this for derivatives that torch takes: `torch.autograd.grad`,
    `torch.func` transforms, training with a gradient penalty. `hodiff.corrections.table()` lists what is corrected.

    It reaches calls inside modules and third-party code, `torch.func` transforms and `torch.compile`, in this thread.
    What was computed outside keeps torch's derivatives. It nests, and one of them may be entered many times.

    Returns:
        The context manager, which also decorates functions.

    Example:
        >>> import torch, hodiff
        >>> x, v = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 0.0])
        >>> f = lambda x: torch.nn.functional.layer_norm(x, (3,))[0]
        >>> product = torch.func.grad(lambda x: torch.func.jvp(f, (x,), (v,))[1])
        >>> product(x)  # the second derivative of the first output, by torch: wrong
        tensor([ 0.3818, -0.0764, -0.0764])
        >>> with hodiff.corrected():
        ...     product(x)
        tensor([ 0.1964, -0.1800, -0.0164])
    """
    return Corrections()
