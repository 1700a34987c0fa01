"""Search for the torch functions in a call whose routes disagree, also by torch alone, which corrections mend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.lost_digits import moved_by_rounding
from hodiff.checks.comparisons.order_by_order import Level, evaluate_route
from hodiff.checks.findings.codes import CODES
from hodiff.checks.findings.make_finding import describe_failures, errors_by_route, make_finding, routes_of
from hodiff.checks.preflight.operator_routes import custom_functions
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Finding
from hodiff.checks.subjects.module_calls import ModuleCall
from hodiff.checks.subjects.subject import (
    Comparison,
    Subject,
    failures,
    is_free,
    raises,
    subject_of_function,
)
from hodiff.common.trees import tensors_in
from hodiff.corrections import Corrections
from hodiff.corrections.mechanism.registry import CORRECTIONS, correction_of
from hodiff.torch_internals.interception import MODULES_BETWEEN, MODULES_OF_LIBRARIES

# Modules whose frames are not the caller of a function.
_MACHINERY = (*MODULES_BETWEEN, "hodiff.", "contextlib", "torch.utils.", *MODULES_OF_LIBRARIES)


@dataclass(frozen=True)
class Culprit:
    """Torch function whose routes disagree at the arguments of a module's call.

    Attributes:
        name: Its name, as users write it.
        function: The function.
        failed: The comparisons that failed.
        location: The line that called it, such as `file.py:123`.
        subject: The call, as a function of its floating arguments.
    """

    name: str
    function: Callable[..., Any]
    failed: tuple[Entry, ...]
    location: str
    subject: Subject


@dataclass(frozen=True)
class _Use:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    location: str

    @property
    def key(self) -> tuple[Any, ...]:
        leaves = tree_leaves((self.args, self.kwargs))
        return (self.function, *(tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves))


class _Recorder(TorchFunctionMode):
    """Mode that records every torch function of floating tensors, with copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[_Use] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        name = resolve_name(func) or getattr(func, "__name__", "")
        use = _Use(func, copies[0], copies[1], _caller(inspect.currentframe()))
        told = not name.endswith(("__get__", "__set__")) and any(map(is_free, tree_leaves(copies)))
        try:
            result = func(*args, **kwargs)
        except Exception:
            # A function that raises may be the culprit.
            self.uses += [use] if told else []
            raise
        if told and any(each.is_floating_point() or each.is_complex() for each in tensors_in(result)):
            self.uses.append(use)
        return result


def culprits(
    prepare: Callable[[], Callable[[], Any]],
    options: CheckOptions,
    suspects: Callable[[Any], bool] = lambda function: True,
    *,
    raising: bool = False,
) -> Iterator[Culprit]:
    """Check every torch function that a call makes, alone, at its recorded arguments; yield those that fail."""
    recorder, run = _Recorder(), prepare()
    with torch.enable_grad(), recorder:
        attempt(run)
    checked, found = set(), set()
    for use in recorder.uses:
        if use.key in checked or use.function in found or not suspects(use.function):
            continue
        checked.add(use.key)
        subject = subject_of_function(use.function, use.args, use.kwargs)
        with options.mode:
            skip = raising and not raises(subject, options.order, options.seed)
            failed = () if skip else failures(subject, options.order, options.seed)
        if failed:
            found.add(use.function)
            name = resolve_name(use.function) or getattr(use.function, "__name__", str(use.function))
            yield Culprit(name, use.function, failed, use.location, subject)


def custom_classes(call: ModuleCall, *, inputs: bool = True) -> tuple[type, ...]:
    """Return the custom Functions that run if inputs need a gradient, or if not; none if the call raises."""
    found = attempt(_custom_classes, call, inputs)
    return () if isinstance(found, Failure) else found


def _custom_classes(call: ModuleCall, inputs: bool) -> tuple[type, ...]:
    args, kwargs = call.setting.copied((call.args, call.kwargs))
    if inputs:
        args, kwargs = tree_map_only(Tensor, lambda x: x.requires_grad_() if is_free(x) else x, (args, kwargs))
    with torch.enable_grad():
        # A call may write into its parameters, as embeddings with max_norm do; the check has yet to see that.
        parameters = {name: each.clone() for name, each in call.module.named_parameters()}
        outputs = tensors_in(call.run(args, kwargs, parameters))
    return tuple(dict.fromkeys(custom_functions(outputs)))


def _caller(frame: FrameType | None) -> str:
    """Return the line that called a torch function."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_MACHINERY) and module != "torch.nn.functional":
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# Relative error of torch that is tolerated, and the size below which a derivative counts as zero.
_LOST, _NORMAL = 1e-3, 1e-290


class _Asking(Corrections):
    """Corrections that also record whether a call's correction does more than save time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        correction = correction_of(func, args)
        if correction is not None and (
            correction.kind != "slow" or (correction.mends is not None and correction.mends(*args, **kwargs or {}))
        ):
            self.asked = True
        return super().__torch_function__(func, types, args, kwargs)


def torch_alone(
    prepare: Callable[[], Callable[[], Any]],
    comparison: Comparison,
    options: CheckOptions,
    functions: Sequence[type] = (),
) -> tuple[Finding, ...]:
    """Return a warning if torch alone fails at a call where corrections do not."""
    with _Asking() as mode:
        attempt(prepare())
    if not (mode.asked or functions):
        return ()
    failed = tuple(_failed(comparison))
    if not failed:
        return ()
    alone = replace(options, correct=False)
    guilty = list(culprits(prepare, alone, lambda function: function in CORRECTIONS))
    return (_finding(failed, guilty, functions),)


def _failed(comparison: Comparison) -> Iterator[Entry]:
    """Yield the routes that fail only without corrections."""
    point = comparison.problem.point
    for level in comparison.levels:
        for route, corrected in level.outcomes.items():
            if not level.settled or level.compare(route, "", corrected, level.truth).failed:
                continue
            outcome = attempt(evaluate_route, comparison.loss, route, point, level.tuples, level.free)
            entry = level.compare(route, "by torch alone", outcome, level.truth)
            if entry.failed:
                yield entry
            elif (part := _lost_part(corrected, outcome)) > _LOST and _is_sure(comparison, route, level):
                yield replace(entry, status="wrong", error=part)


def _lost_part(corrected: Any, outcome: Any) -> float:
    """Return torch's relative error from corrected derivatives, for tails in which differences show nothing."""
    if not (isinstance(corrected, Tensor) and isinstance(outcome, Tensor)):
        return 0.0
    size = float(corrected.abs().max()) if corrected.numel() else 0.0
    return float((outcome - corrected).abs().max()) / size if size > _NORMAL else 0.0


def _is_sure(comparison: Comparison, route: str, level: Level) -> bool:
    """Whether the corrected derivative is more than rounding."""
    with Corrections():
        return moved_by_rounding(comparison.loss, route, comparison.problem.point, level) < _LOST


def _finding(failed: tuple[Entry, ...], guilty: list[Culprit], functions: Sequence[type]) -> Finding:
    inside = tuple(
        f"torch function {each.name}: {', '.join(errors_by_route(each.failed))}" for each in guilty
    ) or tuple(f"custom Function {each.__name__}" for each in functions)
    known = CODES["HD410"].cause.removesuffix(".")
    cause = f"{known}: by torch alone it {describe_failures(failed)} by {routes_of(failed)}."
    location = next((each.location for each in guilty if each.location), "")
    return make_finding("HD410", failed, cause, inside or errors_by_route(failed), location)
