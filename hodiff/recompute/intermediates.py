"""Intermediate results that the graph of reverse mode does not store, but recomputes when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.grad_mode import in_jit_trace, saved_tensor_hooks
from hodiff.torch_internals.tensors import version_of


def can_forget() -> bool:
    """Whether only plain reverse mode records here, as `forget_between` requires."""
    return torch.is_grad_enabled() and only_reverse_mode() and not in_jit_trace()


def forget_between(
    inner: Callable[..., Tensor], inputs: Sequence[Tensor | None], outer: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute `outer(inner(*inputs))`, storing the inputs for backward instead of the intermediate result."""
    # The result of `inner` remains in the graph, so that derivatives of all orders pass through its node; only its
    # values are dropped. A recorded backward pass recomputes the values once and keeps them.
    recipe = _Recipe(inner, inputs)
    between = inner(*inputs)
    place = between.data_ptr()

    def pack(saved: Tensor) -> Any:
        return recipe if saved.data_ptr() == place and saved.shape == between_shape else saved

    between_shape = between.shape
    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return outer(between)


def _unpack(packed: Any) -> Tensor:
    return packed.value() if isinstance(packed, _Recipe) else packed


class _Recipe:
    """A recipe to recompute a tensor, which raises if the inputs have changed."""

    def __init__(self, compute: Callable[..., Tensor], inputs: Sequence[Tensor | None]):
        self._compute = compute
        self._inputs = [None if each is None else _Input(each) for each in inputs]
        self._kept: Tensor | None = None

    def value(self) -> Tensor:
        """Return the tensor, and keep it if a further backward pass may follow."""
        if self._kept is not None:
            return self._kept
        inputs = [None if each is None else each.tensor() for each in self._inputs]
        device = next(each.device.type for each in inputs if each is not None)
        with torch.no_grad(), torch.autocast(device, enabled=False):
            found = self._compute(*inputs)
        if torch.is_grad_enabled():
            self._kept = found
        return found


class _Input:
    """A tensor stored for backward through the saved-tensor hooks that were active."""

    def __init__(self, tensor: Tensor):
        # Tensors made in inference mode have no version, and torch does not save them either.
        self._version = None if tensor.is_inference() else version_of(tensor)
        hooks = saved_tensor_hooks()
        self._unpack: Callable[[Any], Tensor]
        pack, self._unpack = (_itself, _itself) if hooks is None else hooks
        self._packed: Any = pack(tensor.detach())
        self._plain = hooks is None

    def tensor(self) -> Tensor:
        # Check only tensors that are kept without hooks, because a hook may pack a tensor with another version.
        if self._plain and self._version is not None and version_of(self._packed) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                "input of a layer that recomputes its pre-activation; .clone() it before the layer, or change it "
                "after backward."
            )
        return self._unpack(self._packed)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
