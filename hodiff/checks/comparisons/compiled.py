"""Comparison of `torch.compile` with eager code, for values, gradients and products."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.judgement import exact, judge
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import draw_normal
from hodiff.checks.oracles.compositions import derivative, route_names
from hodiff.checks.report.data import Entry
from hodiff.torch_internals.compilers.dynamo import compiled_code


def compile_checks(
    problem: ScalarProblem, order: int, size: float, backend: str, generator: torch.Generator
) -> Iterator[Entry]:
    """Compile the value and each first and second derivative; ``size`` is as in `vmap_checks`."""
    direction = draw_normal((len(problem.point),), generator).to(problem.point)
    cases = [(0, "value", problem.loss)]
    for k in range(1, min(order, 2) + 1):
        # Nested forward passes never compile, so a failure would be no finding about f.
        routes = [r for r in route_names(k) if r.count("forward") < 2]
        cases += [(k, r, _fixed(derivative(problem.loss, r), (direction,) * (k - 1))) for r in routes]
    for k, quantity, function in cases:
        torch.compiler.reset()
        compiled = torch.compile(function, backend=backend)
        with compiled_code(runs=True):
            outcome = attempt(compiled, problem.point)
        expected = attempt(function, problem.point)
        if isinstance(expected, Failure):
            yield Entry("compile", k, quantity, None, None, "skipped", expected.message)
            continue
        reference = exact(expected)
        yield judge("compile", k, quantity, outcome, reference, lower=size, eps=problem.eps)


def _fixed(function: Callable[..., Any], directions: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda t: function(t, *directions)
