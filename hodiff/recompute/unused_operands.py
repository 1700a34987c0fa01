"""Intermediate results of other computations that a program reaches, but does not depend on.

Autograd visits the graph of every operand in a backward pass, also where the gradient is zero, and frees it. So an
operand must not be in a program's graph unless it is in the graph that a plain call records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hodiff.graphs import inspect_graph
from hodiff.recompute.programs import Program, first_run, is_differentiable
from hodiff.torch_internals.autograd.batching import any_legacy_batched
from hodiff.torch_internals.autograd.differentiation import autograd_records
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped


def intermediate_results(inputs: Sequence[Tensor], start: int) -> list[int]:
    """Return the positions, from `start` on, of operands with a graph; none where a run can't record plainly."""
    found = [i for i in range(start, len(inputs)) if inputs[i].grad_fn is not None and is_differentiable(inputs[i])]
    if not found or not torch.is_grad_enabled() or in_transform() or in_forward_mode() or not autograd_records():
        return []
    return [] if any_legacy_batched(inputs) or any(map(is_wrapped, inputs)) else found


def without_unused(
    program: Program, inputs: Sequence[Tensor], positions: Collection[int]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Detach the operands at some positions that the outputs do not depend on, by a recorded first run.

    Args:
        program: The program.
        inputs: Its operands.
        positions: Positions of the operands that may be unused.

    Returns:
        The operands, and the detached outputs of the run.
    """
    constants = [each.detach().requires_grad_(i in positions) for i, each in enumerate(inputs)]
    outputs = first_run(program, inputs, constants)
    reached = {id(leaf) for each in outputs for leaf in inspect_graph(each).leaves}
    used = [i not in positions or id(constants[i]) in reached for i in range(len(inputs))]
    outputs = tuple(each.detach() if each.requires_grad else each for each in outputs)
    return [each if kept else each.detach() for each, kept in zip(inputs, used, strict=True)], outputs
