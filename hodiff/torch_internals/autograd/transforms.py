"""The `torch.func` transforms that are running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import pyfunctorch

# Each call of a Function makes this check, so it is torch's own function, without a Python frame around it.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
# `with outside_transforms():` runs operators as if there were no transform.
outside_transforms: Callable[[], AbstractContextManager[Any]] = pyfunctorch.temporarily_clear_interpreter_stack

_DIFFERENTIATING = (functorch.TransformType.Grad, functorch.TransformType.Jvp)


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Run operators as if the transform of a level were the innermost one."""
    with ExitStack() as popped:
        while (innermost := functorch.peek_interpreter_stack()) is not None and innermost.level() > level:
            popped.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
        yield


def innermost_is_vmap() -> bool:
    """Whether the innermost transform is `torch.func.vmap`; valid only inside a transform."""
    return functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap


def transform_count() -> int:
    """Return the number of running transforms."""
    return len(functorch.get_interpreter_stack() or ())


def differentiating_count() -> int:
    """Return the number of running transforms that differentiate: `grad`, `vjp`, `jvp` and others, but not `vmap`."""
    return sum(each.key() in _DIFFERENTIATING for each in functorch.get_interpreter_stack() or ())


def disables_gradients_outside() -> bool:
    """Whether a running reverse-mode transform was called where gradients are disabled, as is its backward pass."""
    running = functorch.get_interpreter_stack() or ()
    reverse = (each for each in running if each.key() == functorch.TransformType.Grad)
    return not all(functorch.CGradInterpreterPtr(each).prevGradMode() for each in reverse)


def innermost_differentiating_level() -> int:
    """Return the level of the innermost differentiating transform; 0 if there is none."""
    running = functorch.get_interpreter_stack() or ()
    return max((each.level() for each in running if each.key() in _DIFFERENTIATING), default=0)


def innermost_is_reverse() -> bool:
    """Whether the innermost differentiating transform is reverse mode."""
    kinds = [each.key() for each in functorch.get_interpreter_stack() or ()]
    return next((kind == functorch.TransformType.Grad for kind in reversed(kinds) if kind in _DIFFERENTIATING), False)


def marks_tensors() -> bool:
    """Whether a transform itself may call `requires_grad_` now, which functions inside of it must not call."""
    return functorch.get_inplace_requires_grad_allowed()


def as_leaf(tensor: Tensor) -> Tensor | None:
    """Return a tensor whose gradient can be taken inside the innermost transform; None if that is `torch.func.vmap`."""
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
    """Whether `torch.func.jvp` is running."""
    return innermost_jvp_level() is not None


def innermost_jvp_level() -> int | None:
    """Return the level of the innermost running `torch.func.jvp`, or None."""
    if not in_transform():
        return None
    for each in reversed(functorch.get_interpreter_stack() or ()):
        if each.key() == functorch.TransformType.Jvp:
            return each.level()
    return None


def in_func_vmap() -> bool:
    """Whether `torch.func.vmap` is running."""
    return in_transform() and any(batching_levels().values())


def batching_levels() -> dict[int, bool]:
    """Return the levels of the running transforms, each with whether it is `torch.func.vmap`."""
    running = functorch.get_interpreter_stack() or ()
    return {each.level(): each.key() == functorch.TransformType.Vmap for each in running}
