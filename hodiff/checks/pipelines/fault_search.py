"""Search for the smallest submodules at fault; the torch function or custom Function in each, and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.findings.make_finding import (
    describe_failures,
    errors_by_route,
    make_finding,
    routes_of,
    statuses,
)
from hodiff.checks.findings.torch_functions import Culprit, culprits, custom_classes
from hodiff.checks.pipelines.check_function import check_function
from hodiff.checks.preflight.listeners import ONE_DRAW
from hodiff.checks.preflight.preflight import preflight
from hodiff.checks.probes.left_graph import changed_inputs
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Finding, Report
from hodiff.checks.subjects.module_calls import ModuleCall
from hodiff.checks.subjects.subject import Subject, failures, raises, subject_of_call, subject_of_loss
from hodiff.corrections.mechanism.registry import CORRECTIONS
from hodiff.torch_internals.custom_operators import loses_tangents
from hodiff.torch_internals.wording import Wording, says

# Codes of failed comparisons without another explanation; the first status that occurs decides.
_BY_STATUS = {"non-smooth": "HD901", "non-finite": "HD112", "raises": "HD408", "zero": "HD115", "wrong": "HD115"}
# Functions that detach a tensor from the graph.
_CUTS = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.Tensor.numpy, torch.Tensor.item)


@dataclass(frozen=True)
class Fault:
    """Call whose routes disagree, though the routes of all calls inside it agree.

    Attributes:
        call: The call.
        failed: Its comparisons that failed.
        alike: Names of other modules of the same class, options and shapes.
        loss: The loss, if that is at fault and the module is not.
    """

    call: ModuleCall
    failed: tuple[Entry, ...]
    alike: tuple[str, ...] = ()
    loss: Callable[[Any], Tensor] | None = None


class FaultSearch:
    """Search of a module's calls for those at fault, each checked alone once, with the options of its check."""

    def __init__(self, root: ModuleCall, failed: tuple[Entry, ...], options: CheckOptions) -> None:
        self.root = root
        self.failed = failed
        self.options = options
        self._known: dict[ModuleCall, tuple[Entry, ...]] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of all faults."""
        for fault in self._faults():
            yield from self._diagnose(fault)

    def _faults(self) -> Iterator[Fault]:
        """Yield the smallest calls at fault: first from the outside inwards, then beside that path."""
        first, path = self._descend(self.root, self.failed)
        if first.call is self.root and self.options.loss is not None:
            if not self._failures(self.root):
                yield Fault(self.root, self.failed, loss=self.options.loss)
                return
            first = replace(first, failed=self._failures(self.root))
        yield first
        yield from self._beside(path, {first.call.signature})

    def _beside(self, path: Sequence[ModuleCall], seen: set[tuple[str, ...]]) -> Iterator[Fault]:
        """Find further faulty calls beside the path to the first one; skip calls that agree as a whole."""
        for call in path:
            for child in _unlike(call.children):
                if child in path or child.signature in seen:
                    continue
                seen.add(child.signature)
                if self._failures(child):
                    fault, inner = self._descend(child, self._failures(child))
                    if fault.call is child or fault.call.signature not in seen:
                        seen.add(fault.call.signature)
                        yield fault
                    yield from self._beside(inner, seen)

    def _descend(self, call: ModuleCall, failed: tuple[Entry, ...]) -> tuple[Fault, tuple[ModuleCall, ...]]:
        """Return the smallest call at fault inside a call at fault, and the path to it."""
        path = [call]
        # A solver calls its field a hundred times, so check one of several equal calls.
        while inner := next((child for child in _unlike(call.children) if self._failures(child)), None):
            call, failed = inner, self._failures(inner)
            path.append(call)
        names = [each.name for each in self.root.post_order() if each.signature == call.signature]
        alike = tuple(dict.fromkeys(name for name in names if name != call.name))
        return Fault(call, failed, alike), tuple(path)

    def _failures(self, call: ModuleCall) -> tuple[Entry, ...]:
        """Return the failed comparisons of a call checked alone."""
        if call not in self._known:
            subject, order, seed = self._subject(call), self.options.order, self.options.seed
            with self.options.mode:
                # Testing whether a route raises takes a tenth of the time of comparing all routes.
                agrees = statuses(self.failed) == {"raises"} and not raises(subject, order, seed)
                self._known[call] = () if agrees else failures(subject, order, seed)
        return self._known[call]

    def _subject(self, call: ModuleCall) -> Subject:
        return (
            subject_of_call(call, None, self.options.wrt, self.options.fixed)
            if call is self.root
            else subject_of_call(call)
        )

    def _diagnose(self, fault: Fault) -> tuple[Finding, ...]:
        """Blame a torch function, else report a check of the submodule alone, else name the routes."""
        call = fault.call
        if fault.loss is not None:
            return self._alone(fault, subject_of_loss(fault.loss, call), "the loss", "")
        subject = self._subject(call)
        kink = statuses(fault.failed) == {"non-smooth"}
        if kink and call.children:
            # The routes of all children agree, and a check of the whole would report the same kink again.
            return (_by_routes(fault, call.label, call.location),)
        # If the module writes into its inputs, no single function is at fault.
        told = kink or _names_custom(fault) or _writes(subject)
        culprits_inside = [] if told else list(self._culprits(fault))
        if culprits_inside:
            return tuple(finding for culprit in culprits_inside for finding in self._of_culprit(fault, culprit))
        return self._alone(fault, subject, call.label, call.location)

    def _alone(self, fault: Fault, subject: Subject, label: str, location: str) -> tuple[Finding, ...]:
        """Return the findings of a check of the subject alone; if there are none, name the routes that disagree."""
        report = attempt(self._check_alone, subject, () if fault.loss is not None else fault.failed)
        # The only findings may be warnings that comparisons show.
        shown = () if isinstance(report, Failure) else tuple(each for each in report.findings if each.kind != "seen")
        errors = tuple(each for each in shown if each.severity == "error") or shown
        return tuple(
            replace(
                each,
                cause=f"in {label}: {each.cause or each.message}",
                evidence=(*_evidence(fault), *each.evidence),
                location=each.location or location,
            )
            for each in errors
        ) or (_by_routes(fault, label, location),)

    def _culprits(self, fault: Fault) -> Iterator[Culprit]:
        """Yield the torch functions that fail in the same way as the whole submodule."""
        ways = set(map(_way, fault.failed))
        raising = {kind for kind, _ in ways} == {"raises"}
        for culprit in culprits(fault.call.again, self.options, raising=raising):
            if not ways.isdisjoint(map(_way, culprit.failed)):
                yield culprit

    def _check_alone(self, subject: Subject, failed: tuple[Entry, ...]) -> Report:
        # If all routes raise, no further comparison is needed.
        failed = failed if statuses(failed) == {"raises"} else ()
        # The surrounding mode corrects already, if it should.
        order, seed = self.options.order, self.options.seed
        options = CheckOptions(order, vmap=False, scipy=False, brief=True, seed=seed, correct=False, failed=failed)
        with self.options.mode:
            return check_function(subject.function, subject.inputs, options)

    def _of_culprit(self, fault: Fault, culprit: Culprit) -> tuple[Finding, ...]:
        if loses_tangents(culprit.function):
            # The function runs a rule of the user, which probes can inspect.
            return self._alone(fault, culprit.subject, f"{fault.call.label}, {culprit.name}", culprit.location)
        cut = culprit.function in _CUTS
        code = "HD104" if cut else "HD112" if statuses(culprit.failed) <= {"non-finite"} else "HD406"
        remedy = (
            f"Remove it. If it is intended, {_fewer_variables(self.options)}check the module around it without it."
            if cut
            else ""
        )
        if not self.options.correct and culprit.function in CORRECTIONS:
            remedy = (
                "Take derivatives within hodiff.corrected(), or by hodiff's own transforms: `with hodiff.corrected():`."
            )
        cause = f"in {fault.call.label}: a derivative of {culprit.name} {describe_failures(culprit.failed)} "
        cause += f"by {routes_of(culprit.failed)}."
        evidence = (*_evidence(fault), f"torch function {culprit.name}", *errors_by_route(culprit.failed))
        location = culprit.location or fault.call.location
        return (make_finding(code, culprit.failed, cause, evidence, location, remedy=remedy),)


def _unlike(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Return the first call for each combination of module and signature."""
    firsts: dict[tuple[str, ...], ModuleCall] = {}
    for call in calls:
        firsts.setdefault((call.name, *call.signature), call)
    return list(firsts.values())


