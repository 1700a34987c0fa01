"""`preflight`: what a model calls, and which of its second derivatives exist and are right, before any is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from hodiff.checks.attempts import Failure, attempt, first_line
from hodiff.checks.audit.on_file import audit_on_file
from hodiff.checks.module_buffers import buffers_put_back
from hodiff.checks.preflight.function_defects import FunctionDefect, custom_functions, function_defects
from hodiff.checks.subjects.setting import deep_copy, generators_of
from hodiff.common.randomness import RandomState
from hodiff.common.trees import tensors_in
from hodiff.corrections import Corrections, Declined
from hodiff.corrections.distances.squares import LENGTHS
from hodiff.corrections.registry import Correction, correction_of
from hodiff.errors import HodiffError, InputError
from hodiff.recompute.checkpoint import stored_instead
from hodiff.routes import ROUTES
from hodiff.torch_internals.interception import DispatchMode
from hodiff.torch_internals.operators import OpOverload, OpOverloadPacket, function_of_operator, schema_of
from hodiff.torch_internals.transforms import in_transform

# Where the audit's names of operators begin, as functions and methods of one operator share an entry.
# What computes nothing of its tensors.
_NO_OPERATIONS = ("__get__", "__set__", ".requires_grad_")
# What takes a tensor out of the graph.
_DATA: Any = Tensor.data
_CUTS = {Tensor.detach, Tensor.detach_, torch.detach, Tensor.numpy, Tensor.item, Tensor.tolist, _DATA.__get__}
# By what name the database has methods that are called otherwise.
_ALIASES = {
    "__pow__": "pow",
    "__ipow__": "pow",
    "__rtruediv__": "__rdiv__",
    "__floordiv__": "div.floor_rounding",
    "copy_": "clone",
    "type_as": "to",
}
_PREFIXES = ("", "nn.functional.", "linalg.", "special.", "fft.")

# From the audit's words to the table's, from good to bad: a route is as good as its worst operator.
_RANKS = ("right", "corrected", "random", "not smooth", "not audited", "non-finite", "timed out", "raises", "wrong")
_GOOD = frozenset({"right", "corrected"})
_BAD = frozenset({"non-finite", "raises", "wrong"})


@dataclass
class OperatorUse:
    """One torch function that the model calls.

    Attributes:
        name: As users write it.
        calls: How often it was called.
        routes: By route, "right", "corrected", "not smooth", "random", "raises", "wrong", "non-finite" or
            "not audited".
        remedy: What to do about it; empty where nothing is amiss.
    """

    name: str
    calls: int = 0
    routes: dict[str, str] = field(default_factory=dict)
    remedy: str = ""

    @property
    def worst(self) -> str:
        """The worst word of its routes."""
        return max(self.routes.values(), key=_RANKS.index, default="right")


@dataclass(frozen=True)
class Preflight:
    """What `preflight` saw.

    Attributes:
        operators: Every torch function called on or returning floating-point tensors, worst first.
        functions: Custom Functions that lack something.
        remarks: What else deserves to be known: random numbers, tensors changed in place.
        routes: By route, the worst word among the operators.
        cuts: How often what is differentiated is taken out of the graph.
    """

    operators: tuple[OperatorUse, ...]
    functions: tuple[FunctionDefect, ...]
    remarks: tuple[str, ...]
    routes: Mapping[str, str]
    cuts: int = 0

    @property
    def ok(self) -> bool:
        """Whether every route exists and is right, as far as is known."""
        return not self.functions and not _BAD.intersection(self.routes.values())

    def __str__(self) -> str:
        """A table of what is not simply right, the remarks, and the verdict of each route."""
        listed = [each for each in self.operators if each.worst != "right"]
        fine = sum(each.calls for each in self.operators) - sum(each.calls for each in listed)
        short = ["rr", "fr", "rf", "ff"]
        width = max([len(each.name) for each in listed], default=8)
        lines = [f"{'operator'.ljust(width)}  calls  " + "  ".join(each.ljust(11) for each in short)]
        for each in listed:
            cells = "  ".join(each.routes[route].ljust(11) for route in ROUTES)
            lines.append(f"{each.name.ljust(width)}  {each.calls:5}  {cells}".rstrip())
        lines.append(f"and {fine} calls of operators that are right by every route")
        lines += [f"{each.name}: {each.remedy}" for each in listed if each.remedy]
        lines += [f"{each.name}: {each.defect}; {each.remedy}" for each in self.functions]
        lines += self.remarks
        lines += [f"{route}: {self.routes[route]}" for route in ROUTES]
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        words = set(self.routes.values())
        if words <= _GOOD:
            but = ", but see the remarks" if self.remarks else ""
            return f"verdict: all four routes are right{' where the graph is not cut' if self.cuts else ''}{but}"
        bad = [route for route in ROUTES if self.routes[route] in _BAD]
        rest = [route for route in ROUTES if route not in bad]
        if "not audited" in words:
            seen = f"; do not take {', '.join(bad)}" if bad else ""
            return f"verdict: not all is known, compare the routes with hodiff.check(f, x){seen}"
        if not bad:
            return "verdict: right away from kinks, and where random numbers stay the same"
        return f"verdict: take {', '.join(rest)}" if rest else "verdict: no route is right, see the remedies above"


def preflight(model_or_function: Callable[..., Any], *inputs: Any, correct: bool = True, **options: Any) -> Preflight:
    r"""List what a model calls in one forward pass, and by which routes its second derivatives exist and are right.

    Operators are looked up in hodiff's audit of torch's operator database and in the table of corrections; custom
    Functions are found in the graph. Nothing is differentiated, modules are copied, and random states are put back.

    Args:
        model_or_function: A module or a function of tensors.
        *inputs: What it is called with.
        correct: Whether derivatives are taken by hodiff's transforms or within `hodiff.corrected()`; else what torch
            alone would do.
        **options: What else it is called with, by name, such as the tensors of a Hugging Face batch.

    Returns:
        A report; its `str` is a table that ends in a verdict, `ok` says whether every route is right, `routes` what
        each is.

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
    model = _copy_of(model_or_function)
    inputs, options = pytree.tree_map_only(Tensor, _recording, (inputs, options))
    held = {id(each) for each in pytree.tree_leaves((inputs, options)) if isinstance(each, Tensor)}
    modules = [model] if isinstance(model, torch.nn.Module) else []
    generators = [each for module in modules for each in generators_of(module)]
    random = RandomState(tensors_in((inputs, options)), generators, foreign=True)
    with buffers_put_back(*modules), random.replayed(), torch.enable_grad():
        held |= {id(each) for module in modules for each in (*module.parameters(), *module.buffers())}
        corrections, remarks = _Corrections(), _Remarks(held)
        listener = _Listener(correct, corrections)
        with stored_instead(), remarks, corrections, listener:
            outputs = _run(model, inputs, options)
        # A model may take another way where its inputs need no gradient, as in training.
        if modules:
            still, named = pytree.tree_map_only(Tensor, Tensor.detach, (inputs, options))
            outputs = (outputs, _run(model, still, named))
    operators = sorted(listener.uses.values(), key=lambda use: -_RANKS.index(use.worst))
    worst = {
        route: max((use.routes[route] for use in operators), key=_RANKS.index, default="right") for route in ROUTES
    }
    custom = tuple(dict.fromkeys(custom_functions(pytree.tree_leaves(outputs))))
    if custom:
        worst = {route: max(word, "not audited", key=_RANKS.index) for route, word in worst.items()}
    found = tuple(defect for function in custom for defect in function_defects(function))
    unknown = tuple(f"{each.__name__} is a custom Function, whose rules no audit knows" for each in custom)
    for each in found:
        worst = {
            route: "wrong" if route in each.wrong else "raises" if route in each.missing else word
            for route, word in worst.items()
        }
    said = (*remarks.sentences(), *listener.sentences(), *unknown)
    return Preflight(tuple(operators), found, said, worst, listener.cuts)


