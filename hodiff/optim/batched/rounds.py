"""Loop over the rounds of a method until every problem ended, and the result of all problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import scipy
import torch
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.optim.batched.batch import Batch
from hodiff.optim.batched.rows import RUNNING, Ledger, Written
from hodiff.optim.ends import End

INTERRUPTED = End(99, "Interrupted; x is the best point so far.")


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