def _fewer_variables(options: CheckOptions) -> str:
    """Return advice on differentiating by fewer variables, unless the caller does so already."""
    if options.wrt == "parameters":
        return ""
    first = "" if options.fixed else ", `fixed=(0,)` for the first input"
    return f'differentiate by what it leaves: `wrt="parameters"`{first}, or '


def unsteady_finding(call: ModuleCall, reason: str) -> Finding:
    """Return a finding that names the module that makes two calls with the same inputs differ, and why."""
    seen = attempt(preflight, lambda *args: call.module(*args, **call.kwargs), *call.args)
    # The remark about drawing with one seed does not apply to checks.
    seen = () if isinstance(seen, Failure) else seen.remarks
    remarks = tuple(each.replace(ONE_DRAW, "") for each in seen)
    known = "Call `module.eval()`, or make it without a state: `BatchNorm1d(n, track_running_stats=False)`."
    return _seen("HD903", call, reason, *remarks, remedy="" if remarks else known)


def stale_finding(call: ModuleCall) -> Finding:
    """Return a finding that names the module that caches results of numbers that have changed since."""
    return _seen(
        "HD310", call, "its second call, with other parameters and inputs, gives another output than a first one"
    )


def _seen(code: str, call: ModuleCall, reason: str, *remarks: str, remedy: str = "") -> Finding:
    """Return a finding that no comparison shows."""
    cause, evidence = f"in {call.label}: {reason}.", (_submodule(call), *remarks)
    return make_finding(code, (), cause, evidence, call.location, remedy=remedy, message=reason, route="f")


