"""Modes that record a model's torch functions with verdicts, random numbers, changes in place, and cuts."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from hodiff.checks.preflight.operator_routes import RANKS, RIGHT, UNKNOWN, FunctionDefect, judge, torch_is_right
from hodiff.corrections import Corrections, Declined
from hodiff.corrections.mechanism.registry import Correction, correction_of
from hodiff.corrections.mechanism.values import mixes_complex_number
from hodiff.corrections.rules.distances.lengths import LENGTHS
from hodiff.corrections.rules.linalg.symmetric import are_nearly_equal
from hodiff.derivatives.capture.refusals import line_now
from hodiff.errors import RouteError
from hodiff.graphs import nodes_from
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.grad_mode import saved_tensor_hooks
from hodiff.torch_internals.autograd.graph_nodes import called_functions, raises_when_run
from hodiff.torch_internals.interception import DispatchMode, run_operator, without_function_modes
from hodiff.torch_internals.operators import schema_of

_HERE = __name__.rpartition(".")[0]

# Functions that compute nothing.
_NO_OPERATIONS = ("__get__", "__set__", ".requires_grad_")
# Functions that take a tensor out of the graph.
_DATA: Any = Tensor.data
_NUMBERS = {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__}
_CUTS = {Tensor.detach, Tensor.detach_, torch.detach, Tensor.numpy, _DATA.__get__, *_NUMBERS}
# Functions that return a bool, which may control a branch.
_TRUTHS: set[Any] = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}
_TRUTHS |= {Tensor.equal, torch.equal, Tensor.allclose, torch.allclose}
# Functions that use a tensor's shape but not its numbers.
_SHAPES = ("_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

# Remedy that uses options of transforms and operators.
ONE_DRAW = ", or share one draw: randomness='same' of hodiff.hessian, randomness='fixed' of an operator"


@dataclass
class OperatorUse:
    """Torch function that the model calls.

    Attributes:
        name: Its name, as users write it.
        calls: How often it was called.
        routes: By route, "right", "corrected", "not smooth", "random", "raises", "wrong", "non-finite" or
            "not audited".
        remedy: What to change; empty if no route is wrong or missing.
    """

    name: str
    calls: int = 0
    routes: dict[str, str] = field(default_factory=dict)
    remedy: str = ""

    @property
    def worst(self) -> str:
        """The worst verdict of its routes."""
        return max(self.routes.values(), key=RANKS.index, default="right")


class WatchedCorrections(Corrections):
    """Corrections that record why the rule of the last call declined it."""

    def __init__(self) -> None:
        super().__init__()
        self.why: Declined | None = None
        self.refusal = ""

    def watch(self, call: Callable[[], Any]) -> tuple[Any, Declined | None]:
        """Return the value of a call, and why its rule declined it; None if no rule declined."""
        self.why, self.refusal = None, ""
        try:
            return call(), self.why
        except RouteError as error:
            self.refusal = str(error)
            with without_function_modes(WatchedCorrections):
                return call(), self.why

    def declined(self, correction: Correction, why: Declined, func: Any, args: Any, kwargs: Any) -> Any:
        """Record the reason, and run torch's function."""
        self.why = why
        return func(*args, **kwargs)