def _copy_of(model: Any) -> Any:
    """A module that may be changed by its forward; what is no module, or cannot be copied, as it is."""
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


class _Corrections(Corrections):
    """Notes why the rule of the last call declined it."""

    def __init__(self) -> None:
        super().__init__()
        self.why: Declined | None = None

    def watch(self, call: Callable[[], Any]) -> tuple[Any, Declined | None]:
        """The value of a call, and why its rule declined it, if one did."""
        self.why = None
        return call(), self.why

    def declined(self, correction: Correction, why: Declined, func: Any, args: Any, kwargs: Any) -> Any:
        self.why = why
        return func(*args, **kwargs)


class _Listener(TorchFunctionMode):
    """Notes every torch function that returns floating-point tensors."""

    def __init__(self, correct: bool, corrections: _Corrections):
        super().__init__()
        self.correct = correct
        self.corrections = corrections
        self.uses: dict[str, OperatorUse] = {}
        self.judged: dict[Any, tuple[dict[str, str], str]] = {}
        self.zero_lengths: dict[str, int] = {}
        self.cuts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, why = self.corrections.watch(lambda: func(*args, **(kwargs or {})))
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if func in _CUTS and _differentiable(args):
            self.cuts += 1
        if not name.endswith(_NO_OPERATIONS) and _differentiable(result):
            use = self.uses.setdefault(name, OperatorUse(name))
            use.calls += 1
            case = (func, why is not None, why is not None and why.torch_is_right)
            if case not in self.judged:
                self.judged[case] = _judge(func, name, correction_of(func, args), why, self.correct)
            routes, remedy = self.judged[case]
            use.routes = {
                route: max(use.routes.get(route, "right"), routes[route], key=_RANKS.index) for route in ROUTES
            }
            use.remedy = use.remedy or remedy
            if correction_of(func, args) is not None and id(result) in LENGTHS and not result.detach().all():
                self.zero_lengths[name] = self.zero_lengths.get(name, 0) + 1
        return result

    def sentences(self) -> Iterator[str]:
        """The remarks in words."""
        if self.cuts:
            yield (
                f"torch.Tensor.detach and its like take what is differentiated out of the graph ({self.cuts} times): "
                "derivatives through there are zero by every route"
            )
        for name, count in self.zero_lengths.items():
            yield (
                f"{name} is 0 somewhere ({count} times), where it has a kink, and 0 stands for its derivatives: even "
                "powers of it are differentiated rightly, other functions that are smooth there, such as its cosine, "
                "are not from the second derivative on; write them as functions of the square"
            )


