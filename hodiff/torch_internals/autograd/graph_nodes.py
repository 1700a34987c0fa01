"""What the nodes of an autograd graph know about themselves."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

# Shape and dtype of each result that the node pulls back from.
results_of: Callable[[Any], tuple[Any, ...]] = attrgetter("_input_metadata")
# The frames in which a `torch.autograd.Function` is called, whose local `cls` it is; in 2.15 `apply` is C++.
CALLS_OF_FUNCTIONS = {"apply", "_call_custom_function_call"}


def function_of(node: Any) -> Any:
    """The class of the `torch.autograd.Function` that made a node; None for an operator's."""
    return getattr(node, "_forward_cls", None)


def function_name(node: Any) -> str:
    """The name of the `torch.autograd.Function` that made a node, under transforms, too."""
    name: str = node.name().removesuffix("Backward").removesuffix("Generated")
    return name


def is_of_higher_order_operator(function: type) -> bool:
    """Whether a Function is torch's for an operator that takes functions, such as `torch.cond`."""
    return function.__module__.startswith("torch._higher_order_ops")


def raises_when_run(node: Any) -> bool:
    """Whether a node stands for a derivative that torch does not have."""
    return node.name() in {"torch::autograd::Error", "torch::autograd::NotImplemented"}


def saved_by_operator(node: Any) -> list[tuple[str, Any]]:
    """What an operator's node keeps for backward, by name."""
    return [(name.removeprefix("_saved_"), getattr(node, name)) for name in dir(node) if name.startswith("_saved_")]


def saved_index(value: int) -> int:
    """An index that an operator's node keeps: torch shows negative ones as unsigned."""
    return value - 2**64 if value >= 2**63 else value
