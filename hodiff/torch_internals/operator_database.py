"""Torch's database of operators with sample inputs, made for its own tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def operator_database(wrapper: Callable[..., Any], seed_all: Callable[[int], None]) -> list[Any]:
    """Return the `OpInfo` entries, after replacing the functions that seed around calls and samples."""
    from torch.testing._internal import common_methods_invocations as definitions
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    definitions.wrapper_set_seed = wrapper
    common_utils.set_rng_seed = lambda seed=common_utils.SEED: seed_all(seed)
    # Sample functions would search the source of all running code for the unittest that called them.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return list(definitions.op_db)


def parameter_names(op: Any) -> tuple[str, ...]:
    """Return an operator's argument names, in order: from its signature or, for a builtin, its first overload."""
    try:
        return tuple(inspect.signature(op.op).parameters)
    except (TypeError, ValueError):
        packet = getattr(torch.ops.aten, op.aten_name or op.name, None)
    overloads = packet.overloads() if packet is not None else []
    if not overloads:
        return ()
    schema = getattr(packet, overloads[0])._schema
    return tuple("input" if each.name == "self" else each.name for each in schema.arguments)
