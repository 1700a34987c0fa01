"""Requirements of a check: the function runs, is deterministic, and depends on its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from hodiff.checks.attempts import Failure, attempt, first_line
from hodiff.checks.comparisons.scalar_problem import ScalarProblem, real_parts
from hodiff.common.complex_numbers import equal_with_nan
from hodiff.common.trees import describe, has_strides
from hodiff.errors import InputError

# Tolerance for equal calls: threads sum in varying order, and kernels' rounding depends on memory alignment.
_ROUNDINGS = 1000

# Number of calls whose outputs are compared, and bound of the input elements of all calls together.
_CALLS = 12
_SMALL = 1000


class UnrepeatableError(Exception):
    """Error of a function whose outputs differ between calls with the same inputs."""


def require_inputs(args: tuple[Any, ...], has_floating: bool) -> None:
    """Raise InputError for complex or sparse inputs, and for inputs without floating-point elements."""
    for path, leaf in tree_flatten_with_path(args)[0]:
        if isinstance(leaf, Tensor) and (leaf.layout is torch.jagged or not has_strides(leaf)):
            raise InputError(
                f"check: inputs{keystr(path)}: expected a dense tensor, got {describe(leaf)}. Pass its values as the "
                "input, and create the sparse tensor inside f."
            )
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise InputError(
                f"check: inputs{keystr(path)}: expected a real tensor, got {leaf.dtype}. "
                "Pass the real and imaginary parts as two inputs and combine them inside f with torch.complex."
            )
    if not has_floating:
        kinds = [str(a.dtype) if isinstance(a, Tensor) else type(a).__name__ for a in tree_leaves(args)]
        raise InputError(
            "check: inputs: expected at least one floating-point tensor with elements, "
            f"got {', '.join(kinds) or 'nothing'}. Only floating-point tensors are differentiated."
        )


def require_outputs(
    f: Callable[..., Any], args: tuple[Any, ...], function: Callable[..., Any], leaves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the outputs; raise if f fails, returns no floating tensors, or differs between calls."""
    with torch.no_grad():
        # A function may write into its inputs.
        outputs, *others = (attempt(function, *(leaf.clone() for leaf in leaves)) for _ in range(_calls(leaves)))
    if isinstance(outputs, Failure) or any(isinstance(again, Failure) for again in others):
        try:
            function(*leaves)
        except InputError:
            raise
        except Exception as error:
            name = getattr(f, "__name__", type(f).__name__)
            raise InputError(
                f"check: f: expected {name}(*inputs) to run with {len(args)} arguments, got {first_line(error)}"
            ) from error
        # The function ran this time.
        failed = next(each for each in (outputs, *others) if isinstance(each, Failure))
        raise InputError(
            f"check: f: expected a function that runs in each call with the same inputs, but one of {1 + len(others)} "
            f"calls raised {failed.message}"
        )
    if not any(y.numel() for y in outputs):
        raise InputError(
            "check: f(*inputs): expected a floating-point tensor with elements, got none. Return tensors, or tuples, "
            "lists and dicts of them; for other objects, pass a loss that returns a tensor, `loss=lambda output: "
            "output.logits.sum()`."
        )
    gaps = [
        (_gap(a, b), _ROUNDINGS * torch.finfo(a.dtype).eps * _largest(a))
        for again in others
        for a, b in zip(outputs, again, strict=True)
    ]
    if any(gap > rounding for gap, rounding in gaps):
        raise UnrepeatableError(f"two calls with the same inputs differ by {max(gap for gap, _ in gaps):.1e}")
    return outputs


def _calls(leaves: tuple[Tensor, ...]) -> int:
    """Return the number of calls to compare; small functions are called often to find rare differences."""
    return max(2, min(_CALLS, _SMALL // max(1, sum(leaf.numel() for leaf in leaves))))


def _gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; infinite if an element is not finite in one tensor and differs."""
    gap = (a.detach() - b.detach()).abs().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(gap.masked_fill(same, 0.0).nan_to_num(math.inf, posinf=math.inf).max()) if a.numel() else 0.0


def _largest(a: Tensor) -> float:
    return float(a.detach().abs().nan_to_num(0.0, posinf=0.0, neginf=0.0).max()) if a.numel() else 0.0


def require_dependence(problem: ScalarProblem, outputs: tuple[Tensor, ...]) -> None:
    """Raise InputError if the outputs do not depend on the inputs, by graph or by values."""
    tracked = [leaf.clone().requires_grad_() for leaf in problem.leaves]

    def gradients() -> bool:
        """Whether the inputs are in the graph; f may close over other tensors that require grad."""
        values = [real_parts(y).sum() for y in problem.function(*tracked) if y.requires_grad]
        return bool(values) and any(g is not None for g in torch.autograd.grad(values, tracked, allow_unused=True))

    with torch.enable_grad():
        reached = attempt(gradients)
    if reached is not False:
        return
    with torch.no_grad():
        moved = attempt(problem.function, *problem.at(problem.point + problem.step))
    if isinstance(moved, Failure):
        return
    if all(equal_with_nan(a, b) for a, b in zip(outputs, moved, strict=True)):
        raise InputError(
            "check: f(*inputs): expected an output that depends on a floating-point input, got a constant. "
            "Pass the tensors that f closes over as inputs."
        )