def _differentiable(result: Any) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in pytree.tree_leaves(result))


def _judge(
    func: Any, name: str, correction: Correction | None, why: Declined | None, correct: bool
) -> tuple[dict[str, str], str]:
    """What each route makes of a torch function, whose rule may have declined the call, and the remedy."""
    if why is not None or (correction is not None and correction.kind == "slow"):
        correction = None  # it did not run
    if isinstance(func, (OpOverload, OpOverloadPacket)) and not name.startswith(("aten.", "prims.")):
        silent = dict.fromkeys(ROUTES, "raises") | dict.fromkeys(ROUTES[2:], "wrong")
        return silent, "a custom operator has a zero tangent, in silence; wrap it in a Function with backward and jvp"
    # A rule that declines because torch is right here had its part in the audit with corrections.
    mended = correct and (correction is not None or (why is not None and why.torch_is_right))
    known = _audited(function_of_operator(func) or name, "corrected" if mended else "torch")
    # A rule names the routes that torch has not right, and knows the calls in which it has.
    told = correction is not None or mended
    unknown = dict.fromkeys(ROUTES, "right" if told else "not audited")
    if func is torch.autograd.grad:
        return _of_inner_gradients(correct)
    if correction is not None and not correct:  # the table of corrections knows more functions than the audit
        unknown |= dict.fromkeys(correction.routes, "wrong" if correction.kind == "wrong" else "raises")
    routes = {route: known.get(route, unknown[route]) for route in ROUTES}
    if correct and correction is not None:
        routes = {
            route: "corrected" if route in correction.routes and word not in _BAD else word
            for route, word in routes.items()
        }
    bad = [route for route, word in routes.items() if word in _BAD]
    if not bad:
        return routes, ""
    good = [route for route in ROUTES if route not in bad]
    if not correct and correction is not None:
        return routes, "use hodiff's transforms, or take derivatives inside hodiff.corrected()"
    return routes, f"take the route {good[0]}" if good else "write it in other operators"


def _of_inner_gradients(correct: bool) -> tuple[dict[str, str], str]:
    """Of a gradient that the function takes itself: what it goes through is right to third order."""
    if correct or in_transform():
        return dict.fromkeys(ROUTES, "right"), ""
    missing = dict.fromkeys(ROUTES, "raises") | {ROUTES[0]: "right"}
    return missing, "use hodiff's transforms, or take that gradient by torch.func.grad"


def _audited(name: str, which: str) -> dict[str, str]:
    """By route, what the audit found of an operator, of all its variants the worst."""
    operators = audit_on_file().operators
    last = name.rsplit(".", 1)[-1]
    if last in _ALIASES:
        name = last = _ALIASES[last]
    plain = name.removeprefix("torch.").removeprefix("Tensor.")
    for base in (last, last.removesuffix("_")):
        for key in (plain if base == last else base, *(prefix + base for prefix in _PREFIXES)):
            found = [entry for op, entry in operators.items() if op == key] or [
                entry for op, entry in operators.items() if op.startswith(key + ".")
            ]
            if found:
                return {
                    route: max((_word(each[which][route].status) for each in found), key=_RANKS.index)
                    for route in ROUTES
                }
    return {}


def _word(status: str) -> str:
    return status if status in _RANKS else "not audited"


class _Remarks(DispatchMode):
    """Notes random operators, and tensors of the caller's that are changed in place."""

    def __init__(self, held: set[int]):
        super().__init__()
        self.held = held
        self.random: dict[str, int] = {}
        self.changed: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = schema_of(func).name
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random[name] = self.random.get(name, 0) + 1
        if any(id(each) in self.held for each in _written(func, args, kwargs)):
            self.changed[name] = self.changed.get(name, 0) + 1
        return func(*args, **kwargs)

    def sentences(self) -> Iterator[str]:
        """The remarks in words."""
        for name, count in self.random.items():
            yield (
                f"{name} draws random numbers ({count} times): routes that evaluate the function several times see "
                "different ones; call model.eval(), or pass randomness='same'"
            )
        for name, count in self.changed.items():
            yield (
                f"{name} changes an input, parameter or buffer in place ({count} times): torch.func refuses that; take "
                "reverse-over-reverse, or pass copies through torch.func.functional_call"
            )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(argument.name)
