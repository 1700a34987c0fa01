"""Report of the functions in a program that have no rule for series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hodiff.common.options import require_callable
from hodiff.common.trees import unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.taylor.jets import new_jet
from hodiff.taylor.passes import framed, primal_leaves, through
from hodiff.torch_internals.function_names import function_name


@dataclass(frozen=True)
class Explanation:
    """Report on how the functions of a program are differentiated in Taylor mode.

    Attributes:
        nested: Functions without a rule, which fall back to nested forward mode: number of calls by name.
    """

    nested: dict[str, int]

    def __str__(self) -> str:
        if not self.nested:
            return "every function has a rule: a jet of order K takes K² at most"
        calls = ", ".join(f"{name} ({count})" for name, count in self.nested.items())
        return f"without a rule, by nested forward mode, which takes 2^K: {calls}; see hodiff.taylor.register"


@leave_inference_mode
def explain(f: Callable[..., Any], *primals: Any) -> Explanation:
    """Report which functions called by `f` have no rule for series and fall back to nested forward mode.

    Args:
        f: Function `f(*primals)`.
        *primals: As in `hodiff.taylor.jet`.

    Returns:
        The explanation, which prints as a sentence.

    Raises:
        InputError: If a primal cannot be differentiated.

    Example:
        >>> import torch, hodiff
        >>> print(hodiff.taylor.explain(torch.special.i1, torch.ones(3)))
        without a rule, by nested forward mode, which takes 2^K: special.i1 (1); see hodiff.taylor.register
    """
    require_callable("explain", f=f)
    seen: Counter[str] = Counter()
    with framed(1, observer=lambda function: seen.update([function_name(function)])) as frame:
        curves = []
        for i, primal in enumerate(primals):
            leaves, spec = primal_leaves(primal, "explain", f"primals[{i}]")
            curves.append(unflatten([new_jet(frame, [leaf, leaf]) for leaf in leaves], spec))
        through(frame, f, curves)
    return Explanation(dict(seen))
