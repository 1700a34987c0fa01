"""Gradient of an inner loss, by routes that differ in how it is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from hodiff.common.module_state import at_another_point
from hodiff.common.options import is_number
from hodiff.common.trees import PyTree, describe, tensors_in
from hodiff.corrections import Corrections
from hodiff.derivatives.hvp import hvp
from hodiff.errors import InputError, RouteError
from hodiff.graphs import inspect_graph
from hodiff.meta.optimizer import root
from hodiff.recompute.checkpoint import CallProgram
from hodiff.recompute.cut_graphs import UnrecordedGradientError
from hodiff.recompute.programs import Checkpoint, Program, Tensors
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.batching import any_legacy_batched
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.grad_mode import in_dual_level
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.threads import one_thread_at_a_time

# Value, gradients with respect to the leaves of the parameters, and buffers.
Gradient = tuple[Tensor, list[Tensor], PyTree]
Loss = Callable[[Sequence[Tensor], PyTree, PyTree], tuple[Tensor, PyTree]]


class InnerLoss:
    """User's loss as a function of the leaves of the parameters, a batch and buffers; it always returns buffers."""

    def __init__(self, loss: Callable[..., Any], spec: pytree.TreeSpec, has_buffers: bool, correct: bool, again: bool):
        self.loss, self.spec, self.has_buffers = loss, spec, has_buffers
        self.mode: Any = Corrections() if correct else nullcontext()
        self._unseen = again

    @at_another_point
    def __call__(self, leaves: Sequence[Tensor], batch: PyTree, buffers: PyTree) -> tuple[Tensor, PyTree]:
        """Evaluate the loss, and raise if it is not a real scalar."""
        params = pytree.tree_unflatten(list(leaves), self.spec)
        with self.mode:
            result = self.loss(params, batch, buffers) if self.has_buffers else (self.loss(params, batch), ())
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(f"adapt: loss: expected (value, buffers) with buffers, got {describe(result)}.")
        value, buffers = result
        if not (isinstance(value, Tensor) and value.shape == () and value.is_floating_point()):
            raise InputError(
                f"adapt: loss: expected a function that returns a real tensor of shape (), got {describe(value)}; "
                "reduce it with .sum() or .mean()."
            )
        if self._unseen and not torch.compiler.is_compiling():
            _refuse_once_differentiable(value)
            self._unseen = False
        return value, detached(buffers)


def constant_gradient(loss: Loss, leaves: Tensors, batch: PyTree, buffers: PyTree) -> Gradient:
    """Compute the gradient as a constant for all outer derivatives."""
    leaves = [leaf.detach() for leaf in leaves]
    if only_reverse_mode():
        value, gradients, buffers = _recorded(loss, leaves, batch, buffers)
    else:
        value, gradients, buffers = transformed_gradient(loss, leaves, batch, buffers)
    return value.detach(), [each.detach() for each in gradients], detached(buffers)


def reverse_gradient(loss: Loss, leaves: Tensors, batch: PyTree, buffers: PyTree) -> Gradient:
    """Compute the gradient by a reverse pass, which another reverse pass may differentiate."""
    if not only_reverse_mode():
        return transformed_gradient(loss, leaves, batch, buffers)
    return _recorded(loss, leaves, batch, buffers, tensors_in(batch), captures=True)


def transformed_gradient(loss: Loss, leaves: Tensors, batch: PyTree, buffers: PyTree) -> Gradient:
    """Compute the gradient inside `torch.func` transforms and compiled code."""

    def guarded(leaves: Tensors) -> tuple[Tensor, PyTree]:
        # A copy belongs to this transform, so modules may update it in place.
        value, new = loss(leaves, batch, copied(buffers))
        if not value.requires_grad:
            raise independent()
        return value, new

    gradients, (value, buffers) = grad_and_value(guarded, has_aux=True)(list(leaves))
    return value, gradients, buffers


def _recorded(
    loss: Loss, leaves: Tensors, batch: PyTree, buffers: PyTree, others: Tensors = (), *, captures: bool = False
) -> Gradient:
    """Compute the gradient, differentiable in leaves, others and, if `captures`, the loss's closed-over tensors."""
    roots = (getattr(loss, "loss", loss),)
    recording = Recording(lambda operands: loss(operands, batch, copied(buffers)), leaves, others, roots=roots)
    value, buffers = recording.result
    if not value.requires_grad:
        raise independent()
    # If no known tensor requires a gradient, walk the graph for captured ones; this is cheaper than an unneeded graph.
    if captures and not recording.connected:
        recording.inspect(value)
    try:
        gradients = recording.gradients([value])
    except UnrecordedGradientError as error:
        raise RouteError(f"adapt: {error}; or use first_order=True.") from error
    if all(each is None for each in gradients):
        raise independent()
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
    return value if recording.connected else value.detach(), filled, buffers


