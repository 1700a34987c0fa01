"""Rules for what switches derivatives off and on: constants, and tensors marked, mean the same in both modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.differentiation import is_observed
from hodiff.torch_internals.forward_mode import set_tangents
from hodiff.torch_internals.grad_mode import entered_block, left_block
from hodiff.torch_internals.recording import set_recording
from hodiff.torch_internals.transforms import in_func_jvp, in_transform, marks_tensors

# Where a block keeps the tangents' own block.
_TANGENTS = "_hodiff_tangents"


@register(
    set_recording,
    name="torch.no_grad",
    routes=ROUTES[1:],
    reason="forward mode goes through what is a constant to reverse mode",
    reference="torch.func.grad, on torch.no_grad() inside of a function",
)
def _set_grad_enabled(enabled: bool) -> Any:
    # A level that torch.autograd.forward_ad opened is its user's own, who may want tangents and no graph.
    if torch.compiler.is_compiling() or not in_func_jvp():
        return UNNEEDED
    if not enabled and (block := entered_block()) is not None:
        setattr(block, _TANGENTS, set_tangents(False))
    elif (block := left_block()) is not None and hasattr(block, _TANGENTS):
        getattr(block, _TANGENTS).__exit__(None, None, None)
        delattr(block, _TANGENTS)
    return UNNEEDED


@register(
    Tensor.requires_grad_,
    kind="missing",
    routes=ROUTES[1:],
    reason="torch.func refuses it, also of what has derivatives anyway",
    reference="nothing is left to do",
)
def _requires_grad(self: Tensor, requires_grad: bool = True) -> Any:
    if torch.compiler.is_compiling() or not in_transform() or marks_tensors():
        return UNNEEDED
    return self if requires_grad and is_observed(self) else UNNEEDED
