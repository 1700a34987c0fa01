"""Table of rules by the names of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hodiff.sparse.detection.call import Call
from hodiff.sparse.detection.supports import Supports

# A rule returns the supports of each output in order; None for an output without a derivative.
Rule = Callable[[Call], Sequence[Supports | None]]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule under the names of operators of `torch.ops.aten`, for all of their overloads."""

    def enter(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return enter