def _by_routes(fault: Fault, label: str, location: str) -> Finding:
    """Return a finding that names only the routes that disagree."""
    failed = fault.failed
    code = next(code for status, code in _BY_STATUS.items() if status in statuses(failed))
    classes = custom_classes(fault.call) if fault.loss is None else ()
    cause = f"in {label}: a derivative {describe_failures(failed)} by {routes_of(failed)}."
    evidence = (*_evidence(fault), *(f"custom Function {each.__name__}" for each in classes), *errors_by_route(failed))
    return make_finding(code, failed, cause, evidence, location)


def _names_custom(fault: Fault) -> bool:
    """Whether all failures are torch's message about ctx in forward, and there is a custom Function inside."""
    said = all(says(entry.detail, Wording.NO_SETUP_CONTEXT) for entry in fault.failed)
    return said and bool(custom_classes(fault.call))


def _writes(subject: Subject) -> bool:
    """Whether the call changes the tensors it is differentiated by."""
    return bool(changed_inputs(*subject.of_leaves()))


def _way(entry: Entry) -> tuple[str, int]:
    """Return the order and kind of a failure; a module and the function at fault in it share them."""
    kinds = {"fails": "raises", "raises": "raises", "non-smooth": "non-smooth"}
    return kinds.get(entry.status, "differs"), entry.order


def _evidence(fault: Fault) -> tuple[str, ...]:
    if fault.loss is not None:
        return ("the loss: the module's outputs alone agree by every route",)
    alike = f"the same module is also {', '.join(fault.alike)}" if fault.alike else ""
    return tuple(filter(None, (_submodule(fault.call), alike)))


def _submodule(call: ModuleCall) -> str:
    return f"submodule {call.label}" if call.name else f"the module itself, {call.label}"
