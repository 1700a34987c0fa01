"""Switches of gradient recording: torch shows them to function modes, but not the block that causes them.

Recording by reverse mode, and its engine.

The state of forward mode, and tangents inside of a Function, where torch switches them off.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import Variable, forward_ad, functional
from torch.autograd.graph import GradientEdge
from torch.overrides import has_torch_function

from hodiff.torch_internals.autograd.graph_nodes import called_functions
from hodiff.torch_internals.threads import one_thread_at_a_time
from hodiff.torch_internals.wording import Wording

# As torch.set_grad_enabled, without creating an object.
set_recording: Callable[[bool], None] = torch._C._set_grad_enabled
# As torch.autograd.grad, without its checks, which take a third of the time of a small product.
run_backward: Callable[..., tuple[Tensor | None, ...]] = Variable._execution_engine.run_backward
in_jit_trace: Callable[[], bool] = torch._C._is_tracing
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The modes of a trace before dispatch; the first is that of `make_fx`.
_PRE_DISPATCH_MODES: Any = torch._ops.mode_stack_state_for_pre_dispatch()


def gradients_of(
    outputs: Sequence[Tensor | GradientEdge],
    operands: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    keep: bool,
    graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Compute `torch.autograd.grad` with `allow_unused`, for cotangents that have the shapes of the outputs.

    Args:
        outputs: Tensors, or edges of a graph.
        operands: Tensors to which the gradients are taken.
        cotangents: A cotangent for each output.
        keep: Whether the graph is kept.
        graph: Whether the gradients carry a graph.

    Returns:
        The gradients; None for an operand that the outputs do not depend on.
    """
    outputs, operands, cotangents = tuple(outputs), tuple(operands), tuple(cotangents)
    if has_torch_function((*outputs, *operands)):  # a subclass, or a mode, replaces torch.autograd.grad
        given: Any = outputs
        return torch.autograd.grad(given, operands, cotangents, keep, graph, allow_unused=True)
    return run_backward(outputs, cotangents, keep, graph, operands, True, accumulate_grad=False)


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost pair of hooks set by `torch.autograd.graph.saved_tensors_hooks`, if any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def saving_unhooked() -> Iterator[None]:
    """Hide the tensors that the block saves from the hooks around it, such as those of `torch.utils.checkpoint`."""
    if saved_tensor_hooks() is None:
        yield
        return
    # Only the innermost pair of hooks is called.
    with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
        yield


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def in_fx_trace() -> bool:
    """Whether `make_fx` traces the running code; the check does not import `make_fx`."""
    # Most calls run without modes, where torch's own check would take a microsecond.
    if not dispatch_mode_count() and _PRE_DISPATCH_MODES.get(0) is None:
        return False
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


# The enter and exit code of blocks that switch. `no_grad` creates a `set_grad_enabled` of its own. Compare by
# identity: code that dynamo writes may hold a dict among its constants, and then cannot be hashed.
_BLOCKS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_ENTERS = {id(each.__enter__.__code__) for each in _BLOCKS}
_LEAVES = {id(each.__exit__.__code__) for each in _BLOCKS}
# `set_grad_enabled` already switches when it is created, even if it is never entered.
_MADE = torch.set_grad_enabled.__init__.__code__


class _Constants(threading.local):
    """The number of differentiating transforms around the block that switched gradients off; None if none did."""

    def __init__(self) -> None:
        # Not a class attribute: dynamo's guards would see the instance attribute appear.
        self.depth: int | None = None


CONSTANTS = _Constants()


@contextmanager
def nothing_constant() -> Iterator[None]:
    """Start without constants, as a transform does, and restore the state that a function may leave switched."""
    depth, CONSTANTS.depth = CONSTANTS.depth, None
    try:
        yield
    finally:
        CONSTANTS.depth = depth


def switched_by() -> tuple[str, Any]:
    """Return how this call switches, "enters", "leaves" or else "calls", and the block, or None if unknown."""
    frame: FrameType | None = sys._getframe(1)
    made = None
    for _ in range(10):
        if frame is None:
            break
        if id(frame.f_code) in _ENTERS:
            return "enters", frame.f_locals["self"]
        if id(frame.f_code) in _LEAVES:
            return "leaves", frame.f_locals["self"]
        if frame.f_code is _MADE:
            made = frame.f_locals["self"]
        frame = frame.f_back
    return "calls", made


def in_torch_autograd_functional() -> bool:
    """Whether a function of `torch.autograd.functional` makes this call, on inputs that it has detached."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return False
        if frame.f_code is _PREPARES:
            return True
        frame = frame.f_back
    return False


_PREPARES = functional._grad_preprocess.__code__


# `set_tangents(True)` is a context in which operators propagate tangents, also inside of a Function's rule.
set_tangents: Callable[[bool], AbstractContextManager[None]] = forward_ad._set_fwd_grad_enabled
tangents_are_on: Callable[[], bool] = torch._C._is_fwd_grad_enabled


def forward_pass(f: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False) -> Any:
    """Call `torch.func.jvp`, in one thread at a time, because all threads share torch's level of forward mode."""
    with one_thread_at_a_time(), nothing_constant():
        return torch.func.jvp(f, primals, tangents, has_aux=has_aux)


def inside_of_function() -> bool:
    """Whether the forward or a rule of a Function runs, where tangents are off; gradients may be recorded there."""
    if not torch.is_inference_mode_enabled():
        return not tangents_are_on()
    # Inference mode switches tangents off as well, so only the stack shows whether a Function runs.
    return function_calls() > 0


def function_calls() -> int:
    """Number of Python frames on the stack that call a Function, or run its forward."""
    return sum(1 for _ in called_functions(frame for frame, _ in traceback.walk_stack(None)))


def in_forward_mode() -> bool:
    """Whether a level of forward mode is open, by `torch.func.jvp` or by `torch.autograd.forward_ad`."""
    return forward_ad._current_level >= 0


def in_dual_level() -> bool:
    """Whether `torch.autograd.forward_ad` opened the level, inside which `torch.func.jvp` refuses to run."""
    return forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor is a dual number of the open level."""
    return forward_ad.unpack_dual(tensor).tangent is not None


@functools.cache
def load_forward_rules() -> None:
    """Load torch's forward rules now, instead of on first use, without the deprecation warning that this raises."""
    with warnings.catch_warnings():
        # A DeprecationWarning, and from torch 2.15 on a FutureWarning.
        warnings.filterwarnings("ignore", message=f".*{Wording.TORCHSCRIPT.pattern}")
        importlib.import_module("torch._decomp.decompositions_for_jvp")
