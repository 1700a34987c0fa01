"""Standalone scripts that reproduce an operator's wrong or missing derivative, with torch alone."""

from __future__ import annotations

import contextlib
import inspect
import io
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
from hodiff.checks.torch_verdicts import AUDITED_ROUTES, THIRD, VANISHING, Verdict, Verdicts, worst

# Number of elements above which numbers are drawn from a seed, if the fault persists.
_LITERAL = 16
# Number of characters by which error messages are compared: later ones may contain sizes.
_MESSAGE = 40
# Derivative that all but vanishes.
_SMALL = 1e-6
# Number of faults for which curves are tried.
_TRIED = 4
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
    faults = _by_severity(judged)
    if not faults:
        return {"script": _nothing(name, [verdicts for _, verdicts in judged])}
    worst_first = [each for each in faults if each.verdict.status == faults[0].verdict.status][:_TRIED]
    samples_of = [(each, each.sample) for each in worst_first]
    if smaller:
        samples_of.insert(0, (faults[0], _smallest(faults[0], seed)))
    shown = None
    for fault, each in samples_of:
        for text in _candidates(replace(fault, sample=each)):
            output = run(text)
            error = _shown(output, fault)
            if error is None:
                continue
            shown = shown or _headed(name, fault, text, output)
            if not (error > VANISHING or _is_zero(output, fault.order)):  # the error may be NaN
                return {"script": _headed(name, fault, text, output)}
    if shown is not None:
        return {"script": shown}
    why = f"# {name}: {faults[0].verdict.status} by {faults[0].route}, but no curve through the samples shows it.\n"
    return {"script": why}


def _is_zero(output: list[str], order: int) -> bool:
    """Whether the derivative of an order vanishes by differences, which shows little."""
    found = (re.match(rf"order {order}: (\S+) by", line) for line in output)
    return any(abs(float(each[1])) < _SMALL for each in found if each)


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


def _by_severity(judged: list[tuple[Sample, Verdicts]]) -> list[_Fault]:
    """Sort silent defects before errors, lower orders before higher orders, and small samples before large samples."""
    faults = [
        _Fault(sample, route, verdicts[route])
        for sample, verdicts in judged
        for route in AUDITED_ROUTES
        if verdicts[route].is_defect
    ]
    return sorted(
        faults,
        key=lambda each: (
            each.verdict.status == "raises",
            each.verdict.vanishes,
            each.order,
            AUDITED_ROUTES.index(each.route),
            each.sample.size,
        ),
    )


def _smallest(fault: _Fault, seed: int) -> Sample:
    def still_fails(smaller: Sample) -> bool:
        found = attempt(_judge, smaller, seed)
        if isinstance(found, Failure):
            return False
        verdict = found[fault.route]
        if verdict.vanishes and not fault.verdict.vanishes:
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


def _plain_autograd_works(text: str, route: str, order: int) -> bool:
    """Whether `torch.autograd.grad` computes a derivative that `torch.func` does not."""
    names: dict[str, Any] = {"__name__": "reproduction"}
    if "forward" in route:
        return False

    def differentiate() -> None:
        exec(compile(_HEAD + _NUMBERS + text.split("def differentiate")[0], "<reproduction>", "exec"), names)
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = names["f"](t)
        for _ in range(order):
            (value,) = torch.autograd.grad(value, t, create_graph=True)

    with torch.random.fork_rng(devices=[]):
        return not isinstance(attempt(differentiate), Failure)


def _headed(name: str, fault: _Fault, text: str, output: list[str]) -> str:
    if fault.verdict.status == "raises":
        raising = (line.strip().partition(": ") for line in output)
        route = next(each for each, _, said in raising if said[:_MESSAGE] == fault.verdict.detail[:_MESSAGE])
        order = 1 + route.count("-over-")
        inside = " inside torch.func, but not in torch.autograd" if _plain_autograd_works(text, route, order) else ""
        title = f"The {_ORDERS[order]} derivative of {name} by {route} raises an error{inside}."
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
