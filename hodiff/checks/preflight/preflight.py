"""`preflight`: lists a model's operators and which second derivatives are right, before computing any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.checks.attempts import Failure, attempt, first_line
from hodiff.checks.module_buffers import buffers_put_back
from hodiff.checks.preflight.listeners import (
    CallListener,
    ChangeListener,
    HookListener,
    OperatorUse,
    WatchedCorrections,
)
from hodiff.checks.preflight.operator_routes import BAD, GOOD, RANKS, FunctionDefect, custom_functions, function_defects
from hodiff.checks.subjects.setting import deep_copy, generators_of
from hodiff.common.module_state import at_another_point
from hodiff.common.randomness import RandomState
from hodiff.common.trees import tensors_in
from hodiff.displays import Cell, badge, element, page, table
from hodiff.errors import HodiffError, InputError
from hodiff.graphs import leaves_made_inside
from hodiff.recompute.checkpoint import stored_instead
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.graph_nodes import operator_of
from hodiff.torch_internals.compilers.dynamo import compiled_code, module_of


def preflight_html(
    operators: Sequence[OperatorUse],
    functions: Sequence[FunctionDefect],
    remarks: Sequence[str],
    routes: Mapping[str, str],
    verdict: str,
) -> str:
    """Return the verdict, the operators that are not right by every route, their remedies, and the remarks."""
    tint = "error" if BAD.intersection(routes.values()) else "ok" if set(routes.values()) <= GOOD else "warning"
    listed = [each for each in operators if each.worst != "right"]
    rows = [(each.name, f"{each.calls:,}", *(_cell(each.routes[route]) for route in ROUTES)) for each in listed]
    fine = sum(each.calls for each in operators) - sum(each.calls for each in listed)
    rows.append(("all others", f"{fine:,}", *[_cell("right")] * len(ROUTES)))
    rows.append((element("b", "all together"), "", *(_cell(routes[route]) for route in ROUTES)))
    said = [f"{each.name}: {each.remedy}" for each in listed if each.remedy]
    said += [f"{each.name}: {each.defect}; {each.remedy}" for each in functions]
    return page(
        element("p", badge(verdict, tint)),
        table(("operator", "calls", *ROUTES), rows),
        *(element("p", each) for each in [*said, *remarks]),
    )


def _cell(word: str) -> Cell:
    return Cell(word, "ok" if word in GOOD else "error" if word in BAD else "warning")


@dataclass(frozen=True)
class Preflight:
    """Report of `preflight`.

    Attributes:
        operators: Every torch function that returns differentiable tensors, worst first.
        functions: Defects of custom Functions.
        remarks: Further facts: random numbers, tensors changed in place.
        routes: By route, the worst verdict among the operators.
        cuts: Number of times that differentiated tensors are taken out of the graph.
    """

    operators: tuple[OperatorUse, ...]
    functions: tuple[FunctionDefect, ...]
    remarks: tuple[str, ...]
    routes: Mapping[str, str]
    cuts: int = 0

    @property
    def ok(self) -> bool:
        """Whether no route is wrong, raises or is non-finite, and no custom Function has a defect."""
        return not self.functions and not BAD.intersection(self.routes.values())

    def __str__(self) -> str:
        """Return a table of operators that are not right by every route, the remarks, and the verdict of each route."""
        listed = [each for each in self.operators if each.worst != "right"]
        fine = sum(each.calls for each in self.operators) - sum(each.calls for each in listed)
        short = ["rr", "fr", "rf", "ff"]
        width = max([len(each.name) for each in listed], default=8)
        lines = [f"{'operator'.ljust(width)}  calls  {'  '.join(each.ljust(11) for each in short)}".rstrip()]
        for each in listed:
            cells = "  ".join(each.routes[route].ljust(11) for route in ROUTES)
            lines.append(f"{each.name.ljust(width)}  {each.calls:5}  {cells}".rstrip())
        calls = f"{fine} call{'s' * (fine != 1)} of operators that are right by every route"
        lines = [*lines, f"and {calls}"] if listed else [calls]
        lines += [f"{each.name}: {each.remedy}" for each in listed if each.remedy]
        lines += [f"{each.name}: {each.defect}; {each.remedy}" for each in self.functions]
        lines += self.remarks
        lines += [f"{route}: {self.routes[route]}" for route in ROUTES]
        return "\n".join([*lines, self.verdict])

    def _repr_html_(self) -> str:
        return preflight_html(self.operators, self.functions, self.remarks, self.routes, self.verdict)

    @property
    def verdict(self) -> str:
        """Recommendation, in a sentence."""
        words = set(self.routes.values())
        if words <= GOOD:
            but = ", but see the remarks" if self.remarks else ""
            return f"verdict: all four routes are right{' where the graph is not cut' if self.cuts else ''}{but}"
        bad = [route for route in ROUTES if self.routes[route] in BAD]
        rest = [route for route in ROUTES if route not in bad]
        if "not audited" in words:
            seen = f"; do not take {', '.join(bad)}" if bad else ""
            return f"verdict: not all is known, compare the routes with hodiff.check(f, x){seen}"
        if not bad:
            return "verdict: right away from kinks, and where random numbers stay the same"
        return f"verdict: take {', '.join(rest)}" if rest else "verdict: no route is right, see the remedies above"


@compiled_code(runs=False)
@at_another_point
def preflight(model_or_function: Callable[..., Any], *inputs: Any, correct: bool = True, **options: Any) -> Preflight:
    r"""List a model's operators in one forward pass, and the routes by which its second derivatives are right.

    Operators are looked up in hodiff's audit of torch's operator database and in the table of corrections; custom
    Functions are found in the graph. Nothing is differentiated, modules are copied, and random states are restored.

    Args:
        model_or_function: A module or a function of tensors.
        *inputs: Its positional arguments.
        correct: Whether derivatives are taken by hodiff's transforms or within `hodiff.corrected()`; else by torch
            alone.
        **options: Its keyword arguments, such as the tensors of a Hugging Face batch.

    Returns:
        A report; its `str` is a table that ends in a verdict, `ok` says whether every route is right, `routes` gives
        the verdict on each route.

    Raises:
        InputError: If the first argument is not callable, or does not run.

    Example:
        >>> import torch, hodiff
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Tanh())
        >>> hodiff.preflight(model, torch.randn(2, 3)).ok
        True
        >>> hodiff.preflight(model, torch.randn(2, 3), correct=False).routes["reverse-over-forward"]
        'wrong'
    """
    if not callable(model_or_function):
        raise InputError(
            f"preflight: model_or_function: expected a module or a function, got {type(model_or_function).__name__}."
        )
    model = _copy_of(module_of(model_or_function))
    inputs, options = pytree.tree_map_only(Tensor, _recording, (inputs, options))
    held = {id(each) for each in pytree.tree_leaves((inputs, options)) if isinstance(each, Tensor)}
    modules = [model] if isinstance(model, torch.nn.Module) else []
    generators = [each for module in modules for each in generators_of(module)]
    random = RandomState(tensors_in((inputs, options)), generators, foreign=True)
    with buffers_put_back(*modules), random.replayed(), torch.enable_grad():
        held |= {id(each) for module in modules for each in (*module.parameters(), *module.buffers())}
        corrections, remarks = WatchedCorrections(), ChangeListener(held)
        listener, hooks = CallListener(correct, corrections), HookListener()
        with stored_instead(), remarks, corrections, hooks, listener:
            outputs = _run(model, inputs, options)
        own = leaves_made_inside(
            pytree.tree_leaves(outputs), lambda: pytree.tree_leaves(_run(model, inputs, options)), known=held
        )
        with nullcontext() if correct else hooks:
            # Torch alone uses its own checkpoints, which hodiff replaces.
            outputs = outputs if correct else _run(model, inputs, options)
            # A model may take another path if its inputs need no gradient, as in training.
            if modules:
                still, named = pytree.tree_map_only(Tensor, Tensor.detach, (inputs, options))
                with stored_instead(), corrections if correct else nullcontext():
                    outputs = (outputs, _run(model, still, named))
    operators = sorted(listener.uses.values(), key=lambda use: -RANKS.index(use.worst))
    worst = {route: max((use.routes[route] for use in operators), key=RANKS.index, default="right") for route in ROUTES}
    custom = tuple(dict.fromkeys(custom_functions(pytree.tree_leaves(outputs))))
    if custom or listener.hooks:
        worst = {route: max(word, "not audited", key=RANKS.index) for route, word in worst.items()}
    listener.cuts += len(own)
    found = (*(defect for function in custom for defect in function_defects(function)), *hooks.defects())
    names = [operator_of(each) or each.__name__ for each in custom]
    unknown = tuple(f"{each} is a custom Function, whose rules no audit knows" for each in names)
    for each in found:
        worst = {
            route: "wrong" if route in each.wrong else "raises" if route in each.missing else word
            for route, word in worst.items()
        }
    said = (*remarks.sentences(), *listener.sentences(), *unknown)
    return Preflight(tuple(operators), found, said, worst, listener.cuts)


def _copy_of(model: Any) -> Any:
    """Return a copy of a module, which its forward may change; return functions and uncopiable modules as they are."""
    if not isinstance(model, torch.nn.Module):
        return model
    copy = attempt(deep_copy, model)
    return model if isinstance(copy, Failure) else copy


def _run(model: Callable[..., Any], inputs: Any, options: Any) -> Any:
    try:
        return model(*inputs, **options)
    except HodiffError:
        raise
    except Exception as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise InputError(
            f"preflight: model_or_function: expected {name} to run with these inputs, got {first_line(error)}. Check "
            "that it runs without preflight."
        ) from error


def _recording(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor
