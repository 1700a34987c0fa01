"""Stand-ins for sharded parameters in modules, which are gathered when a function of torch uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.distributed.layouts import Layout
from hodiff.distributed.linear_maps import as_dtensor, gather
from hodiff.distributed.regathering import saved_by_shard
from hodiff.errors import InputError
from hodiff.torch_internals.tensors import without_memory

# Reads of a tensor that need no numbers.
_FORM = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_sparse", "is_meta", "is_nested"}
_FORM |= {"size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__"}


class ShardedParameter(Tensor):
    """Stand-in for a sharded parameter: its form is known, and any torch function receives the gathered tensor."""

    shard: Tensor
    layout_on_mesh: Layout

    @staticmethod
    def __new__(cls: type[ShardedParameter], shard: Tensor, layout: Layout) -> ShardedParameter:
        """Create the stand-in; nothing is gathered yet."""
        made = without_memory(cls, shard, layout.shape)
        made.shard, made.layout_on_mesh = shard, layout
        return made

    def full_tensor(self) -> Tensor:
        """Gather the parameter, as `DTensor.full_tensor` does."""
        return self.full_tensor_in(None)

    def full_tensor_in(self, dtype: torch.dtype | None) -> Tensor:
        """Gather the parameter, and convert it to the dtype of a mixed precision policy."""
        whole = gather(self.shard, self.layout_on_mesh)
        if dtype is not None:
            whole = whole.to(dtype)
        saved_by_shard(whole, self.shard, self.layout_on_mesh)
        rest = self.layout_on_mesh.rest
        return whole if rest is None else as_dtensor(whole, rest)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with the gathered tensors."""
        name = getattr(func, "__name__", "")
        if (getattr(func.__self__, "__name__", "") if name == "__get__" else name) in _FORM:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = gathered((args, kwargs or {}))
        return func(*args, **kwargs)

    # Torch's stub gives this method other defaults than torch's calls need.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise, because no function may see a stand-in as a tensor."""
        raise InputError(
            f"f: expected functions of torch on the parameters of a fully sharded module, got {func} on a part that is "
            "not gathered; call full_tensor() of the parameter first."
        )


def stand_in(tensor: Tensor, layout: Layout | None) -> Tensor:
    """Return the stand-in of a shard; a tensor without layout is its own."""
    return tensor if layout is None else ShardedParameter(tensor, layout)


def shard_of(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """Return the shard and the layout of a stand-in; another tensor has no layout."""
    return (tensor.shard, tensor.layout_on_mesh) if type(tensor) is ShardedParameter else (tensor, None)


def gathered(tree: Any) -> Any:
    """Return a pytree with gathered tensors in place of stand-ins."""
    return pytree.tree_map_only(ShardedParameter, ShardedParameter.full_tensor, tree)