class CallListener(TorchFunctionMode):
    """Mode that records every torch function that returns differentiable tensors."""

    def __init__(self, correct: bool, corrections: WatchedCorrections):
        super().__init__()
        self.correct = correct
        self.corrections = corrections
        self.uses: dict[str, OperatorUse] = {}
        self.judged: dict[Any, tuple[dict[str, str], str]] = {}
        self.zero_lengths: dict[tuple[str, str], int] = {}
        self.repeated: Counter[str] = Counter()
        self.branches: Counter[str] = Counter()
        self.cuts = 0
        self.hooks = 0
        self._followed = _Followed()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, why = self.corrections.watch(lambda: func(*args, **(kwargs or {})))
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        # Functions that return their argument itself, such as `to` without effect, compute nothing.
        unrecorded = not torch.is_grad_enabled() and _holds_numbers(result) and not (args and result is args[0])
        if (func in _CUTS or unrecorded) and _differentiable(args) and _model_called():
            self.cuts += 1
        self.hooks += func is Tensor.register_hook
        if func in _TRUTHS or (func in _NUMBERS and not _differentiable(args)):
            if self._followed.depends(args) and _model_called():
                self.branches[line_now()] += 1
        elif not name.endswith(_SHAPES):
            self._followed.follow(result, (args, kwargs))
        refusal = self.corrections.refusal or _refusal(result, args)
        if not name.endswith(_NO_OPERATIONS) and (refusal or _differentiable(result)):
            use = self.uses.setdefault(name, OperatorUse(name))
            use.calls += 1
            correction = correction_of(func, args)
            fine = not self.correct and correction is not None and torch_is_right(func, args, kwargs or {})
            mixed = len(args) > 1 and mixes_complex_number(*args[:2])
            case = (func, why is not None, fine or (why is not None and why.torch_is_right), mixed)
            if case not in self.judged:
                self.judged[case] = (RIGHT, "") if fine else judge(func, name, correction, why, self.correct, mixed)
            routes, remedy = UNKNOWN if _without_derivative(result) else self.judged[case]
            if refusal:
                routes, remedy = dict.fromkeys(ROUTES, "raises"), refusal.rpartition("; ")[2].rstrip(".")
            use.routes = {
                route: max(use.routes.get(route, "right"), routes[route], key=RANKS.index) for route in ROUTES
            }
            use.remedy = use.remedy or remedy
            if func in _SPECTRA and are_nearly_equal(result if isinstance(result, Tensor) else result[0]):
                self.repeated[name] += 1
            length = LENGTHS.get(id(result))
            met = length is not None and length.length is None and not result.is_meta and correction_of(func, args)
            if length is not None and met and not result.detach().all():
                which = (name, length.root.kind)
                self.zero_lengths[which] = self.zero_lengths.get(which, 0) + 1
        return result

    def sentences(self) -> Iterator[str]:
        """Yield the remarks as sentences."""
        if self.cuts:
            yield (
                f"torch.Tensor.detach and its like take what is differentiated out of the graph ({self.cuts} times): "
                "derivatives through there are zero by every route"
            )
        if self.hooks:
            yield (
                f"torch.Tensor.register_hook may change the gradient that passes a tensor ({self.hooks} times), which "
                "no audit knows and forward mode does not see"
            )
        for line, count in self.branches.items():
            yield (
                f"branches on values of what is differentiated{f' at {line}' if line else ''} ({count} times): "
                "derivatives are of the branch that was taken, and torch.func.vmap raises an error; torch.where "
                "supports both branches"
            )
        for (name, kind), count in self.zero_lengths.items():
            yield f"{name} is 0 somewhere ({count} times), where it {_AT_ZERO[kind]}"
        for name, count in self.repeated.items():
            yield (
                f"{name} has equal or nearly equal eigenvalues ({count} times): second derivatives of eigenvalues, "
                "and all of eigenvectors, lose their digits or are NaN; use hodiff.functions.spectral_function"
            )


_SPECTRA = {torch.linalg.eigh, torch.linalg.eigvalsh, torch.linalg.eig, torch.linalg.eigvals}

# Remarks about a length that is 0, by the kind of its root.
_AT_ZERO = {
    "length": (
        "has a kink: smooth functions of it made of elementwise functions and sums are differentiated rightly; "
        "second derivatives of others, such as softmax, are NaN there, with a warning; write those as functions of the "
        "square"
    ),
    "absolute": (
        "has a kink: hodiff differentiates smooth functions of it correctly if they consist of elementwise functions "
        "and sums; in others its derivative is 0, as in torch"
    ),
    "root": "has no finite derivative: its even powers are differentiated rightly, no other function of it",
}


