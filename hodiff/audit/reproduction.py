"""Standalone scripts that reproduce an operator's wrong or missing derivative, with torch alone."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hodiff.audit import standalone
from hodiff.audit.audit_sample import GRADIENT, audit_sample, differs
from hodiff.audit.call_source import literal, written_call
from hodiff.audit.samples import ILL_POSED, name_of, samples
from hodiff.audit.shrinking import shrink
from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.torch_verdicts import AUDITED_ROUTES, THIRD, Verdict, Verdicts, worst

# Number of elements above which numbers are drawn from a seed, if the fault persists.
_LITERAL = 16
# Number of characters by which error messages are compared: later ones may contain sizes.
_MESSAGE = 40
# Relative error above which the derivative itself all but vanishes.
_LARGE = 1e4
_WRONG = re.compile("relative error (.*), WRONG")
_ORDERS = {1: "first", 2: "second", 3: "third"}


@dataclass(frozen=True)
class _Fault:
    """A defect at a sample: the order, the routes that may show it, and whether torch raises."""

    sample: Sample
    route: str
    verdict: Verdict

    @property
    def order(self) -> int:
        if self.verdict.detail.startswith(GRADIENT):
            return 1
        return 3 if self.route == THIRD else 2

    @property
    def shown_by(self) -> tuple[str, ...]:
        """Routes of the script, of which one has to show the defect."""
        if self.order == 1:
            return ("reverse", "forward")
        return ("reverse-over-reverse-over-reverse",) if self.route == THIRD else (self.route,)


def reproduction(op: Any, *, count: int, seed: int, smaller: bool = True) -> dict[str, Any]:
    """Return the script of an operator's worst defect, at a smaller call if possible, or a comment that has none."""
    name = name_of(op)
    listed = [] if name in ILL_POSED or not op.supports_autograd else samples(name, op, count)
    judged = [(each, audit_sample(each, correct=False, seed=seed)) for each in listed]
    fault = _worst(judged)
    if fault is None:
        return {"script": _nothing(name, [verdicts for _, verdicts in judged])}
    smallest = _smallest(fault, seed) if smaller else fault.sample
    shown = None
    for text in itertools.chain.from_iterable(
        _candidates(replace(fault, sample=each)) for each in (smallest, fault.sample)
    ):
        output = run(text)
        error = _shown(output, fault)
        if error is None:
            continue
        shown = shown or (text, output)
        if error < _LARGE:  # else the derivative vanishes
            shown = text, output
            break
    if shown is not None:
        return {"script": _headed(name, fault, *shown)}
    why = f"# {name}: {fault.verdict.status} by {fault.route}, but no curve through the sample shows it.\n"
    return {"script": why}


def _nothing(name: str, verdicts: list[Verdicts]) -> str:
    found = worst(verdicts) if verdicts else {}
    statuses = {verdict.status for verdict in found.values()}
    by_torch = f"torch {torch.__version__}"
    if statuses == {"right"}:
        count = f"{len(verdicts)} sample{'s' * (len(verdicts) > 1)}"
        said = f"right by every route at {count} with {by_torch}; nothing to reproduce."
    elif statuses:
        said = f"{', '.join(sorted(statuses))} with {by_torch}; nothing to reproduce."
    else:
        said = f"no sample that {by_torch} differentiates; nothing to reproduce."
    further = f"# `python -m hodiff audit --op {name} --mutate` tries calls that torch's database omits."
    return f"# {name}: {said}\n{further}\n"


def _worst(judged: list[tuple[Sample, Verdicts]]) -> _Fault | None:
    """Return a silent defect before an error, a lower order before a higher order, and a small sample."""
    faults = [
        _Fault(sample, route, verdicts[route])
        for sample, verdicts in judged
        for route in AUDITED_ROUTES
        if verdicts[route].is_defect
    ]
    if not faults:
        return None
    return min(
        faults,
        key=lambda each: (
            each.verdict.status == "raises",
            _vanishes(each.verdict),
            each.order,
            AUDITED_ROUTES.index(each.route),
            each.sample.size,
        ),
    )


def _vanishes(verdict: Verdict) -> bool:
    """Whether the right derivative is so small that the error relative to it is large."""
    return (verdict.error or 0.0) > _LARGE


def _smallest(fault: _Fault, seed: int) -> Sample:
    def still_fails(smaller: Sample) -> bool:
        found = attempt(_judge, smaller, seed)
        if isinstance(found, Failure):
            return False
        verdict = found[fault.route]
        if _vanishes(verdict) and not _vanishes(fault.verdict):
            return False
        same = verdict.status == fault.verdict.status and verdict.detail.startswith(GRADIENT) == (fault.order == 1)
        return bool(
            same and (verdict.status != "raises" or verdict.detail[:_MESSAGE] == fault.verdict.detail[:_MESSAGE])
        )

    return shrink(fault.sample, still_fails)


def _judge(sample: Sample, seed: int) -> Verdicts:
    with torch.no_grad():
        sample.function(correct=False)(*sample.point)  # smaller calls that torch refuses are no defects
    return audit_sample(sample, correct=False, seed=seed)


