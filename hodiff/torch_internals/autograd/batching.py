"""Direct calls of a Function's batching rule under `torch.func.vmap`.

Torch itself binds the signature and flattens all arguments as pytrees, which takes longer than a small batch.

The batched tensors of `torch.autograd.grad(is_grads_batched=True)`, which differ from those of `torch.func.vmap`.

A Function gets them in `forward` itself, where few operators support them and some give wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.autograd_function import VmapInfo

from hodiff.torch_internals.autograd.wrapped_tensors import unwrap_if_ended

is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def any_legacy_batched(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor is batched by `is_grads_batched=True`."""
    return any(map(is_legacy_batched, tensors))


def without_batches(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int | None]]:
    """Return tensors with the batch as first dimension, and its position: 0, or None for tensors without a batch."""
    level = _level()
    dims = [0 if is_legacy_batched(each) else None for each in tensors]
    plain = [
        each if d is None else torch._remove_batch_dim(each, level, 1, 0) for each, d in zip(tensors, dims, strict=True)
    ]
    return plain, dims


def with_batches(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors with their first dimension as the batch."""
    return tuple(torch._add_batch_dim(each, 0, _level()) for each in tensors)


def _level() -> int:
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


_RANDOMNESS = {
    functorch.RandomnessType.Error: "error",
    functorch.RandomnessType.Same: "same",
    functorch.RandomnessType.Different: "different",
}


def draws_for_each() -> bool:
    """Whether a running `vmap` draws different random numbers for each row of its batch."""
    running = (each for each in functorch.get_interpreter_stack() or () if each.key() == functorch.TransformType.Vmap)
    return any(_RANDOMNESS[functorch.CVmapInterpreterPtr(each).randomness()] == "different" for each in running)


def call_batched(function: Any, call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Apply a Function's batching rule at the innermost level, as `Function.apply` does there.

    Args:
        function: The Function; none of its outputs is an input.
        call: Applies the Function below that level.
        inputs: The Function's arguments; tensors among them may be batched.

    Returns:
        The outputs, batched.
    """
    top = functorch.peek_interpreter_stack()  # `interpreter` points into it
    interpreter = functorch.CVmapInterpreterPtr(top)
    level = interpreter.level()
    pairs = [
        functorch._unwrap_batched(unwrap_if_ended(x), level) if isinstance(x, Tensor) else (x, None) for x in inputs
    ]
    in_dims = tuple(dim for _, dim in pairs)
    info = VmapInfo(batch_size=interpreter.batchSize(), randomness=_RANDOMNESS[interpreter.randomness()])
    popped = functorch.pop_dynamic_layer_stack()
    try:
        if all(dim is None for dim in in_dims):
            return call(*inputs)
        outputs, out_dims = function.vmap(info, in_dims, *(x for x, _ in pairs))
    finally:
        functorch.push_dynamic_layer_stack(popped)
    if not isinstance(outputs, tuple):
        return outputs if out_dims is None else functorch._add_batch_dim(outputs, out_dims, level)
    return tuple(
        output if dim is None or output is None else functorch._add_batch_dim(output, dim, level)
        for output, dim in zip(outputs, out_dims, strict=True)
    )
