"""Problem whose contestants should agree; they are checked first and timed after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.race import Clock, Contestant, median_ratio, race
from benchmarks.targets import Target, Verdict, judged_by_rounds


@dataclass(frozen=True)
class Problem:
    """Quantity to compute, with the contestants that compute it.

    Attributes:
        name: Key in tables, files and peers' results.
        title: Description in one line.
        contestants: Contestants, the unit first. A contestant of group "unit" is not checked.
        error: Function that computes the relative error of a contestant's result; not called on gradients.
        tolerance: Largest error of a right answer; wrong contestants are not timed.
        remarks: Text of an extra column, by contestant.
        remarks_title: The heading of that column.
        targets: Bounds on ratios of times.
    """

    name: str
    title: str
    contestants: Sequence[Contestant]
    error: Callable[[Any], float]
    tolerance: float
    remarks: Mapping[str, str] = field(default_factory=dict)
    remarks_title: str = ""
    targets: Sequence[Target] = ()


@dataclass(frozen=True)
class Row:
    """Measurements of one contestant; times are absent where its answer was wrong.

    Attributes:
        name: Name of the contestant.
        group: Group of the contestant.
        milliseconds: Median time of a call.
        gradients: Median ratio to the unit, one eager gradient.
        of_fastest_torch: Median ratio to torch's fastest right contestant.
        relative_error: Relative error of the answer; absent for gradients.
        remark: Text of the extra column.
    """

    name: str
    group: str
    milliseconds: float | None = None
    gradients: float | None = None
    of_fastest_torch: float | None = None
    relative_error: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Result:
    """Rows of a problem, in the order of its contestants, and whether its targets were met."""

    problem: str
    title: str
    rounds: int
    tolerance: float
    rows: list[Row]
    remarks_title: str = ""
    verdicts: Sequence[Verdict] = ()

    def wrong(self) -> list[str]:
        """Return the defaults of hodiff whose answers were wrong."""
        return [row.name for row in self.rows if row.group == "hodiff" and row.milliseconds is None]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain dicts and lists."""
        return asdict(self)


def measure(problem: Problem, rounds: int, clock: Clock = time.perf_counter) -> Result:
    """Check every contestant, and time the contestants that are right.

    Args:
        problem: Problem to measure.
        rounds: Number of rounds to time.
        clock: Function that returns seconds.

    Returns:
        The rows of the contestants and the verdicts on targets.
    """
    unit = problem.contestants[0]
    checked = [each for each in problem.contestants if each.group not in {"unit", "peer gradient"}]
    errors = {each.name: problem.error(each.run()) for each in checked}
    right = [each for each in problem.contestants if errors.get(each.name, 0.0) <= problem.tolerance]
    seconds = race(right, rounds, problem.name, clock)
    medians = {each.name: median(seconds[each.name]) for each in right}
    fastest = min((each.name for each in right if each.group == "torch"), key=medians.__getitem__, default=None)

    def row(each: Contestant) -> Row:
        remark = problem.remarks.get(each.name, "")
        if each not in right:
            return Row(each.name, each.group, relative_error=errors[each.name], remark=remark)
        times = seconds[each.name]
        return Row(
            each.name,
            each.group,
            milliseconds=1e3 * medians[each.name],
            gradients=median_ratio(times, seconds[unit.name]) if unit in right else None,
            of_fastest_torch=median_ratio(times, seconds[fastest]) if fastest and each != unit else None,
            relative_error=errors.get(each.name),
            remark=remark,
        )

    rows = [row(each) for each in problem.contestants]
    verdicts = [judged_by_rounds(each, seconds) for each in problem.targets]
    return Result(problem.name, problem.title, rounds, problem.tolerance, rows, problem.remarks_title, verdicts)
