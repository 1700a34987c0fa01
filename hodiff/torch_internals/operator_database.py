"""Torch's database of operators with samples for each, made for its own tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def operator_database(wrapper: Callable[..., Any]) -> list[Any]:
    """The `OpInfo` entries, with `wrapper` in place of the one by which the database sets a seed around each call."""
    from torch.testing._internal import common_methods_invocations as definitions

    definitions.wrapper_set_seed = wrapper
    return list(definitions.op_db)
