"""Verdicts on the routes of a torch function, from the audit and the table of corrections.

Defects of the custom Functions in a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hodiff.checks.torch_verdicts import audit_on_file
from hodiff.corrections import Corrections, Declined
from hodiff.corrections.mechanism.registry import Correction
from hodiff.graphs import is_once_differentiable, nodes_of
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.graph_nodes import function_of, operator_of
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.custom_operators import (
    has_autograd_kernel,
    has_formula,
    is_defined_in_python,
    operator_in,
)
from hodiff.torch_internals.interception import without_function_modes
from hodiff.torch_internals.operators import function_of_operator
from hodiff.torch_operators.table import ALIASES

# Names of functions in the database that differ from their common names.
_NAMES = {alias: name for name, aliases in ALIASES.items() for alias in aliases} | {
    "__rtruediv__": "__rdiv__",
    "__floordiv__": "div.floor_rounding",
    "adjoint": "mH",
    "copy_": "clone",
    "cpu": "to",
    "cuda": "to",
    "fix": "trunc",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "type": "to",
    "type_as": "to",
}
# Prefixes of names in the database; functions and methods of one operator share an entry.
_PREFIXES = ("", "nn.functional.", "linalg.", "special.", "fft.")

# Random functions, which audits cannot repeat with equal numbers; torch has their gradient only.
_FIRST_ORDER_ALONE = {"_standard_gamma"}

# Verdicts from good to bad; a route is as good as its worst operator.
RANKS = ("right", "corrected", "random", "not smooth", "not audited", "non-finite", "timed out", "raises", "wrong")
GOOD = frozenset({"right", "corrected"})
BAD = frozenset({"non-finite", "raises", "wrong"})
# Verdicts of functions that every route differentiates correctly, and of functions without a recorded derivative.
RIGHT = dict.fromkeys(ROUTES, "right")
UNKNOWN = dict.fromkeys(ROUTES, "raises"), "torch has no derivative of it; detach its argument, or remove it"

# Name, position and default of the argument that decides whether statistics are computed from the batch.
_STATISTICS = {F.batch_norm: ("training", 5, False), F.instance_norm: ("use_input_stats", 5, True)}


def torch_is_right(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether torch alone is right at this call, though it is wrong or raises at other calls."""
    if func in _STATISTICS:
        name, position, default = _STATISTICS[func]
        given = args[position] if len(args) > position else kwargs.get(name, default)
        return not given and not any(isinstance(each, Tensor) and each.requires_grad for each in args[1:3])
    if func is F.scaled_dot_product_attention:
        # The graph shows which kernel torch used; only the kernel composed of other operators has all derivatives.
        with without_function_modes(Corrections):
            node = func(*args, **kwargs).grad_fn
        return node is not None and "ScaledDotProduct" not in node.name()
    return False


def judge(
    func: Any, name: str, correction: Correction | None, why: Declined | None, correct: bool, mixed: bool = False
) -> tuple[dict[str, str], str]:
    """Return verdicts on the routes of a torch function, whose rule may have declined the call, and the remedy."""
    if why is not None or (correction is not None and correction.kind == "slow"):
        correction = None  # it did not run
    if correction is None and operator_in(func) is not None:
        return _of_library(operator_in(func), correct)
    # The audit with corrections also covers rules that declined because torch is right.
    mended = correct and (correction is not None or (why is not None and why.torch_is_right))
    known = _audited(function_of_operator(func) or name, "corrected" if mended else "torch")
    # Without an audit, a rule is trusted: it lists the routes that torch gets wrong, and the calls it gets right.
    told = correction is not None or mended
    unknown = dict.fromkeys(ROUTES, "right" if told else "not audited")
    if name in _FIRST_ORDER_ALONE:
        return dict.fromkeys(ROUTES, "raises"), "torch has only its gradient; use another sampler, or detach the sample"
    if func is torch.autograd.grad:
        return _of_inner_gradients(correct)
    if correction is not None and not correct:  # the table of corrections knows more functions than the audit
        unknown |= dict.fromkeys(correction.routes, "wrong" if correction.kind == "wrong" else "raises")
    routes = {route: known.get(route, unknown[route]) for route in ROUTES}
    if correct and correction is not None:
        routes = {
            route: "corrected" if route in correction.routes and word not in BAD else word
            for route, word in routes.items()
        }
    if mixed and correction is not None and not correct:  # a real tensor and a complex number, which no audit tries
        routes |= dict.fromkeys(ROUTES[1:], "wrong")
    bad = [route for route, word in routes.items() if word in BAD]
    if not bad:
        return routes, ""
    good = [route for route in ROUTES if route not in bad]
    if not correct and correction is not None:
        return routes, "use hodiff's transforms, or take derivatives inside hodiff.corrected()"
    return routes, f"take the route {good[0]}" if good else "write it in other operators"


