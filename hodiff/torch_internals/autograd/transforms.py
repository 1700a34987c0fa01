"""Which `torch.func` transforms run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import pyfunctorch

# Asked in each call of a Function, so that it is torch's own, without a frame of Python around it.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
# `with outside_transforms():` operators run as if there were no transform.
outside_transforms: Callable[[], AbstractContextManager[Any]] = pyfunctorch.temporarily_clear_interpreter_stack

_DIFFERENTIATING = (functorch.TransformType.Grad, functorch.TransformType.Jvp)


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Operators run as where the transform of a level is the innermost one."""
    with ExitStack() as popped:
        while (innermost := functorch.peek_interpreter_stack()) is not None and innermost.level() > level:
            popped.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
        yield


def innermost_is_vmap() -> bool:
    """Whether the transform that sees an operator first is `torch.func.vmap`; only to be asked inside a transform."""
    return functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap


def transform_count() -> int:
    """How many transforms run, one inside the other."""
    return len(functorch.get_interpreter_stack() or ())


def differentiating_count() -> int:
    """How many of them differentiate: `grad`, `vjp`, `jvp` and what is made of these, but not `vmap`."""
    return sum(each.key() in _DIFFERENTIATING for each in functorch.get_interpreter_stack() or ())


def innermost_differentiating_level() -> int:
    """The level of the innermost of them; 0 where none differentiates."""
    running = functorch.get_interpreter_stack() or ()
    return max((each.level() for each in running if each.key() in _DIFFERENTIATING), default=0)


def innermost_is_reverse() -> bool:
    """Whether of the transforms that differentiate the innermost one is reverse mode."""
    kinds = [each.key() for each in functorch.get_interpreter_stack() or ()]
    return next((kind == functorch.TransformType.Grad for kind in reversed(kinds) if kind in _DIFFERENTIATING), False)


def marks_tensors() -> bool:
    """Whether it is a transform itself that calls `requires_grad_`, which the functions inside of it must not."""
    return functorch.get_inplace_requires_grad_allowed()


def as_leaf(tensor: Tensor) -> Tensor | None:
    """A tensor whose gradient may be taken inside of the innermost transform; None where that is `torch.func.vmap`."""
    innermost = functorch.peek_interpreter_stack()
    if innermost.key() not in _DIFFERENTIATING:
        return None
    if functorch.maybe_get_level(tensor) < innermost.level():
        tensor = functorch._wrap_for_grad(tensor, innermost.level())
    allowed = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.requires_grad_()
    finally:
        functorch.set_inplace_requires_grad_allowed(allowed)


def in_func_jvp() -> bool:
    """Whether one of them is `torch.func.jvp`."""
    return innermost_jvp_level() is not None


def innermost_jvp_level() -> int | None:
    """The level of the innermost `torch.func.jvp` that runs, or None where none does."""
    if not in_transform():
        return None
    for each in reversed(functorch.get_interpreter_stack() or ()):
        if each.key() == functorch.TransformType.Jvp:
            return each.level()
    return None


def in_func_vmap() -> bool:
    """Whether one of them is `torch.func.vmap`."""
    return in_transform() and any(batching_levels().values())


def batching_levels() -> dict[int, bool]:
    """The levels of the transforms that run, and of each whether it is `torch.func.vmap`."""
    running = functorch.get_interpreter_stack() or ()
    return {each.level(): each.key() == functorch.TransformType.Vmap for each in running}
