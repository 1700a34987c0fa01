"""Methods of `hodiff.optim` on the standard problems of the tests: their evaluations, and where they end."""

from __future__ import annotations

import importlib
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import table
from hodiff.optimize import least_squares, minimize

_TESTS = Path(__file__).resolve().parents[2] / "tests"
# Methods for scalable problems, by the number of unknowns.
SIZES: dict[int, tuple[str, ...]] = {
    100: (
        "trust-ncg",
        "trust-krylov",
        "newton-cg",
        "l-bfgs-b",
        "cg",
        "trust-exact",
        "newton-krylov",
        "ssbroyden",
        "ssbfgs",
    ),
    10_000: ("trust-ncg", "newton-cg", "l-bfgs-b", "newton-krylov"),
}
EXPLANATION = """\
A cell is iterations / values / gradients / products with the Hessian (of `trust-exact` and `dogleg`, Hessians; of
`least_squares`, values / Jacobians). `newton-krylov`, `ssbfgs`, `ssbroyden` and `lm-geodesic` are hodiff's own. Behind
it, where the end is not a published minimum, stands the value there. Tolerances are as fine as float64 lets the methods
go (`tests/optimize/problems/settings.py`), so that last steps without gain count, too."""
CERTIFIED = """\
A cell is the residual evaluations from the start, and the digits in which the worst parameter agrees with the certified
ones, which have 11. Behind the far start, 1, stands the near one, 2."""


@dataclass(frozen=True)
class Run:
    """Run of one method on one problem.

    Attributes:
        problem: Name of the problem.
        method: Method of `minimize` or `least_squares`.
        counts: Numbers of iterations, values, gradients, and products or Hessians, as far as the method has them.
        value: Final value.
        minimum: Nearest published minimum.
        reached: Whether the final value is that minimum.
    """

    problem: str
    method: str
    counts: tuple[int, ...]
    value: float
    minimum: float
    reached: bool

    def cell(self, *, always: bool = False) -> str:
        """Format the counts, and the value if it is not the minimum or if `always`."""
        end = f" → {self.value:.4g}" if always or not self.reached else ""
        return "/".join(map(str, self.counts)) + end


def problems_module(name: str) -> Any:
    """Import a module of the test problems."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    return importlib.import_module(f"optimize.problems.{name}")


def methods() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the options of all methods of `least_squares` and of `minimize`, SciPy's first."""
    settings = problems_module("settings")
    squares = {**settings.LEAST_SQUARES, **settings.OWN_LEAST_SQUARES}
    return squares, {**settings.MINIMIZE, **settings.OWN_MINIMIZE}


def more_garbow_hillstrom(quick: bool) -> Iterator[Run]:
    """Run all methods on the problems of 1981; quick runs the first few."""
    squares, minima = methods()
    problems = list(problems_module("more_garbow_hillstrom").PROBLEMS.values())
    for problem in problems[:2] if quick else problems:
        for method, options in {**squares, **minima}.items():
            if method in squares:
                found = least_squares(problem.residuals, problem.start, method=method, **options)
                value = 2 * found.cost
            else:
                found = minimize(problem.value, problem.start, method=method, options=options)
                value = found.fun
            _, nearest = min((abs(each - value), each) for each in problem.minima)
            yield Run(problem.name, method, _counts(found), value, nearest, problem.is_solved_by(value))


def _counts(found: Any) -> tuple[int, ...]:
    if "cost" in found:
        return (found.nfev, found.njev)
    return (found.nit, found.nfev, found.njev, found.nhvp or found.nhev)


def scalable(n: int, quick: bool) -> Iterator[Run]:
    """Run the methods for many unknowns on the problems with known minima; quick runs the first few."""
    _, options = methods()
    known = [
        each
        for each in problems_module("scalable").PROBLEMS.values()
        if n <= each.largest and each.minimum(n) is not None
    ]
    for problem in known[:2] if quick else known:
        for method in SIZES[n]:
            found = minimize(problem.value, problem.start(problem.size(n)), method=method, options=options[method])
            solved = problem.is_solved_by(found.fun, n)
            yield Run(problem.name, method, _counts(found), found.fun, problem.minimum(n), solved)


def certified(quick: bool) -> dict[str, dict[str, list[str]]]:
    """Fit NIST's regressions from both starts, or a few: return values and digits by set and method."""
    squares, _ = methods()
    sets = list(problems_module("nist_strd").REGRESSIONS.values())

    def fits(each: Any, method: str) -> list[str]:
        options = squares[method]
        found = [least_squares(each.residuals, start, method=method, **options) for start in each.starts]
        return [f"{end.nfev}: {each.digits(end.x):.1f}" for end in found]

    return {each.name: {method: fits(each, method) for method in squares} for each in (sets[1:3] if quick else sets)}


def _summary(runs: Sequence[Run]) -> str:
    rows = []
    for method in dict.fromkeys(run.method for run in runs):
        mine = [run for run in runs if run.method == method]
        solved = [run for run in mine if run.reached]
        medians = [f"{statistics.median(column):g}" for column in zip(*(run.counts for run in solved), strict=True)]
        # Least squares reports no iterations and computes no products.
        columns = ["", *medians, ""] if len(medians) == 2 else medians or [""] * 4
        rows.append([method, f"{len(solved)} of {len(mine)}", *columns])
    return table(["", "at a published minimum", "iterations", "values", "gradients", "products, Hessians"], rows)


def _grid(runs: Sequence[Run]) -> str:
    methods = list(dict.fromkeys(run.method for run in runs))
    cells = {(run.problem, run.method): run.cell() for run in runs}
    minima = {run.problem: f"{run.minimum:.6g}" for run in reversed(runs)}
    names = dict.fromkeys(run.problem for run in runs)
    return table(
        ["", "minimum", *methods],
        [[name, minima[name], *(cells[name, method] for method in methods)] for name in names],
    )


def _certified_grid(fits: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    methods = next(iter(fits.values()))
    return table(["", *methods], [[name, *map(", ".join, by_method.values())] for name, by_method in fits.items()])


def _by_problem(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for run in runs:
        found.setdefault(run.problem, {})[run.method] = run.cell(always=True)
    return found


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield heading, text and data of every part of the page."""
    with warnings.catch_warnings():
        # Methods warn when they give up; the tables show that already.
        warnings.simplefilter("ignore")
        collections = {
            "Moré, Garbow & Hillstrom": more_garbow_hillstrom(quick),
            **{f"Scalable problems, {n:,} unknowns": scalable(n, quick) for n in SIZES if not quick or n == 100},
        }
        for number, (title, made) in enumerate(collections.items()):
            runs = list(made)
            text = f"Medians over the problems that were solved:\n\n{_summary(runs)}\n\n{_grid(runs)}"
            yield title, text if number else f"{EXPLANATION}\n\n{text}", _by_problem(runs)
        fits = certified(quick)
        yield "NIST's certified regressions", f"{CERTIFIED}\n\n{_certified_grid(fits)}", fits