def _of_library(operator: Any, correct: bool) -> tuple[dict[str, str], str]:
    """Verdicts on an operator of `torch.library`, whose formula torch uses in plain reverse mode only."""
    missing = dict.fromkeys(ROUTES, "raises")
    if has_formula(operator):
        if correct:
            return dict.fromkeys(ROUTES, "corrected"), ""
        silent = missing | {ROUTES[0]: "not audited"} | dict.fromkeys(ROUTES[2:], "wrong")
        return silent, "torch supports it only in plain reverse mode; use hodiff's transforms"
    remedy = "give it a formula by torch.library.custom_op and register_autograd"
    if has_autograd_kernel(operator) and not is_defined_in_python(operator):
        return missing | {ROUTES[0]: "not audited"}, remedy
    return missing, remedy


def _of_inner_gradients(correct: bool) -> tuple[dict[str, str], str]:
    """Verdicts on a gradient that the function computes itself, which is right to third order."""
    if correct or in_transform():
        return dict.fromkeys(ROUTES, "right"), ""
    missing = dict.fromkeys(ROUTES, "raises") | {ROUTES[0]: "right"}
    return missing, "use hodiff's transforms, or take that gradient by torch.func.grad"


def _audited(name: str, which: str) -> dict[str, str]:
    """Return the audit's verdict on an operator by route, the worst of its variants."""
    operators = audit_on_file().operators
    plain = name.removeprefix("torch.").removeprefix("Tensor.")
    if plain not in operators:
        plain = _NAMES.get(plain) or _NAMES.get(plain.removesuffix("_"), plain)
    last = plain.rsplit(".", 1)[-1]
    for base in (last, last.removesuffix("_")):
        for key in (plain if base == last else base, *(prefix + base for prefix in _PREFIXES)):
            found = [entry for op, entry in operators.items() if op == key] or [
                entry for op, entry in operators.items() if op.startswith(key + ".")
            ]
            if found:
                return {
                    route: max((_word(each[which][route].status) for each in found), key=RANKS.index)
                    for route in ROUTES
                }
    return {}


def _word(status: str) -> str:
    return status if status in RANKS else "not audited"


@dataclass(frozen=True)
class FunctionDefect:
    """Defect of a custom Function that can be seen from outside.

    Attributes:
        name: Its class.
        defect: The missing or wrong part.
        remedy: What to change.
        wrong: Routes that are silently wrong because of it.
        missing: Routes that raise because of it.
    """

    name: str
    defect: str
    remedy: str
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def custom_functions(outputs: Iterable[Any]) -> Iterator[type[Function]]:
    """Yield the custom Functions that computed some tensors; hodiff's own Functions are skipped."""
    for output in outputs:
        for node in nodes_of(output) if isinstance(output, Tensor) else ():
            function = function_of(node)
            if function is not None and not function.__module__.startswith("hodiff."):
                yield function


def function_defects(function: type[Function]) -> Iterator[FunctionDefect]:
    """Yield the defects of a Function that can be seen without running its rules."""
    name = function.__name__
    if function.__module__ == "torch.utils.checkpoint":
        yield FunctionDefect(
            name,
            "torch.utils.checkpoint with use_reentrant=True takes no torch.autograd.grad, and torch.func refuses it",
            "call it with use_reentrant=False, or take hodiff's transforms, which replace it",
            missing=ROUTES,
        )
        return
    if is_once_differentiable(function):
        yield FunctionDefect(
            name,
            "backward is marked once_differentiable, and is a constant to a second derivative",
            "write it with torch operators or other Functions, and remove the mark",
            wrong=ROUTES[:2],
        )
    if operator_of(function):
        return  # operators are judged by `operator_routes`
    if function.setup_context is Function.setup_context:
        yield FunctionDefect(
            name,
            "forward takes ctx, which torch.func refuses",
            "split it into forward and setup_context",
            missing=ROUTES[1:],
        )
    if function.jvp is Function.jvp:
        yield FunctionDefect(
            name,
            "it has no jvp, so that forward mode raises",
            "add one, of saved inputs and torch operators",
            missing=ROUTES[1:],
        )
    if function.vmap is Function.vmap and not function.generate_vmap_rule:
        yield FunctionDefect(
            name,
            "it has no batching rule, so that dense derivatives take one direction at a time, or raise",
            "set generate_vmap_rule = True if all its rules are torch operators, else write vmap",
        )
