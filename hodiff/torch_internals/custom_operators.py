"""Operators that a library has defined."""

from __future__ import annotations

from typing import Any

import torch

# torch's own have forward rules, or say that they have none; hodiff's are called inside of Functions.
_TRUSTED = {"aten", "prim", "prims", "hodiff"}


def loses_tangents(function: Any) -> bool:
    """Whether a function is an operator that torch's forward mode takes for a constant without a word."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = getattr(function, function.overloads()[0])
    if not isinstance(function, torch._ops.OpOverload):
        return False
    # One that is made of others is differentiated as they are.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return function.namespace not in _TRUSTED and not composite
