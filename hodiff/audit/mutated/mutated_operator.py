"""Judgement of an operator's invented calls in a worker process: counts, and the smallest failing calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_unflatten

from hodiff.audit.call_source import Code, argument, literal
from hodiff.audit.mutated.case import Defect, judge_case
from hodiff.audit.samples import samples
from hodiff.audit.shrinking import shrink
from hodiff.checks.mutations.changes import changed
from hodiff.checks.mutations.sample import Sample

_HEAD = """\
import torch

import hodiff

inf, nan = float("inf"), float("nan")
"""

_BY_DATABASE = """\
from hodiff.audit.samples import call_of

call = call_of({name!r})  # the operator as torch's database calls it
"""


def script_of(name: str, op: Any, sample: Sample, *, correct: bool) -> str:
    """Return a script that runs `hodiff.check` on a call of an operator."""
    own_name = resolve_name(op.op) if sample.direct else None
    named = own_name is not None and own_name.startswith("torch.")
    values = [f"x{place} = {literal(leaf)}" for place, leaf in enumerate(sample.leaves) if isinstance(leaf, Tensor)]
    filled = [
        Code(argument(sample, place)) if isinstance(leaf, Tensor) else Code(repr(leaf))
        for place, leaf in enumerate(sample.leaves)
    ]
    first, args, kwargs = tree_unflatten(filled, sample.structure)
    if named:
        written = [repr(first), *map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        call = f"{own_name}({', '.join(written)})"
    else:
        call = f"call({first!r}, {args!r}, {kwargs!r})"
    moving = ", ".join(f"x{place}" for place in sample.places)
    lines = [
        *(() if named else (_BY_DATABASE.format(name=name).rstrip(),)),
        *values,
        "",
        "",
        f"def f({moving}):",
        f"    return {call}",
        "",
        "",
        f"print(hodiff.check(f, ({moving},), order=3{'' if correct else ', correct=False'}))",
    ]
    return _HEAD + "\n".join(lines) + "\n"


# Number of samples to change, as the database repeats itself.
_BASES = 6
# Changes tried for each call to judge: changes that torch refuses cost little.
_TRIALS = 6
# Largest number of findings of the same kind for one operator.
_PRINTED = 3


def _repeats(change: str, _: Sample) -> bool:
    """Whether the change may write a place twice, which torch leaves undefined."""
    return change in {"a repeated index", "batched"}


def _keeps_pivots(_: str, sample: Sample) -> bool:
    """Whether LAPACK's gelsy reuses the pivots of one matrix for the next, which makes torch's value wrong."""
    return "gelsy" in sample.leaves and sample.point[0].dim() > 2


# Calls without a right value in torch.
_WITHOUT_VALUE: dict[str, Callable[[str, Sample], bool]] = {
    "index_put": _repeats,
    "linalg.lstsq": _keeps_pivots,
}


@dataclass(frozen=True)
class Finding:
    """Defect of an invented call, with a script that reproduces it.

    Attributes:
        operator: The operator's name in torch's database.
        change: The name of the change that made the call.
        defect: The defect of the lowest order; silent defects take precedence.
        script: Script that reproduces the defect, at the smallest call that was found.
    """

    operator: str
    change: str
    defect: Defect
    script: str

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote."""
        return Finding(**{**data, "defect": Defect(**data["defect"])})

    def __str__(self) -> str:
        """Return one line, and the script below."""
        where = f"order {self.defect.order}, {self.defect.route}" if self.defect.order else "value"
        how = f" by {self.defect.error:.1e}" if self.defect.error and self.defect.status == "wrong" else ""
        line = f"{self.operator}, {self.change}: {where}: {self.defect.status}{how} {self.defect.detail}".rstrip()
        return f"{line}\n\n{self.script}"


def audit_changed(name: str, op: Any, *, correct: bool, cases: int, seed: int) -> dict[str, Any]:
    """Judge up to `cases` invented calls of an operator; return their counts, and some findings."""
    judged = silent = raising = 0
    findings: dict[tuple[int, str], list[Finding]] = {}
    for change, sample in itertools.islice(_calls(name, op, seed), cases * _TRIALS):
        if judged == cases:
            break
        defects = judge_case(sample, correct=correct, seed=seed)
        if defects is None:
            continue
        judged += 1
        defect = _confirmed(sample, defects, correct, seed)
        if defect is None:
            continue
        silent, raising = silent + defect.is_silent, raising + (not defect.is_silent)
        alike = findings.setdefault((defect.order, defect.status), [])
        if len(alike) < _PRINTED:
            alike.append(_finding(name, op, change, sample, defect, correct, seed))
    listed = [each.to_json() for alike in findings.values() for each in alike]
    return {"judged": judged, "silent": silent, "raising": raising, "findings": listed}


def _calls(name: str, op: Any, seed: int) -> Iterator[tuple[str, Sample]]:
    """Yield changed calls, taking one change of each sample in turn."""
    bases = samples(name, op, _BASES)
    streams = [changed(base, seed + i) for i, base in enumerate(bases)]
    rounds = itertools.zip_longest(*streams)
    has_none = _WITHOUT_VALUE.get(op.name, lambda *_: False)
    return (each for row in rounds for each in row if each is not None and not has_none(*each))


def _confirmed(sample: Sample, defects: list[Defect], correct: bool, seed: int) -> Defect | None:
    """Return the defect of lowest order, silent defects first, if other directions show it, too."""
    if not defects:
        return None
    first = min(defects, key=lambda each: (not each.is_silent, each.order))
    return first if _has(sample, first, correct, seed + 1) else None


def _has(sample: Sample, defect: Defect, correct: bool, seed: int) -> bool:
    """Whether the call has a defect of that order, route and status."""
    found = judge_case(sample, correct=correct, seed=seed) or ()
    return any((each.order, each.route, each.status) == (defect.order, defect.route, defect.status) for each in found)


def _finding(name: str, op: Any, change: str, sample: Sample, defect: Defect, correct: bool, seed: int) -> Finding:
    def still_fails(smaller: Sample) -> bool:
        return _has(smaller, defect, correct, seed) and _has(smaller, defect, correct, seed + 1)

    # An error message needs no small case, and shrinking takes time.
    smallest = shrink(sample, still_fails) if defect.is_silent else sample
    return Finding(name, change, defect, script_of(name, op, smallest, correct=correct))
