"""Torch's database of operators with samples for each, made for its own tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def operator_database(wrapper: Callable[..., Any]) -> list[Any]:
    """The entries, which are `OpInfo` objects.

    Args:
        wrapper: What to put in place of the database's own wrapper that sets a seed: it calls the operator.

    Returns:
        The entries; the import raises whatever its many imports raise.
    """
    from torch.testing._internal import common_methods_invocations as definitions

    definitions.wrapper_set_seed = wrapper
    return list(definitions.op_db)
