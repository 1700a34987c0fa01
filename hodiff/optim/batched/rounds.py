"""Rounds of a method until every problem ended, and the result of all."""

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
    """Where a method is with the problems that still run.

    Attributes:
        index: Which problems they are, (b,).
        status: The numbers of their ends, or `RUNNING`.
    """

    index: Tensor
    status: Tensor

    def advance(self) -> None:
        """One round."""

    def written(self) -> Written:
        """What a result tells of each problem."""

    def retain(self, keep: Tensor) -> None:
        """Forget the rows of the other problems."""


def rounds(
    course: Course, batch: Batch, ends: Mapping[int, End], vectors: Iterable[str], *, progress: bool
) -> scipy.optimize.OptimizeResult:
    """What SciPy would return of each problem, row by row; `vectors` name what has the structure of the unknowns."""
    ledger = Ledger(batch.count)
    with tqdm(total=batch.count, unit=" problems", disable=not progress) as bar:
        while len(course.index):
            bar.update(_retire(course, ledger))
            if not len(course.index):
                break
            # A round may be interrupted when some of its tensors are new already.
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
    """Write down problems that ended and forget them; how many there were."""
    ended = course.status != RUNNING
    count = int(ended.sum())
    if count:
        rows = {name: each[ended] for name, each in course.written().items()}
        ledger.write(course.index[ended], end=course.status[ended], **rows)
        course.retain(~ended)
    return count
