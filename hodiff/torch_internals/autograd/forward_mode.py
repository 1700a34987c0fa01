"""The state of forward mode, and tangents inside of a Function, where torch switches them off."""

from __future__ import annotations

import functools
import importlib
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from hodiff.torch_internals.autograd.grad_mode import nothing_constant
from hodiff.torch_internals.autograd.graph_nodes import called_functions
from hodiff.torch_internals.threads import one_thread_at_a_time
from hodiff.torch_internals.wording import Wording

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
    return any(called_functions(frame for frame, _ in traceback.walk_stack(None)))


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
