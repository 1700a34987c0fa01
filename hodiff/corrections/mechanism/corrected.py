"""`hodiff.corrected`: the context manager and decorator in which torch's own derivatives use the corrections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torch.compiler import is_compiling

from hodiff.corrections.mechanism.mode import Corrections
from hodiff.errors import HodiffError
from hodiff.torch_internals.autograd.grad_mode import CONSTANTS, in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.compilers.dynamo import run_uncompiled_where
from hodiff.torch_internals.interception import active_function_modes

P = ParamSpec("P")
R = TypeVar("R")


class _Corrected(Corrections):
    """The mode that users enter; it raises if another thread leaves it."""

    runs_compiled_code = True

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[int] = []

    def __enter__(self) -> _Corrected:
        self._threads.append(threading.get_ident())
        if not in_transform():
            CONSTANTS.depth = None
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        here = threading.get_ident()
        if here not in self._threads:
            raise HodiffError(
                "corrected: exited in a thread that did not enter it; it is still active in the thread that entered "
                "it. Enter and exit it in one thread, such as by decorating the function that the thread runs."
            )
        self._threads.remove(here)
        super().__exit__(*exception)


@overload
def corrected() -> Corrections: ...


@overload
def corrected(function: Callable[P, R], /) -> Callable[P, R]: ...


def corrected(function: Any = None, /) -> Any:
    r"""Context manager and decorator that uses hodiff's derivatives where torch's are wrong or missing.

    Every transform of hodiff does this itself. Use `corrected` for derivatives that torch takes: `torch.autograd.grad`,
    `torch.func` transforms, training with a gradient penalty. `hodiff.corrections.table()` lists what is corrected.

    It applies to calls inside modules, third-party code, `torch.func` transforms and `torch.compile`, in this thread.
    Results computed outside keep torch's derivatives. Contexts nest, and one context may be entered many times.

    As a decorator, with or without parentheses, it wraps functions, generators and coroutines, and is active while
    their bodies run. A `with` around an `await` or a `yield` stays active for other code that runs meanwhile in this
    thread: use the decorator there.

    Args:
        function: The function to decorate, if any.

    Returns:
        The context manager, which also decorates functions; or the decorated function.

    Raises:
        InputError: If the decorated object is a class, or not callable.

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
    # A compiler traces `__enter__` and `__exit__` of torch's own modes only.
    mode = Corrections() if is_compiling() else _Corrected()
    return mode if function is None else mode(function)


def _needs_uncompiled_code() -> bool:
    """Whether the running code is differentiated in ways that compiled code, which has first order at most, is not."""
    modes = [mode for mode in active_function_modes() if isinstance(mode, Corrections)]
    if all(mode.runs_compiled_code for mode in modes):
        return bool(modes) and (in_transform() or in_forward_mode())
    return True


run_uncompiled_where(_needs_uncompiled_code)
