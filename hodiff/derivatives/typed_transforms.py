"""`torch.func` transforms of functions that return `(output, aux)`, with the types that torch does not declare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree
from hodiff.derivatives.route_choice import unavailable
from hodiff.graphs import nodes_of
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.forward_mode import forward_pass, load_forward_rules
from hodiff.torch_internals.autograd.graph_nodes import lacks_kernel


def push(f: Callable[..., Any], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[Any, Any, PyTree]:
    """Compute output, tangent and aux by forward mode, with the tangent in the dtypes of the output."""
    if not torch.compiler.is_compiling():
        load_forward_rules()
    output, tangent, aux = forward_pass(f, primals, tangents, has_aux=True)
    # torch promotes the tangent of a float32 scalar times a Python number to float64.
    return output, pytree.tree_map(lambda t, o: t.to(o.dtype), tangent, output), aux


def pull(f: Callable[..., Any], *primals: PyTree) -> tuple[Any, Callable[[Any], tuple[Any, ...]], PyTree]:
    """Compute output, pullback and aux by reverse mode."""
    try:
        result: Any = torch.func.vjp(f, *primals, has_aux=True)
    except Exception as error:
        if not (unavailable(error) and only_reverse_mode()):
            raise
        recorded = _recorded_pull(f, primals)
        if recorded is None:
            raise
        return recorded
    return result


def _recorded_pull(f: Callable[..., Any], primals: tuple[PyTree, ...]) -> Any:
    """Pull by `torch.autograd`, for Functions without setup_context; None if it would drop a gradient."""
    leaves, spec = pytree.tree_flatten(primals)

    recording = Recording(lambda operands: f(*pytree.tree_unflatten(operands, spec)), leaves, roots=(f,))
    output, aux = recording.result
    # Tensors that the function closes over may be differentiated, too.
    constant = [recording.inspect(each) for each in pytree.tree_leaves(output)]
    if any(map(lacks_kernel, nodes_of(*pytree.tree_leaves(output)))) or (recording.connected and any(constant)):
        return None

    def pullback(cotangents: Any) -> tuple[Any, ...]:
        found = recording.gradients(pytree.tree_leaves(output), pytree.tree_leaves(cotangents), keep=True)
        filled = [torch.zeros_like(x) if g is None else g for x, g in zip(recording.operands, found, strict=True)]
        result: tuple[Any, ...] = pytree.tree_unflatten(filled, spec)
        return result

    detached = output if recording.connected else pytree.tree_map(Tensor.detach, output)
    return detached, pullback, aux


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Build a function that returns the gradient and aux."""
    return torch.func.grad(f, has_aux=True)
