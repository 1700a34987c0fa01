"""Probe of the tensors that a Function saves, and of what backward reads of them: HD502."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall
from hodiff.checks.probes.torch_calls import TorchCalls
from hodiff.checks.source_lines import rule_location
from hodiff.common.trees import tensors_in

# Scale and shift of inputs: other signs, beyond usual bounds, within usual bounds.
_ELSEWHERE = ((-1.0, 0.3), (40.0, 1.0), (0.03, 0.0))
_SEVERAL = 2


def wasted_memory(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report saved tensors that backward does not need, and their bytes."""
    if any(isinstance(each, Tensor) and each.is_complex() for each in call.args):
        return []  # Rules of complex arguments are not probed.
    ran = call.fresh().run()
    saved = [t for t in ran.context.for_backward if isinstance(t, Tensor)]
    unread = _unread(ran, generator)
    # A tensor that is never read is named once, and not for its size.
    evidence = [*unread.values(), *_larger_than_needed(call, ran, set(unread)), *_too_large(ran, saved)]
    if not evidence:
        return []
    return [Cause("HD502", tuple(evidence), no_entry, rule_location(call.function, "setup_context", "forward"))]


def _unread(ran: ForwardRun, generator: torch.Generator) -> dict[int, str]:
    """Describe saved tensors that backward never reads, reads only the shape of, or only compares, by position."""
    context = ran.context.replaced(lambda name, t: t.clone(), "backward")
    incoming = ran.cotangents(generator)
    with torch.no_grad(), TorchCalls() as trace:
        # A rule that raises has not shown what it reads.
        if not isinstance(attempt(ran.pull, incoming, context), tuple):
            return {}
    # A rule may recompute saved values when it is differentiated itself.
    tracked = context.replaced(lambda name, t: _tracked(t), "backward")
    with torch.enable_grad(), TorchCalls() as recorded:
        attempt(ran.pull, tuple(map(_tracked, incoming)), tracked)
    found = {}
    for i, tensor in enumerate(context.for_backward):
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        both = (tensor, tracked.for_backward[i])
        steps = [step for step in (*trace.steps, *recorded.steps) if any(a is b for a in step.tensors for b in both)]
        if not steps and not _matters(ran, i):
            found[i] = f"backward of {ran.call.name} never reads saved_tensors[{i}]{_size(tensor)}"
        elif not steps:
            # The tensor is read where calls cannot be recorded, as within a transform of torch.func.
            continue
        elif all(step.kind == "metadata" for step in steps):
            found[i] = f"backward of {ran.call.name} reads only the shape of saved_tensors[{i}]{_size(tensor)}"
        elif all(step.kind in {"metadata", "comparison"} for step in steps) and not _given(ran, i):
            found[i] = f"backward of {ran.call.name} only compares saved_tensors[{i}]{_size(tensor)}; a mask would do"
    return found


def _tracked(tensor: Any) -> Any:
    moves = isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())
    return tensor.detach().clone().requires_grad_() if moves else tensor


def _matters(ran: ForwardRun, i: int) -> bool:
    """Whether NaN in a saved tensor changes the gradients."""

    def poisoned(name: str, t: Tensor) -> Tensor:
        bad = name == f"saved_tensors[{i}]" and t.is_floating_point()
        return torch.full_like(t, float("nan")) if bad else t.clone()

    plain = attempt(ran.gradients, ran.context.replaced(lambda name, t: t.clone(), "backward"))
    spoilt = attempt(ran.gradients, ran.context.replaced(poisoned, "backward"))
    if isinstance(plain, Failure) or isinstance(spoilt, Failure):
        return True
    return not all(map(torch.equal, tensors_in(plain), tensors_in(spoilt)))


def _given(ran: ForwardRun, i: int) -> bool:
    tensor = ran.context.for_backward[i]
    return tensor.dtype == torch.bool or any(tensor is each for each in (*ran.call.args, *ran.outputs))


def _larger_than_needed(call: FunctionCall, ran: ForwardRun, unread: set[int]) -> Iterator[str]:
    """Yield messages on masks stored as numbers, and on copies or repetitions of constants."""
    runs = [ran, *_elsewhere(call)]
    if len(runs) == 1 or len({len(each.context.for_backward) for each in runs}) > 1:
        return
    constants = [j for j, a in enumerate(call.args) if isinstance(a, Tensor) and not call.moving[j]]
    for i, tensor in enumerate(ran.context.for_backward):
        if i in unread or not isinstance(tensor, Tensor) or tensor.numel() < _SEVERAL or _is_view(ran, tensor):
            continue
        samples = [each.context.for_backward[i] for each in runs]
        fixed = all(isinstance(each, Tensor) and torch.equal(each, tensor) for each in samples)
        copied = [j for j in constants if fixed and _is_copy(tensor, ran.call.args[j])]
        repeated = [d for d in range(tensor.dim()) if fixed and _repeats(tensor, d)]
        name = f"saved_tensors[{i}] of {call.name}{_size(tensor)}"
        if copied:
            yield f"{name} is a copy of {call.argument(copied[0])}, which costs nothing to save itself"
        elif tensor.is_floating_point() and all(map(_is_mask, samples)):
            yield f"{name} holds zeros and ones; a mask of booleans would do, {tensor.numel()} bytes"
        elif repeated:
            yield f"{name} repeats itself along dimension {repeated[0]}; one of the rows would do"


def _elsewhere(call: FunctionCall) -> Iterator[ForwardRun]:
    """Run forward at other points, to rule out accidentally equal numbers; none if a run raises."""
    points = [{i: scale * call.args[i] + shift for i in call.moves()} for scale, shift in _ELSEWHERE]
    found = [attempt(call.fresh().at(point).run) for point in points]
    return iter(
        [each for each in found if isinstance(each, ForwardRun)]
        if all(isinstance(r, ForwardRun) for r in found)
        else []
    )


def _is_copy(tensor: Tensor, given: Tensor) -> bool:
    return given.dtype == tensor.dtype and given.stride() == tensor.stride() and torch.equal(given, tensor)


def _is_mask(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and bool(((tensor == 0) | (tensor == 1)).all())


def _repeats(tensor: Tensor, dim: int) -> bool:
    if tensor.shape[dim] < _SEVERAL or not tensor.stride(dim):
        return False
    return torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def _is_view(ran: ForwardRun, tensor: Tensor) -> bool:
    given = (*ran.call.args, *ran.outputs)
    return any(isinstance(each, Tensor) and _same_storage(tensor, each) for each in given)


def _too_large(ran: ForwardRun, saved: list[Tensor]) -> list[str]:
    """Compare the bytes of saved tensors with those of inputs and outputs, which are kept anyway."""
    given = [t for t in (*ran.call.args, *ran.outputs) if isinstance(t, Tensor)]
    own = [t for t in saved if not any(_same_storage(t, each) for each in given)]
    extra, bound = sum(map(_bytes, own)), sum(map(_bytes, given))
    if extra <= bound:
        return []
    return [f"{ran.call.name} saves {extra} bytes beside inputs and outputs, which have {bound}"]


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(tensor: Tensor) -> str:
    return f", {_bytes(tensor)} bytes of shape {tuple(tensor.shape)}"
