"""Direct calls of a Function's batching rule under `torch.func.vmap`.

Torch itself binds the signature and flattens all arguments as pytrees, which takes longer than a small batch.

The batched tensors of `torch.autograd.grad(is_grads_batched=True)`, which differ from those of `torch.func.vmap`.

A Function gets them in `forward` itself, where few operators support them and some give wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.autograd_function import VmapInfo

from hodiff.torch_internals.autograd.wrapped_tensors import unwrap_if_ended

is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def any_legacy_batched(inputs: Iterable[Any]) -> bool:
    """Whether a tensor among some values is batched by `is_grads_batched=True`."""
    for each in inputs:  # noqa: SIM110 - any() of a generator takes a call for each input, in every Function
        if isinstance(each, Tensor) and is_legacy_batched(each):
            return True
    return False


def call_below_legacy_batch(call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a function of values of which some are batched by `is_grads_batched=True`, as under `torch.func.vmap`.

    Args:
        call: Takes the values. An output that a Function returns for batched inputs loses its graph with the batch.
        inputs: Tensors and other values.

    Returns:
        The result, a tensor or a tuple of tensors and None; its tensors are batched.
    """
    level = _level()
    dims = tuple(0 if any_legacy_batched((each,)) else None for each in inputs)
    plain = [
        each if d is None else torch._remove_batch_dim(each, level, 1, 0) for each, d in zip(inputs, dims, strict=True)
    ]
    result: Any = None

    def tensors(*values: Any) -> tuple[Tensor, ...]:
        nonlocal result
        result = call(*values)
        return (result,) if isinstance(result, Tensor) else tuple(each for each in result if each is not None)

    with random_operators_allowed():
        found = torch.func.vmap(tensors, in_dims=dims, randomness="same")(*plain)
    # A tangent with the batch elsewhere in memory cannot take the layout of its primal.
    batched = (torch._add_batch_dim(each.contiguous(), 0, level) for each in found)
    if isinstance(result, Tensor):
        return next(batched)
    return tuple(each if each is None else next(batched) for each in result)


@contextmanager
def random_operators_allowed() -> Iterator[None]:
    """Let random operators run on tensors without the batch, which torch refuses where anything is batched."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded("VmapMode")
    torch._C._dispatch_tls_set_dispatch_key_excluded("VmapMode", True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded("VmapMode", before)


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
