"""Direct calls of a Function's batching rule under `torch.func.vmap`.

Torch itself binds the signature and flattens all arguments as pytrees, which takes longer than a small batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.autograd_function import VmapInfo

from hodiff.torch_internals.autograd.wrapped_tensors import unwrap_all_ended

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
    inputs = unwrap_all_ended(tuple(inputs))
    pairs = [functorch._unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None) for x in inputs]
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
