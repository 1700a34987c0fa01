"""Jets in the place of a module's parameters, as `torch.func.functional_call` puts tensors there."""

from __future__ import annotations

from typing import Any

from torch import nn

from hodiff.taylor.jets import Jet
from hodiff.torch_internals.autograd import func_calls
from hodiff.torch_internals.modules import tables_of


def swap_member(module: nn.Module, name: str, tensor: Any, allow_missing: bool = False) -> Any:
    """Put a tensor or a jet into a module, and return what was there."""
    if isinstance(tensor, Jet):
        # torch refuses what is no tensor; its tables take it.
        for table in tables_of(module):
            if name in table:
                held, table[name] = table[name], tensor
                return held
    return func_calls.swap_member(module, name, tensor, allow_missing)