class HookListener(TorchFunctionMode):
    """Mode that records whether hooks of others pack saved tensors, as the hooks of `torch.utils.checkpoint` do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = saved_tensor_hooks()
        self.seen = self.seen or (hooks is not None and not hooks[0].__module__.startswith("hodiff."))
        return func(*args, **(kwargs or {}))

    def defects(self) -> Iterator[FunctionDefect]:
        """Yield the defect of such hooks, which makes routes raise."""
        if self.seen:
            yield FunctionDefect(
                "torch.autograd.graph.saved_tensors_hooks",
                "hooks pack what backward reads, which torch.func.grad and vjp refuse",
                "use reverse-over-reverse, or remove them; hodiff's transforms support the hooks of "
                "torch.utils.checkpoint",
                missing=ROUTES[1:3],
            )


class _Followed:
    """Tensors without gradient that were computed from differentiated tensors, such as comparisons."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def depends(self, tree: Any) -> bool:
        """Whether a tensor in the pytree requires grad, or was computed from a tensor that does."""
        return any(
            each.requires_grad or ((known := self._known.get(id(each))) is not None and known() is each)
            for each in pytree.tree_leaves(tree)
            if isinstance(each, Tensor)
        )

    def follow(self, result: Any, arguments: Any) -> None:
        """Record the results of a call without gradient, if its arguments depend on differentiated tensors."""
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and not each.requires_grad]
        if made and self.depends(arguments):
            self._known.update((id(each), weakref.ref(each)) for each in made)


def _differentiable(result: Any) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in pytree.tree_leaves(result))


def _without_derivative(result: Any) -> bool:
    """Whether torch recorded that the result has no derivative."""
    nodes = (each.grad_fn for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
    return any(node is not None and raises_when_run(node) for node in nodes)


def _refusal(result: Any, args: tuple[Any, ...]) -> str:
    """Why a correction refuses derivatives of this call; empty if it does not."""
    ends, nodes = (
        [each.grad_fn for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)] for tree in (args, result)
    )
    refusals = (getattr(node, "refusal", "") for node in nodes_from(nodes, ends))
    return next(filter(None, refusals), "")


def _holds_numbers(result: Any) -> bool:
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in pytree.tree_leaves(result))


class ChangeListener(DispatchMode):
    """Mode that records random operators, and in-place changes of the caller's tensors."""

    def __init__(self, held: set[int]):
        super().__init__()
        self.held = held
        self.random: dict[str, int] = {}
        self.changed: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = schema_of(func).name
        if torch.Tag.nondeterministic_seeded in func.tags and _given(func, args, kwargs, "dropout_p") != 0:
            self.random[name] = self.random.get(name, 0) + 1
        if any(id(each) in self.held for each in _written(func, args, kwargs)):
            self.changed[name] = self.changed.get(name, 0) + 1
        return run_operator(func, args, kwargs)

    def sentences(self) -> Iterator[str]:
        """Yield the remarks as sentences."""
        for name, count in self.random.items():
            yield (
                f"{name} draws random numbers ({_times(count)}): routes that evaluate the function several times see "
                f"different ones; call model.eval(){ONE_DRAW}"
            )
        for name, count in self.changed.items():
            yield (
                f"{name} changes an input, parameter or buffer in place ({_times(count)}): torch.func raises an "
                f"error, hodiff's transforms and operators support it; for torch.func, pass copies through "
                "torch.func.functional_call"
            )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _given(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return the value of an operator's argument; None if it has no argument of that name."""
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(argument.name)


def _model_called() -> bool:
    """Whether the model made the running call, and not hodiff or the `forward` of a Function, which have own rules."""
    nearest, frames = "", []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(_HERE):
            frames.append(frame)
            nearest = nearest or ("" if name.partition(".")[0] == "torch" else name)
        elif nearest:
            break
        frame = frame.f_back
    return not nearest.startswith("hodiff.") and not any(called_functions(frames))
