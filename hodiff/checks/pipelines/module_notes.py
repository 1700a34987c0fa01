"""Notes of a module's check: its variables, state and precision, and what was not checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.pipelines.function_report import constant_inputs
from hodiff.checks.report.data import Entry
from hodiff.checks.subjects.double_precision import is_low
from hodiff.checks.subjects.first_call import Called
from hodiff.checks.subjects.module_calls import ModuleCall, same
from hodiff.checks.subjects.subject import Comparison, Subject, is_coarse, padding_rows, subject_of_call
from hodiff.common.trees import tensors_in
from hodiff.torch_internals.modules import has_backward_hooks
from hodiff.torch_internals.tensors import has_gradient_hooks

# Relative errors of rules that are wrong are seldom smaller.
_SMALL = 1e-4
# Outputs that differ by less are the same computation.
_ROUNDING = 1e-6
# Types of outputs that need no search for tensors.
_NUMBERS = (Tensor, bool, int, float, complex, str, type(None))


def module_notes(
    module: nn.Module,
    called: Called,
    subject: Subject,
    comparison: Comparison,
    unused: Sequence[type],
    failed: Sequence[Entry],
) -> tuple[str, ...]:
    """Return all notes on the check of a module; `unused` runs only if no input needs a gradient."""
    return (
        variables_note(called.root.module, subject),
        *constant_inputs(comparison.problem),
        *map(_unused_function_note, unused),
        *_state_notes(called),
        *_no_grad_notes(called.root),
        *_output_notes(called.root),
        *_hook_notes(module),
        *_leaf_notes(module),
        *_precision_notes(called.root, comparison),
        *_small_error_notes(failed),
    )


def variables_note(module: nn.Module, subject: Subject) -> str:
    """Return a note that counts the numbers differentiated by, and names the constants."""
    frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
    parameters, *inputs = subject.inputs
    return (
        f"differentiated by {_numel(parameters)} numbers in parameters and {_numel(inputs)} in inputs"
        + (f"; {frozen} in frozen parameters are constants" if frozen else "")
        + ("; so are rows of embeddings at padding_idx" if parameters and padding_rows(module) else "")
    )


def _numel(tree: Any) -> int:
    return sum(each.numel() for each in tensors_in(tree))


def _unused_function_note(function: type) -> str:
    name = function.__name__
    return (
        f"calls {name} where no input needs a gradient, so inputs are constants here; for the other way, wrt='inputs'"
    )


def _small_error_notes(failed: Sequence[Entry]) -> Iterator[str]:
    """Note errors so small that a solver's step control may cause them."""
    wrong = [entry.error for entry in failed if entry.status == "wrong" and entry.error is not None]
    if wrong and max(wrong) < _SMALL:
        yield (
            f"what is wrong is a part of {max(wrong):.0e} of the whole: a rule of a small part of it, or a solver that "
            "chooses its steps without gradients; tighten its tolerance and see"
        )


def _precision_notes(root: ModuleCall, comparison: Comparison) -> Iterator[str]:
    """Note computations in a lower precision than float64."""
    if comparison.problem.eps <= torch.finfo(torch.float64).eps:
        return
    low = {str(each.dtype) for each in tensors_in((root.output, root.args, root.kwargs)) if is_low(each)}
    if low:
        yield f"computes in {', '.join(sorted(low)).replace('torch.', '')}; comparisons are as coarse"
        return
    inside = list(_coarse_inside(root, {root.signature: True}))
    if inside:
        names = dict.fromkeys(f"{type(call.module).__name__}.forward" for call in inside)
        yield f"computes in a lower precision inside: {', '.join(names)}; comparisons are as coarse"


def _coarse_inside(call: ModuleCall, known: dict[tuple[str, ...], bool]) -> Iterator[ModuleCall]:
    """Yield the innermost calls that compute in a lower precision; each signature is tested once."""
    coarse = []
    for child in call.children:
        if child.signature not in known:
            known[child.signature] = is_coarse(subject_of_call(child))
            coarse += [child] if known[child.signature] else []
    if not any(known[child.signature] for child in call.children):
        yield call
    for child in coarse:
        yield from _coarse_inside(child, known)


def _state_notes(called: Called) -> Iterator[str]:
    if called.unsteady is not None:
        yield f"in {called.unsteady.label}, {called.reason}: here every call began in the same state"
    precision = called.root.setting.precision
    if precision is not None and precision.places:
        yield f"computes in a lower precision inside: {', '.join(precision.places)}; judged in float64 throughout"


def _no_grad_notes(root: ModuleCall) -> Iterator[str]:
    """Note that the module computes something else when gradients are not recorded."""
    run = root.again()
    with torch.no_grad():
        output = attempt(run)
    # Kernels without gradients may round differently, hence the tolerance.
    if not isinstance(output, Failure) and not same(output, root.again()(), _ROUNDING):
        yield "computes something else under torch.no_grad(): the derivatives are of what it computes with gradients"


def _output_notes(root: ModuleCall) -> Iterator[str]:
    """Note objects in the output in which tensors cannot be found."""
    kinds = {type(each).__name__ for each in tree_leaves(root.output) if not isinstance(each, _NUMBERS)}
    if kinds:
        yield (
            f"of the output, {', '.join(sorted(kinds))} is not looked into; take what counts of it by a loss, "
            "`loss=lambda output: ...`"
        )


def _hook_notes(module: nn.Module) -> Iterator[str]:
    """Note backward hooks: modules' hooks change gradients only, and parameters' hooks are not run."""
    parts = [name or type(part).__name__ for name, part in module.named_modules() if has_backward_hooks(part)]
    if parts:
        yield (
            f"backward hooks change gradients but no other derivative, and torch.func does not support them: hooks of "
            f"modules "
            f"{', '.join(parts)}; check without them, handle.remove()"
        )
    hooked = [name for name, each in module.named_parameters() if has_gradient_hooks(each)]
    if hooked:
        yield f"hooks on gradients of parameters do not run: hooks of {', '.join(hooked)}"


def _leaf_notes(module: nn.Module) -> Iterator[str]:
    """Note tensors that require a gradient but are no parameters."""
    own = {id(each) for each in module.parameters()}
    names = [
        f"{path}.{name}".strip(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if not (name.startswith("_") and isinstance(value, dict))
        and any(each.requires_grad and each.is_leaf and id(each) not in own for each in tensors_in(value))
    ]
    if names:
        yield f"requires a gradient and is no parameter, so a constant here: {', '.join(names)}"
