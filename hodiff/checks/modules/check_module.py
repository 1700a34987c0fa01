"""`check_module`: a whole module by every route, and which of its submodules is at fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.attempts import first_line
from hodiff.checks.modules.faults import Inquiry, coarse_findings, count_numbers, unsteady_finding
from hodiff.checks.modules.module_calls import CallFailed, ModuleCall, unsteady_call
from hodiff.checks.modules.search import Search
from hodiff.checks.modules.subjects import Subject, compare_routes, failures, subject_of_call
from hodiff.checks.report.report import Finding, Report
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.common.options import require_int
from hodiff.corrections import corrected
from hodiff.errors import InputError

# Options of `check` that are ignored for a module, and options that are refused.
_IGNORED = frozenset({"vmap", "compile", "scipy", "method", "ulps"})
_REFUSED = frozenset({"approximate", "reference"})


def check_module(
    module: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    order: int = 2,
    seed: int = 0,
    correct: bool = True,
    **options: Any,
) -> Report:
    r"""Check the derivatives of a module's loss by every route, and find the submodule at fault.

    The parameters that require grad and the floating inputs are moved along random directions,

    .. math:: \phi(t) = \ell(\mathrm{module}(x + V_x t;\ \theta + V_\theta t)), \qquad t \in \mathbb{R}^2,

    each in proportion to its size, and the derivatives of :math:`\phi` at 0 are taken by all ``2**k`` routes for each
    order k up to ``order``, in float64, and compared with differences and with each other. Where they disagree, the
    submodules are checked alone at what they were called with, from the outside inwards, until one is at fault whose
    own submodules are not; then the torch functions that it calls are. Before all this, two forward passes are
    compared. Everything happens on a copy.

    Args:
        module: The module, as it will be used: in evaluation mode, unless its training mode is deterministic.
        inputs: A tensor, or a tuple of arguments. Floating tensors are differentiated, everything else is constant.
        loss: Maps the output to a scalar; by default a seeded random contraction of the output's tensors and of
            their squares.
        order: Highest order of derivative, at least 1.
        seed: Seed of the contraction and the directions.
        correct: Whether derivatives are taken within `hodiff.corrected()`; else what torch alone does.
        **options: Other options of `hodiff.check`: vmap, compile, scipy, ulps and method have no meaning for a module;
            approximate and reference are refused.

    Returns:
        A report; its findings name the submodule and, where it can be told, the torch function.

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
    _require(module, order, loss, options)
    mode: Callable[[], Any] = corrected if correct else nullcontext
    args = tree_map_only(Tensor, _in_double, inputs if type(inputs) is tuple else (inputs,))
    with silence_torch_warnings():
        own = _copy_of(module)
        try:
            root, blamed, reason = unsteady_call(own, args)
        except CallFailed as failure:
            raise InputError(
                f"check_module: module: expected {type(module).__name__}(*inputs) to run in float64, but "
                f"{failure.call.label} raised {first_line(failure.error)}. Check the inputs; tensors that it makes "
                "must have the dtype of its inputs."
            ) from failure.error
        title = f"{type(module).__name__} at {_shapes(args)}"
        if blamed is not None:
            return Report(title, (), (unsteady_finding(blamed, reason),))
        _require_scalar(loss, root)
        subject = subject_of_call(root, loss)
        with mode():
            entries = compare_routes(subject, order, seed, curved=loss is None)

        def failures_of(subject: Subject) -> tuple[Any, ...]:
            with mode():
                return failures(subject, order, seed)

        found: list[Finding] = [*coarse_findings(root)]
        failed = tuple(entry for entry in entries if entry.failed)
        if failed:
            inquiry = Inquiry(mode, correct, order, seed)
            for guilty in Search(failures_of).run(root, failed, loss):
                found += inquiry.findings(guilty)
    return Report(title, entries, tuple(found), (_note(own, subject),))


def _copy_of(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).double()
    except Exception as error:
        raise InputError(
            f"check_module: module: expected a module that can be copied, but copy.deepcopy raised "
            f"{first_line(error)}. Remove tensors with a graph from its attributes, and call lazy modules once before."
        ) from error


def _in_double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().clone()
    return tensor.double() if tensor.is_floating_point() else tensor


def _note(module: nn.Module, subject: Subject) -> str:
    frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
    parameters, *inputs = subject.inputs
    return (
        f"differentiated by {count_numbers(parameters)} numbers in parameters and {count_numbers(inputs)} in inputs"
        + (f"; {frozen} in frozen parameters are constants" if frozen else "")
    )


def _shapes(args: tuple[Any, ...]) -> str:
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)


def _require(module: Any, order: Any, loss: Any, options: dict[str, Any]) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"check_module: module: expected a torch.nn.Module, got {type(module).__name__}. Use hodiff.check for "
            "functions."
        )
    require_int("check_module", "order", order, 1)
    if loss is not None and not callable(loss):
        raise InputError(
            f"check_module: loss: expected a function of the module's output, got {type(loss).__name__}. "
            "Bind the target: `loss=lambda output: F.mse_loss(output, target)`."
        )
    for name in sorted(_REFUSED.intersection(options)):
        if options[name]:
            raise InputError(
                f"check_module: {name}: expected nothing, got {options[name]!r}. It is for functions; check what the "
                "module calls by itself."
            )
    unknown = sorted(set(options) - _IGNORED - _REFUSED)
    if unknown:
        raise InputError(
            f"check_module: {unknown[0]}: expected an option of hodiff.check, got {options[unknown[0]]!r}."
        )


def _require_scalar(loss: Callable[[Any], Tensor] | None, root: ModuleCall) -> None:
    if loss is None:
        return
    try:
        with torch.no_grad():
            value = loss(root.output)
    except InputError:
        # This loss has its own message.
        raise
    except Exception as error:
        raise InputError(
            f"check_module: loss: expected a function of the module's float64 output, but it raised "
            f"{first_line(error)}. Make what it holds float64: `target.double()`."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"check_module: loss: expected a floating scalar, got {got}. Reduce it: `loss.mean()`.")