def mixed_gradient(loss: Loss, leaves: Tensors, batch: PyTree, buffers: PyTree) -> Gradient:
    """Compute the gradient as one node, whose derivative is one forward pass over one reverse pass."""
    if torch.compiler.is_compiling():  # compiled code chooses itself what it stores
        return transformed_gradient(loss, leaves, batch, buffers)

    def kept(leaves: Sequence[Tensor], batch: PyTree, buffers: PyTree) -> tuple[Tensor, PyTree]:
        return loss(leaves, batch, copied(buffers))

    with one_thread_at_a_time():  # as in `checkpoint`
        call = CallProgram("adapt", kept, (list(leaves), batch, buffers), {})
        program = _GradientProgram(call, len(leaves))
        operands = call.without_unused(call.take_inputs(), again=True)
        value, *rest = Checkpoint.call(program, *operands)
    return value, rest[: len(leaves)], pytree.tree_unflatten(rest[len(leaves) :], pytree.tree_flatten(buffers)[1])


class _GradientProgram(Program):
    """Value and gradient of a call with respect to its first operands, with the call's other outputs.

    The derivative of the gradient along cotangents u is the gradient of the directional derivative along u. By the
    symmetry of second derivatives, one forward pass over one reverse pass computes it for all operands and stores
    nothing.
    """

    def __init__(self, call: CallProgram, count: int):
        self.call, self.count, self.name = call, count, call.name

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:

        def loss(leaves: Sequence[Tensor], batch: PyTree, buffers: PyTree) -> tuple[Tensor, PyTree]:
            del batch, buffers
            value, *rest = self.call.run(*leaves, *inputs[self.count :])
            return value, rest

        leaves = inputs[: self.count]
        if only_reverse_mode():
            # An undetected tensor would give the gradients a graph, which `Checkpoint` rejects.
            value, gradients, rest = _recorded(loss, leaves, None, (), inputs, captures=True)
        else:
            value, gradients, rest = transformed_gradient(loss, leaves, None, ())
        return value, *gradients, *rest

    def pull(self, inputs: Tensors, cotangents: Sequence[Tensor | None], needed: Sequence[int]) -> list[Tensor | None]:
        """Compute one Hessian-vector product, forward over reverse, for all operands that need it."""
        of_value, directions = cotangents[0], cotangents[1 : 1 + self.count]
        others = [of_value, *cotangents[1 + self.count :]]
        # torch.func.jvp cannot run inside torch.autograd.forward_ad.
        # Nor can it run on the batched tensors of `is_grads_batched=True`.
        if in_dual_level() or any_legacy_batched(directions) or any(each is not None for each in others):
            return super().pull(inputs, cotangents, needed)
        active = sorted({*range(self.count), *needed})

        def value(moving: Sequence[Tensor]) -> Tensor:
            point = list(inputs)
            for i, each in zip(active, moving, strict=True):
                point[i] = each
            return self.call.run(*point)[0]

        tangents = [directions[i] if i < self.count else None for i in active]
        point = [inputs[i] for i in active]
        filled = [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, point, strict=True)]
        products = dict(
            zip(active, hvp(value, point, filled, route="forward-over-reverse", correct=False), strict=True)
        )
        return [products[i] for i in needed]


def _refuse_once_differentiable(value: Tensor) -> None:
    """Raise if torch would treat the gradient of the loss as a constant."""
    once = inspect_graph(value).once
    if once is not None:
        raise RouteError(
            f"adapt: {once}, so the meta-gradient through the inner gradient does not exist; use "
            "first_order=True, or write that Function with hodiff.custom_vjp."
        )


def independent() -> InputError:
    """Return the error for an inner loss that autograd cannot trace back to any parameter."""
    return InputError(
        "adapt: loss: expected a loss that depends on the parameters, got one that does not; look for .detach(), "
        ".item(), NumPy code, torch.no_grad(), or parameters read from the module instead of the argument (use "
        "torch.func.functional_call)."
    )


def detached(tree: PyTree) -> PyTree:
    """Detach all tensors of a tree."""
    return pytree.tree_map_only(Tensor, torch.Tensor.detach, tree)


def copied(tree: PyTree) -> PyTree:
    """Clone all tensors of a tree."""
    return pytree.tree_map_only(Tensor, torch.Tensor.clone, tree)


def require_norm(caller: str, argument: str, value: Any, *, wanted: str = "a positive norm or None") -> None:
    """Raise if a value is no norm for clipping; a negative norm would reverse the gradients."""
    if value is None or (is_number(value) and value > 0):
        return
    if isinstance(value, Tensor) and value.shape == () and value.is_floating_point():
        # Values inside transforms are unknown, and values on an accelerator are not worth a synchronization.
        hidden = torch.compiler.is_compiling() or value.device.type != "cpu" or is_wrapped(value)
        if hidden or bool(value > 0):
            return
    got = repr(value) if is_number(value) or (isinstance(value, Tensor) and value.shape == ()) else describe(value)
    raise InputError(f"{caller}: {argument}: expected {wanted}, got {got}.")


def clipped(gradients: Sequence[Tensor], max_norm: Any) -> list[Tensor]:
    """Scale gradients so that their joint norm is at most `max_norm`, like torch's `clip_grad_norm_`."""
    squares = [each.square().sum() for each in gradients]
    norm = root(torch.stack(squares).sum())
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [each * factor for each in gradients]
