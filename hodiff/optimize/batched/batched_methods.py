"""Methods for many problems at once: their options, capabilities and start functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import scipy
import torch
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.optimize.batched.batch import Batch, Box, InDims, box_of
from hodiff.optimize.batched.descent import ENDS, BfgsOptions, LbfgsbOptions, bfgs, l_bfgs_b
from hodiff.optimize.batched.levenberg_marquardt import LevenbergMarquardt, Limits, Residuals
from hodiff.optimize.batched.problems import Problems
from hodiff.optimize.batched.running_rows import RUNNING, Ledger, Written
from hodiff.optimize.batched.trust_exact import TrustExactOptions, trust_exact
from hodiff.optimize.geodesic import MESSAGES
from hodiff.optimize.method_options import options_of
from hodiff.optimize.terminations import INTERRUPTED, End
from hodiff.optimize.variables import Variables, scales_of


class Course(Protocol):
    """State of a method on the problems that still run.

    Attributes:
        index: Numbers of the problems, (b,).
        status: Numbers of the problems' ends, or `RUNNING`.
    """

    index: Tensor
    status: Tensor

    def advance(self) -> None:
        """Run one round."""

    def written(self) -> Written:
        """Return the columns of the result."""

    def retain(self, keep: Tensor) -> None:
        """Drop the rows of problems that are not in the mask `keep`."""


def rounds(
    course: Course, batch: Batch, ends: Mapping[int, End], vectors: Iterable[str], *, progress: bool
) -> scipy.optimize.OptimizeResult:
    """Run all rounds and build SciPy's result with a row for each problem; `vectors` are columns like the unknowns."""
    ledger = Ledger(batch.count)
    with tqdm(total=batch.count, unit=" problems", disable=not progress) as bar:
        while len(course.index):
            bar.update(_retire(course, ledger))
            if not len(course.index):
                break
            # An interrupted round may leave a part of the state updated, so the columns before it are kept.
            index, before = course.index, course.written()
            try:
                course.advance()
            except KeyboardInterrupt:
                ledger.write(index, end=torch.full_like(index, INTERRUPTED.status), **before)
                break
    columns: dict[str, Any] = dict(ledger.columns)
    told = [{**ends, INTERRUPTED.status: INTERRUPTED}[number] for number in columns.pop("end").tolist()]
    columns.update({name: batch.tree(columns[name]) for name in vectors})
    return scipy.optimize.OptimizeResult(
        **columns,
        status=torch.tensor([end.status for end in told], device=batch.start.device),
        message=[end.message for end in told],
    )


def _retire(course: Course, ledger: Ledger) -> int:
    """Record and drop the problems that ended; return their number."""
    ended = course.status != RUNNING
    count = int(ended.sum())
    if count:
        rows = {name: each[ended] for name, each in course.written().items()}
        ledger.write(course.index[ended], end=course.status[ended], **rows)
        course.retain(~ended)
    return count


@dataclass(frozen=True)
class BatchedMethod:
    """Capabilities of a method and its start function.

    Attributes:
        begin: Function of problems, options and bounds that returns the method's initial state.
        options: Dataclass of the options.
        bounds: Whether the method supports bounds.
        constraints: Whether the method supports constraints.
        tolerances: Options that `tol` sets, as in SciPy.
    """

    begin: Callable[[Problems, Any, Box | None], Course]
    options: type
    bounds: bool = False
    constraints: bool = False
    tolerances: tuple[str, ...] = ("gtol",)


METHODS = {
    "bfgs": BatchedMethod(bfgs, BfgsOptions),
    "l-bfgs-b": BatchedMethod(l_bfgs_b, LbfgsbOptions, bounds=True, tolerances=("ftol", "gtol")),
    "trust-exact": BatchedMethod(trust_exact, TrustExactOptions),
}
# Method if the user names none.
DEFAULT = "trust-exact"


def minimize_all(
    f: Callable[..., Any],
    x0: PyTree,
    args: tuple[Any, ...],
    in_dims: InDims,
    method: str,
    bounds: Any,
    tol: float | None,
    options: Mapping[str, Any],
    *,
    progress: bool,
) -> scipy.optimize.OptimizeResult:
    """Minimise many problems at once, by a method of the table."""
    takes = METHODS[method]
    by_tol = {} if tol is None else dict.fromkeys(takes.tolerances, tol)
    chosen: Any = options_of(takes.options, method, by_tol | dict(options), None)
    batch = Batch("minimize", x0)
    box = box_of("minimize", bounds, batch)
    problems = Problems("minimize", f, batch, args, in_dims)
    with torch.no_grad():
        found = rounds(takes.begin(problems, chosen, box), batch, ENDS, ("x", "jac"), progress=progress)
    found.success = found.status == 0
    return found


def least_squares_of_all(
    f: Callable[..., Any],
    x0: PyTree,
    args: tuple[Any, ...],
    in_dims: InDims,
    bounds: Any,
    x_scale: Any,
    limits: Limits,
) -> scipy.optimize.OptimizeResult:
    """Solve many least-squares problems at once."""
    batch = Batch("least_squares", x0)
    box = box_of("least_squares", bounds, batch, in_pairs=False)
    problems = Residuals(f, batch, args, in_dims)
    with torch.no_grad():
        course = LevenbergMarquardt.begin(problems, limits, box, _scales(x_scale, batch))
        ends = {number: End(number, message) for number, message in MESSAGES.items()}
        found = rounds(course, batch, ends, ("x", "grad", "active_mask"), progress=False)
    found.success = (found.status > 0) & (found.status != INTERRUPTED.status)
    return found


def _scales(x_scale: Any, batch: Batch) -> Tensor | None:
    """Return the scales of the unknowns; None if they follow the columns of the Jacobian."""
    if x_scale is None or (isinstance(x_scale, str) and x_scale == "jac"):
        return None
    if batch.is_like(x_scale):
        sizes = batch.vectors(x_scale)
    else:
        variables = Variables(batch.first)
        sizes = torch.as_tensor(scales_of(x_scale, variables), device="cpu").to(batch.start).expand_as(batch.start)
    if not bool((sizes > 0).all()):
        raise InputError(f"least_squares: x_scale: expected positive numbers, got {float(sizes.min()):g} among them.")
    # The method uses scales of the Jacobian's columns, which are the inverses of these sizes.
    return 1 / sizes
