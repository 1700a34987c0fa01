"""`check_module`: compares all routes for a whole module, and finds the submodule at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hodiff.checks.attempts import first_line
from hodiff.checks.comparisons.surrogates import declares_surrogate
from hodiff.checks.comparisons.vmapped import compile_checks
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.findings.make_finding import statuses
from hodiff.checks.functions.check_function import check_function
from hodiff.checks.functions.conclusion import Switches, title
from hodiff.checks.modules.faults import Inquiry, Search, stale_finding, unsteady_finding
from hodiff.checks.modules.first_call import first_call
from hodiff.checks.modules.notes import notes_of, what_moves
from hodiff.checks.probes.cause import UNRELIABLE
from hodiff.checks.progress import told
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Finding, Report
from hodiff.checks.subjects.module_calls import ModuleCall, is_repeatable
from hodiff.checks.subjects.setting import Setting, surroundings_put_back
from hodiff.checks.subjects.subject import (
    WRT,
    Comparison,
    Subject,
    compare_routes,
    failures,
    problem_of,
    raises,
    subject_of_call,
    tensors_of,
)
from hodiff.checks.subjects.torch_functions import custom_classes, torch_alone
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.common.options import is_int, require_choice, require_int
from hodiff.common.randomness import RandomState
from hodiff.corrections import corrected
from hodiff.errors import InputError

# Defects that are only warnings if the reverse-mode routes, which transforms try first, are right.
_MISSING = {"HD401", "HD403", "HD405", "HD406", "HD408"}


def check_module(
    module: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    order: int = 2,
    seed: int = 0,
    correct: bool = True,
    wrt: str = "both",
    fixed: Sequence[int] = (),
    backend: str = "",
    approximate: bool = False,
) -> Report:
    r"""Check the derivatives of a module's loss by every route, and find the submodule at fault.

    The parameters that require grad and the floating inputs are moved along random directions,

    .. math:: \phi(t) = \ell(\mathrm{module}(x + V_x t;\ \theta + V_\theta t)), \qquad t \in \mathbb{R}^2,

    in proportion to their sizes. The derivatives of :math:`\phi` at 0 are computed by all ``2**k`` routes for each
    order k up to ``order``, in float64, and compared with differences and with each other. Where they disagree, the
    submodules are checked alone with their recorded arguments, from the outside inwards, until a submodule is at fault
    whose own submodules are not; then the torch functions that it calls are checked. Before that, two forward passes
    are compared. The module itself is not changed: all this is done with a copy.

    Args:
        module: The module, as it will be used: in evaluation mode, unless its training mode is deterministic.
        inputs: A tensor, or a tuple of arguments. Floating tensors are differentiated, everything else is constant.
        loss: Maps the output to a scalar; by default a seeded random contraction of the output's tensors and of
            their squares.
        order: Highest order of derivative, at least 1.
        seed: Seed of the contraction and the directions.
        correct: Whether to take derivatives within `hodiff.corrected()`; else by torch alone.
        wrt: Whether to differentiate by the ``"parameters"``, the ``"inputs"`` or ``"both"``.
        fixed: Positions of floating inputs to treat as constants, such as points that a module compares with its own.
        backend: Backend of `torch.compile`; empty to skip that comparison.
        approximate: Whether the module declares derivatives that are not its own, such as a quantizer's.

    Returns:
        A report; its findings name the submodule and, if it can be found, the torch function.

    Raises:
        InputError: If there is nothing to check; the message says why.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Tanh())
        >>> check_module(model, torch.ones(2, 3)).ok
        True
        >>> report = check_module(model, torch.ones(2, 3), correct=False)
        >>> report.findings[0].evidence[0]
        'submodule 1 (LayerNorm)'

    Source:
        A. Griewank & A. Walther, Evaluating Derivatives, 2nd ed., 2008, chapters 3 and 5, for the routes.
    """
    _require(module, order, loss)
    _require_positions(fixed, len(inputs) if type(inputs) is tuple else 1)
    require_choice("check", "wrt", wrt, WRT)
    mode: Callable[[], Any] = corrected if correct else nullcontext
    inputs = inputs if type(inputs) is tuple else (inputs,)
    with _apart(module):
        called = first_call(module, inputs)
        root, args = called.root, called.args
        heading = title(type(module).__name__, _shapes(args), correct=correct)
        if called.unsteady is not None and not is_repeatable(root):
            return Report(heading, (), (unsteady_finding(called.unsteady, called.reason),))
        if called.stale is not None:
            return Report(heading, (), (stale_finding(called.stale),))
        _require_scalar(loss, root)
        aside = () if wrt != "both" else tuple(set(custom_classes(root, inputs=False)) - set(custom_classes(root)))
        # Training, without input gradients, runs these custom Functions: differentiate by parameters to check them.
        wrt = "parameters" if aside else wrt
        subject = subject_of_call(root, loss, wrt, fixed)
        if approximate or _declares_surrogate(module, subject):
            return _of_surrogate(module, subject, Switches(order, vmap=False, seed=seed, correct=correct))
        with mode():
            comparison = compare_routes(subject, order, seed, curved=loss is None)
            entries = (*comparison.entries, *_compiled(root, loss, wrt, fixed, comparison, order, seed, backend))

        def subject_for(call: ModuleCall) -> Subject:
            return subject_of_call(call, None, wrt, fixed) if call is root else subject_of_call(call)

        found: list[Finding] = []
        failed = tuple(entry for entry in comparison.entries if entry.failed)
        raising = statuses(failed) == {"raises"}

        def failures_of(subject: Subject) -> tuple[Any, ...]:
            with mode():
                # Testing whether a route raises takes a tenth of the time of comparing all routes.
                return () if raising and not raises(subject, order, seed) else failures(subject, order, seed)

        if failed:
            inquiry = Inquiry(mode, correct, order, seed, subject_for, _others_left(wrt, fixed))
            for guilty in Search(failures_of, subject_for).run(root, failed, loss):
                found += inquiry.findings(guilty)
        found += diagnose(entries[len(comparison.entries) :], ())
        if all(entry.status == "raises" and "forward" in entry.route for entry in failed):
            found = [replace(each, severity="warning") if each.code in _MISSING else each for each in found]
        if correct and not UNRELIABLE & {each.code for each in found}:
            # This finding comes last, as it is a warning.
            found += torch_alone(lambda: _again(root, loss), comparison, order, seed, custom_classes(root))
        notes = notes_of(module, called, subject, comparison, aside, failed)
    return Report(heading, entries, tuple(found), notes)


def compare_module(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    loss: Callable[[Any], Tensor] | None,
    order: int,
    seed: int,
    correct: bool,
    wrt: str,
    fixed: Sequence[int],
) -> Comparison | None:
    """Return the comparison of all routes, the quick part of a check; None if routes need not agree."""
    with _apart(module):
        called = first_call(module, inputs)
        subject = subject_of_call(called.root, loss, wrt, fixed)
        if _declares_surrogate(module, subject):
            return None
        with corrected() if correct else nullcontext():
            return compare_routes(subject, order, seed, curved=loss is None)


@contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """Silence warnings, show progress, and restore random generators, default dtype and class attributes."""
    with (
        silence_torch_warnings(),
        told(f"check of {type(module).__name__}"),
        RandomState((), foreign=True).replayed(),
        surroundings_put_back(module),
    ):
        yield


def _declares_surrogate(module: nn.Module, subject: Subject) -> bool:
    leaves, structure = tree_flatten(subject.inputs)

    def function(*moving: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_of(subject.function(*tree_unflatten(moving, structure))))

    return declares_surrogate(module, function, tuple(leaves))


def _of_surrogate(module: nn.Module, subject: Subject, switches: Switches) -> Report:
    """Check a module with surrogate derivatives as a function, comparing routes with each other."""

    @wraps(subject.function)
    def function(*inputs: Any) -> Any:
        return subject.function(*inputs)

    function.__name__ = type(module).__name__
    report = check_function(function, subject.inputs, switches, approximate=True)
    return replace(report, notes=(*report.notes, what_moves(module, subject)))


def _again(root: ModuleCall, loss: Callable[[Any], Tensor] | None) -> Callable[[], Any]:
    run = root.again()
    return run if loss is None else lambda: loss(run())


def _compiled(
    root: ModuleCall,
    loss: Callable[[Any], Tensor] | None,
    wrt: str,
    fixed: Sequence[int],
    comparison: Comparison,
    order: int,
    seed: int,
    backend: str,
) -> Iterator[Entry]:
    """Yield comparisons of compiled with eager code."""
    if backend:
        # Compilers cannot trace the contexts of a setting.
        generator = torch.Generator().manual_seed(seed)
        problem = problem_of(subject_of_call(replace(root, setting=Setting()), loss, wrt, fixed), generator)
        size = max(level.scale for level in comparison.levels)
        yield from compile_checks(problem, order, size, backend, generator)


def _shapes(args: tuple[Any, ...]) -> str:
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)


def _require(module: Any, order: Any, loss: Any) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"check: f: expected a torch.nn.Module, got {type(module).__name__}. Use hodiff.check for functions."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            "check: f: expected a module in Python, got a scripted or traced one, whose submodules and calls cannot be "
            "seen. Check the module that it was made of, or it as a function: `hodiff.check(lambda x: module(x), x)`."
        )
    require_int("check", "order", order, 1)
    if loss is not None and not callable(loss):
        raise InputError(
            f"check: loss: expected a function of the module's output, got {type(loss).__name__}. "
            "Bind the target: `loss=lambda output: F.mse_loss(output, target)`."
        )


def _others_left(wrt: str, fixed: Sequence[int]) -> str:
    """Return advice on differentiating by fewer variables, unless the caller does so already."""
    ways = ['`wrt="parameters"`'] * (wrt != "parameters") + ["`fixed=(0,)` for the first input"] * (
        wrt != "parameters" and not fixed
    )
    return f"differentiate by what it leaves: {', '.join(ways)}, or " if ways else ""


def _require_positions(fixed: Any, count: int) -> None:
    if not isinstance(fixed, (tuple, list)) or not all(is_int(each) and 0 <= each < count for each in fixed):
        raise InputError(
            f"check: fixed: expected a tuple of positions of the {count} inputs, from 0 to {count - 1}, got {fixed!r}; "
            "the first alone is `fixed=(0,)`."
        )


def _require_scalar(loss: Callable[[Any], Tensor] | None, root: ModuleCall) -> None:
    if loss is None:
        return
    try:
        with torch.no_grad():
            value = loss(root.output)
    except InputError:
        # The loss raised hodiff's own message.
        raise
    except Exception as error:
        raise InputError(
            f"check: loss: expected a function of the module's float64 output, but it raised "
            f"{first_line(error)}. Make what it holds float64: `target.double()`."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"check: loss: expected a floating scalar, got {got}. Reduce it: `loss.mean()`.")
