"""`check_function`: compares all derivatives of a function at one point, and diagnoses disagreements."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.comparisons.scalar_requirements import UnrepeatableError
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.functions.by_reference import check_by_reference
from hodiff.checks.functions.by_routes import check_by_routes
from hodiff.checks.functions.conclusion import unrepeatable
from hodiff.checks.functions.switches import Switches
from hodiff.checks.progress import told
from hodiff.checks.report.report import Report
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.common.randomness import seeded
from hodiff.common.trees import tensors_in


def check_function(
    f: Any,
    args: tuple[Any, ...],
    switches: Switches,
    *,
    approximate: bool = False,
    reference: Callable[..., Any] | None = None,
    ulps: float | None = None,
) -> Report:
    """Check a function or a Function class, whose arguments `hodiff.check` has validated."""
    function = _applied(f) if isinstance(f, type) and issubclass(f, torch.autograd.Function) else f
    generator = torch.Generator().manual_seed(switches.seed)
    name = getattr(f, "__name__", type(f).__name__)
    with silence_torch_warnings(), seeded(switches.seed, tensors_in(args)), told(f"check of {name}"):
        try:
            with switches.mode:
                problem = scalarize(function, args, generator, switches.method)
        except UnrepeatableError as error:
            return unrepeatable(f, str(error))
        if reference is None:
            return check_by_routes(f, args, problem, switches, approximate=approximate, generator=generator)
        with switches.mode:
            return check_by_reference(f, args, problem, switches, reference=reference, ulps=ulps, generator=generator)


def _applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's apply; if it changes inputs in place, with cloned inputs, as torch refuses leaves."""
    if "mark_dirty" not in _names_in(function.setup_context, function.forward):
        return function.apply

    @wraps(function.apply)
    def applied(*args: Any) -> Any:
        return function.apply(*(each.clone() if isinstance(each, Tensor) else each for each in args))

    return applied


def _names_in(*rules: Callable[..., Any]) -> set[str]:
    """Return the names and attributes that rules use."""
    codes = (getattr(inspect.unwrap(rule), "__code__", None) for rule in rules)
    return {name for code in codes if code is not None for name in code.co_names}