# Contractions of an output, and directions, from simple to general.
_CONTRACTIONS = (
    "{0}.sum()",
    "({0} * torch.arange(1, {0}.numel() + 1).reshape({0}.shape)).sum()",
    "({0} * torch.arange(1, {0}.numel() + 1).reshape({0}.shape)).sum() + ({0} ** 2).sum() / 2",
)


def _directions(sample: Sample) -> Iterator[Callable[[Tensor], str]]:
    yield lambda x: f"torch.ones({tuple(x.shape)}, dtype={x.dtype})"
    yield lambda x: f"torch.arange({x.numel()}, dtype={x.dtype}).reshape({tuple(x.shape)}) / {x.numel()}"
    yield lambda x: _drawn(x, 1)


def _drawn(x: Tensor, seed: int) -> str:
    """Return the expression of normal numbers from a seed."""
    return f"torch.randn({tuple(x.shape)}, generator=torch.Generator().manual_seed({seed}), dtype={x.dtype})"


def _candidates(fault: _Fault) -> Iterator[str]:
    """Yield scripts, the simplest first."""
    body = attempt(written_call, fault.sample)
    if isinstance(body, Failure):
        return
    sizes = [leaf.numel() for leaf in fault.sample.point]
    for seeded in (True, False) if max(sizes) > _LITERAL else (False,):
        for contraction in _CONTRACTIONS:
            for direction in _directions(fault.sample):
                yield _script(fault, body, contraction, direction, seeded)


def _script(
    fault: _Fault,
    body: tuple[list[str], list[str], set[str]],
    contraction: str,
    direction: Callable[[Tensor], str],
    seeded: bool,
) -> str:
    sample, (lines, outputs, changed) = fault.sample, body
    text = "\n".join((*lines, *outputs))
    constants, inside = [], []
    for place, leaf in enumerate(sample.leaves):
        if not isinstance(leaf, Tensor) or f"x{place}" not in text:
            continue
        is_drawn = seeded and place in sample.places and leaf.numel() > _LITERAL
        constants.append(f"X{place} = {_drawn(leaf, 0) if is_drawn else literal(leaf)}")
        if place in sample.places:
            constants.append(f"V{place} = {direction(leaf)}")
            inside.append(f"x{place} = X{place} + t * V{place}")
        else:
            inside.append(f"x{place} = X{place}" + ".clone()" * (f"x{place}" in changed))
    if _draws(sample):
        inside.insert(0, "torch.manual_seed(0)")
    sums = " + ".join(contraction.format(each) for each in outputs)
    f = [
        "def f(t: Tensor) -> Tensor:",
        '    """Return a sum over the outputs at X + t V."""',
        *(f"    {line}" for line in (*inside, *lines)),
        f"    return {sums}",
    ]
    return "\n".join([*constants, "", "", *f, "", "", _tail(), "", "", _end(fault.order)]) + "\n"


def _draws(sample: Sample) -> bool:
    """Whether the call draws random numbers."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, second = (attempt(sample.function(correct=False, seed=each), *sample.point) for each in (0, 1))
    return isinstance(first, Failure) or isinstance(second, Failure) or differs(first, second)


def _tail() -> str:
    """Return the functions that a script copies."""
    source = inspect.getsource(standalone)
    return source[source.index("def differentiate") :].rstrip()


def _end(order: int) -> str:
    return f'print(f"torch {{torch.__version__}}")\nfor line in report(f, {order}):\n    print(line)'


_HEAD = """\
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

Curve = Callable[[Tensor], Tensor]
"""

_NUMBERS = "inf, nan = math.inf, math.nan\n"


def run(text: str) -> list[str]:
    """Run a script, and return the lines that it prints; an exception is the last line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        failure = attempt(
            exec, compile(_HEAD + _NUMBERS + text, "<reproduction>", "exec"), {"__name__": "reproduction"}
        )
    return printed.getvalue().splitlines() + ([failure.message] if isinstance(failure, Failure) else [])


def _shown(output: list[str], fault: _Fault) -> float | None:
    """Return the relative error of a wrong line of the fault's routes, or 0 for an error message; None without one."""
    for line in output:
        route, _, said = line.strip().partition(": ")
        if fault.verdict.status == "raises":
            if said[:_MESSAGE] == fault.verdict.detail[:_MESSAGE]:
                return 0.0
        elif route in fault.shown_by and (wrong := _WRONG.search(said)):
            return float(wrong[1])
    return None


def _headed(name: str, fault: _Fault, text: str, output: list[str]) -> str:
    if fault.verdict.status == "raises":
        title = f"The {_ORDERS[fault.order]} derivative of {name} by {fault.shown_by[0]} raises an error."
    else:
        first = next(line for line in output if line.endswith("WRONG")).strip()
        route, order = first.partition(": ")[0], 1 + first.count("-over-")
        title = (
            f"The {_ORDERS[order]} derivative of {name} by {route} is {'not finite' if 'nan' in first else 'wrong'}."
        )
    printed = textwrap.indent("\n".join(output), "    ")
    doc = f'r"""{title}\n\nThe script needs torch alone. It prints, on a CPU:\n\n{printed}\n"""\n'
    numbers = _NUMBERS if re.search(r"\b(inf|nan)\b", text.split("def differentiate")[0]) else ""
    return f"{doc}\n{_HEAD}{numbers}{text}"
