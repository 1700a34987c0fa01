"""Comparison of the routes of surrogate derivatives, and measurement of their gap to differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.judgement import exact, judge
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import draw_normal
from hodiff.checks.oracles.compositions import along_directions, route_names
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.report.data import Entry
from hodiff.functions.gradients.straight_through import StraightThrough
from hodiff.graphs import nodes_of
from hodiff.torch_internals.autograd.graph_nodes import function_of

# Statuses of comparisons with differences, which become gaps.
_NUMERIC = {"zero", "wrong", "non-finite", "non-smooth"}
_TRIES = 2


def declares_surrogate(f: Any, function: Callable[..., tuple[Tensor, ...]], leaves: tuple[Tensor, ...]) -> bool:
    """Whether f has `approximate = True`, or its graph contains `hodiff.straight_through`."""
    if getattr(f, "approximate", False) is True and not hasattr(f, "derivative_error"):
        return True
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        outputs = attempt(function, *tracked)
    if isinstance(outputs, Failure):
        return False
    nodes = (node for y in outputs for node in nodes_of(y))
    return any(function_of(node) is StraightThrough for node in nodes)


def between_claims(problem: ScalarProblem, order: int, generator: torch.Generator) -> Iterator[Entry]:
    """Compare the routes of each order with the first route that runs."""
    lower = float(problem.loss(problem.point).detach().abs())
    for k in range(1, order + 1):
        tuples = draw_normal((_TRIES, k, len(problem.point)), generator).to(problem.point)
        outcomes = {route: attempt(_evaluate, problem, route, tuples) for route in route_names(k)}
        works = [y for y in outcomes.values() if isinstance(y, Tensor)]
        for route, outcome in outcomes.items():
            if not works:
                yield Entry(route, k, "vs routes", None, None, "raises", outcome.message)
                continue
            yield judge(route, k, "vs routes", outcome, exact(works[0]), lower=lower, eps=problem.eps)
        lower = max([lower, *(float(y.abs().max()) for y in works[:1])])


def _evaluate(problem: ScalarProblem, route: str, tuples: Tensor) -> Tensor:
    function = along_directions(problem.loss, route)
    return torch.stack([function(problem.point, *directions) for directions in tuples]).detach()


def unjudged(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Turn failed comparisons with differences into gaps."""
    for entry in entries:
        numeric = entry.quantity == "vs differences" and entry.status in _NUMERIC
        yield replace(entry, status="gap") if numeric else entry


def gap(entries: Iterable[Entry]) -> Cause:
    """Return the gap between claimed derivatives and differences as a note."""
    worst: dict[int, float] = {}
    for entry in entries:
        if entry.quantity == "vs differences" and entry.status == "gap" and entry.error is not None:
            worst[entry.order] = max(worst.get(entry.order, 0.0), entry.error)
    if not worst:
        return Cause("HD902", ("the declared derivatives agree with differences",), no_entry)
    texts = "; ".join(f"order {order}: {size:.1e} of the scale" for order, size in sorted(worst.items()))
    return Cause("HD902", (f"the gap between declared and numerical derivatives is, at {texts}",), no_entry)


def stated_errors(f: Any, args: tuple[Any, ...], order: int) -> Iterator[str]:
    """Yield notes with the stated error of derivatives by differences, as `numpy_function` provides."""
    if not getattr(f, "approximate", False) or not hasattr(f, "derivative_error"):
        return
    for k in range(1, order + 1):
        error = attempt(partial(f.derivative_error, order=k), *args)
        if not isinstance(error, Failure) and error > 0:
            yield f"derivatives of order {k} come from differences, with an estimated absolute error of {error:.1e}"
