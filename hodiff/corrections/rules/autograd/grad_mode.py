"""Rules for `Tensor.data`, `detach_`, `no_grad` and other switches: constants to all outer transforms.

Torch also has a switch for forward mode, but Functions switch it on again and views ignore it. Results of all calls
inside a switched-off block are therefore detached as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.running_pass import running_pass
from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.errors import RouteError
from hodiff.recompute.recording import switched_off
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import carry_derivatives, is_observed
from hodiff.torch_internals.autograd.grad_mode import (
    CONSTANTS,
    in_torch_autograd_functional,
    set_recording,
    set_tangents,
    switched_by,
    tangents_are_on,
)
from hodiff.torch_internals.autograd.transforms import (
    as_leaf,
    differentiating_count,
    in_func_jvp,
    in_transform,
    innermost_is_vmap,
    marks_tensors,
)
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_wrapped
from hodiff.torch_internals.tensors import share_storage

# Attribute in which a block keeps the state that it restores: the depth, and whether tangents were on.
_BEFORE = "_hodiff_before"
# Attribute of leaves by which the function itself takes gradients.
_OWN = "_hodiff_own_leaf"


@register(
    set_recording,
    name="torch.no_grad",
    routes=ROUTES[1:],
    reason="a result is a constant in reverse mode, but not in forward mode",
    reference="torch.func.grad: its rule for torch.no_grad() inside a function",
)
def _set_grad_enabled(enabled: bool) -> Any:
    # Inside a level of torch.autograd.forward_ad, the user may want tangents without a graph.
    if torch.compiler.is_compiling():
        return UNNEEDED
    running = running_pass()
    if running is None and not in_func_jvp():
        return UNNEEDED
    how, block = switched_by()
    if running is not None:
        running.switched(how, block, enabled)
    if not in_func_jvp():
        return UNNEEDED
    # Two active modes both see each switch: keep the first state. `set_grad_enabled` restores its state at creation.
    if block is not None and how != "leaves" and not hasattr(block, _BEFORE):
        setattr(block, _BEFORE, (CONSTANTS.depth, tangents_are_on()))
    if how == "enters" and enabled and _is_of_transform():
        return UNNEEDED
    if how == "enters" or (how == "calls" and enabled != torch.is_grad_enabled()):
        _switch(None if enabled else differentiating_count(), enabled and _may_be_on())
    elif how == "leaves" and hasattr(block, _BEFORE):
        _switch(*getattr(block, _BEFORE))
        delattr(block, _BEFORE)
    return UNNEEDED


def _is_of_transform() -> bool:
    """Whether a transform inside the block switches recording on for its own gradients."""
    return CONSTANTS.depth is not None and CONSTANTS.depth < differentiating_count()


def _may_be_on() -> bool:
    """Whether tangents are on, or were on before a block here switched them off."""
    return tangents_are_on() or CONSTANTS.depth is not None


def _switch(depth: int | None, tangents: bool) -> None:
    CONSTANTS.depth = depth
    set_tangents(tangents)


@register(
    Tensor.data.__get__,  # type: ignore[attr-defined]  # as above
    name="torch.Tensor.data",
    routes=ROUTES[1:],
    reason="a constant in reverse mode, but not in forward mode or for the outer of two nested torch.func.grad",
    reference="torch.Tensor.detach",
)
def _data(self: Tensor) -> Any:
    if torch.compiler.is_compiling() or not in_transform():
        return UNNEEDED
    # As in torch, the result has its own version counter, so it may be written to. torch.func.vmap has no `data`.
    return (self if innermost_is_vmap() else self.data).detach()


@register(
    Tensor.detach_,
    torch.detach_,
    name="torch.Tensor.detach_",
    routes=ROUTES[1:],
    reason="a constant only for the innermost transform",
    reference="torch.Tensor.detach",
)
def _detach_in_place(self: Tensor) -> Any:
    if torch.compiler.is_compiling() or not in_transform():
        return UNNEEDED
    result = self.detach_()
    if carry_derivatives([result]):
        raise RouteError(
            "detach_: inside nested transforms, torch detaches a tensor in place only from the innermost transform. "
            "Write `x = x.detach()` instead of `x.detach_()`."
        )
    return result


@register(
    Tensor.requires_grad_,
    kind="missing",
    routes=ROUTES[1:],
    reason="torch.func raises an error, for constants and for tensors that already require gradients",
    reference="a leaf of the innermost transform",
)
def _requires_grad(self: Tensor, requires_grad: bool = True) -> Any:
    if torch.compiler.is_compiling() or not in_transform() or marks_tensors():
        return UNNEEDED
    if in_torch_autograd_functional():
        raise RouteError(
            "torch.autograd.functional: expected a call outside of transforms, got inputs of an outer forward mode, "
            "torch.func.vmap or torch.func.grad, from which this function detaches: the derivatives would be zero. "
            "Use torch.func.jacrev, vjp, jvp or hessian, or hodiff's transforms, inside a function that is "
            "differentiated."
        )
    if not requires_grad:
        # Leave tensors from outside unchanged: switched on again, they would become tensors of the transform.
        if is_wrapped(self):
            _require_own(self)
            self.requires_grad = False  # torch.func allows the assignment, not the method
        return self
    was_constant = not self.requires_grad
    leaf = as_leaf(self)
    if leaf is not None and was_constant:
        setattr(leaf, _OWN, True)
    if leaf is None and not is_observed(self):
        raise RouteError(
            "requires_grad_: called inside torch.func.vmap, or in a batch of directions, where torch.autograd "
            "computes no gradient. Compute that gradient by torch.func.grad, or choose another route."
        )
    return self if leaf is None else leaf


@register(
    Tensor.data.__set__,  # type: ignore[attr-defined]  # as above
    name="torch.Tensor.data (assigned)",
    kind="missing",
    routes=ROUTES[1:],
    reason="torch.func raises an error, also if `module.to()` assigns the value that a parameter already has",
    reference="torch.nn.Module.to without the assignment",
)
def _assign_data(self: Tensor, value: Any) -> Any:
    if torch.compiler.is_compiling() or not in_transform() or not isinstance(value, Tensor):
        return UNNEEDED
    if not (is_wrapped(self) or is_wrapped(value)):
        return UNNEEDED
    held, given = below_transforms(self), below_transforms(value)
    if share_storage(held, given) and held.dtype == given.dtype and held.shape == given.shape:
        return None
    # Torch would let an outer tensor hold a tensor of the transform, which is invalid after the transform ends.
    raise RouteError(
        "Tensor.data: expected no assignment inside a torch.func transform, such as by `module.to(...)`, got "
        f"{value.dtype} of shape {tuple(value.shape)} for {self.dtype} of shape {tuple(self.shape)}. Convert the "
        "module before it is differentiated, convert its inputs or use `module.weight.to(...)` inside, or use the "
        "route "
        "'reverse-over-reverse'."
    )


@register(
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # as above
    name="torch.Tensor.requires_grad",
    routes=ROUTES[1:],
    reason="the tensor that torch.func differentiates with respect to becomes a constant",
    reference="raises the error that torch raises without transforms",
)
def _set_requires_grad(self: Tensor, value: bool) -> Any:
    if torch.compiler.is_compiling() or not in_transform() or marks_tensors():
        return UNNEEDED
    if value and not self.requires_grad:
        setattr(self, _OWN, True)
    elif not value:
        _require_own(self)
    return UNNEEDED


def _require_own(tensor: Tensor) -> None:
    """Raise if the tensor is an input of the innermost transform, and not a leaf that the function made itself."""
    if tensor.requires_grad and tensor.is_leaf and is_wrapped(tensor) and not hasattr(tensor, _OWN):
        raise switched_off("requires_grad_")
