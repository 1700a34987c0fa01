"""Jets as parameters of a module, as `torch.func.functional_call` substitutes tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from hodiff.taylor.jets import Jet
from hodiff.torch_internals.autograd import func_calls
from hodiff.torch_internals.modules import tables_of


def swap_member(module: nn.Module, name: str, tensor: Any, allow_missing: bool = False) -> Any:
    """Put a tensor or a jet into a module, and return the previous member."""
    if isinstance(tensor, Jet):
        # torch refuses objects that are not tensors, but the module's tables accept them.
        for table in tables_of(module):
            if name in table:
                held, table[name] = table[name], tensor
                return held
    return func_calls.swap_member(module, name, tensor, allow_missing)
