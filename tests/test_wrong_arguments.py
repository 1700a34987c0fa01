"""Every public function and class refuses wrong arguments, in a message that names itself and the argument.

The example of each docstring gives a valid call. Each argument in turn is replaced by values that its annotation rules
out: a text for a switch, a fraction or a negative number for a count, an unknown name for an option.
"""

import contextlib
import doctest
import functools
import importlib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hodiff import HodiffError

# Without `hodiff.checks` and `hodiff.audit`, whose calls take seconds, and `hodiff.corrections`, for developers.
ROOMS = ["hodiff"]
ROOMS += [f"hodiff.{room}" for room in ("functions", "nn", "authoring", "operators", "estimators", "implicit")]
ROOMS += [f"hodiff.{room}" for room in ("optimize", "optim", "meta", "per_sample", "sparse", "taylor", "plot", "atoms")]
# Names and labels, for which any text is right.
FREE_TEXT = {"name"}
# Numbers that may be negative.
SIGNED = {"argnums", "beta", "dim", "eps", "factor", "high", "ignore_index", "low", "margin", "momentum", "scale"}
SIGNED |= {"strength", "threshold"}
# Functions that validate the arguments of others.
SPEAKS_FOR = {
    "ANIL": "SGD",
    "CrossEntropyLoss": "cross_entropy",
    "FOMAML": "SGD",
    "FakeQuantize": "quantize_ste",
    "GradientReversal": "reverse_gradient",
    "HingeLoss": "hinge",
    "HuberLoss": "huber",
    "IMAML": "SGD",
    "MAML": "SGD",
    "MetaSGD": "SGD",
    "Reptile": "SGD",
    "ScaleGradient": "scale_gradient",
    "Softplus": "softplus",
    "gradients": "per_sample",
    "jacobi_preconditioner": "diagonal",
    "moments": "per_sample",
    "noise_scale": "per_sample",
    "norms": "per_sample",
    "packed_attention": "attention",
}
# Arguments that torch.nn's constructors take.
OF_TORCH = {"CrossEntropyLoss.weight", "FusedLinear.in_features", "FusedLinear.out_features", "FusedLinear.bias"}
# A base class and a result, whose examples do not construct them.
UNCALLED = {"Coloring", "LinearOperator"}


@dataclass
class Call:
    """A call of a docstring's example, and the arguments of the first call of its result."""

    arguments: inspect.BoundArguments
    then: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def public() -> Iterator[tuple[str, str]]:
    """Public functions and classes with an example, by room and name, without errors and Functions."""
    seen = set()
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in sorted(set(dir(module))):
            value = getattr(module, name)
            home = getattr(value, "__module__", None) or ""
            others = inspect.isclass(value) and issubclass(value, (BaseException, torch.autograd.Function))
            others = others or (inspect.isclass(value) and ">>> " not in (value.__doc__ or ""))
            if name.startswith("_") or not callable(value) or others or id(value) in seen:
                continue
            if home.startswith("hodiff.") and not home.startswith("hodiff.checks"):
                seen.add(id(value))
                yield room, name


PUBLIC = list(public())


@functools.cache
def example(room: str, name: str) -> Call | None:
    """Run the example of a docstring, and return the first call of the function or class; None if there is none."""
    target: Any = getattr(importlib.import_module(room), name)
    found: list[Call] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        # Generators would be used up.
        args = tuple(list(each) if inspect.isgenerator(each) else each for each in args)
        result = target(*args, **kwargs)
        if found:
            return result
        call = Call(inspect.signature(target).bind(*args, **kwargs))
        found.append(call)
        if isinstance(result, torch.nn.Module):
            result.register_forward_pre_hook(lambda _, args, kwargs: note(call, args, kwargs), with_kwargs=True)
        elif inspect.isfunction(target) and inspect.isfunction(result):
            return lambda *args, **kwargs: (note(call, args, kwargs), result(*args, **kwargs))[1]
        return result

    def note(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.then = call.then or (args, kwargs)

    home = sys.modules[target.__module__]
    globs = {**vars(home), name: called}
    rooms = [each for path, each in sys.modules.items() if path.startswith("hodiff") and hasattr(each, "__path__")]
    with pytest.MonkeyPatch.context() as patch, quiet():
        for module in {*rooms, home}:
            if vars(module).get(name) is target:
                patch.setattr(module, name, called)
        patch.setattr(sys, "displayhook", lambda _: None)
        torch.manual_seed(0)
        for each in doctest.DocTestParser().get_examples(inspect.getdoc(target) or ""):
            if doctest.SKIP not in each.options:
                # Examples of classes may test for instances, or derive a class.
                with contextlib.suppress(Exception):
                    exec(compile(each.source, "<example>", "single"), globs)
    return found[0] if found else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and output."""
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield


def wrong_values(name: str, annotation: Any) -> list[Any]:
    """Values that an annotation, a text, rules out."""
    without_brackets = re.sub(r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]", "", str(annotation))
    kinds = {each.strip() for each in without_brackets.split("|")} - {"None"}
    wrong: dict[str, list[Any]] = {
        "bool": ["yes", 3],
        "int": [1.5, "three", *([] if name in SIGNED else [-1])],
        "float": ["half", *([] if name in SIGNED else [-1.0, float("nan")])],
        "str": [] if name in FREE_TEXT else ["no such option", 3],
        "int str": [1.5, "no such option", -1],
        "bool str": ["no such option", 3],
        "Callable": [torch.ones(2)],
        "Callable str": ["no such option", torch.ones(2)],
        "torch.Generator": [3],
        "Tensor": ["text"],
        "Tensor float": ["text"],
        "nn.Module": [3],
        "Coloring": ["star"],
        "Dims": [1.5],
        "Iterable": [3],
        "Likelihood": [3],
        "LinearOperator": [3],
        "Map": [torch.ones(2)],
        "Optimizer": [3],
        "Sequence int": [1.5, "three"],
        "Setting": ["text"],
        "int tuple": [1.5, "three"],
        "tuple": [0.5, "text"],
    }
    return wrong.get(" ".join(sorted(kinds)), [])


TRIED = [(room, name) for room, name in PUBLIC if name not in UNCALLED]


@pytest.mark.parametrize(("room", "name"), TRIED, ids=[f"{room}.{name}" for room, name in TRIED])
def test_wrong_arguments_are_refused_by_name(room: str, name: str) -> None:
    call = example(room, name)
    assert call is not None, "the example of the docstring calls it"
    target = getattr(importlib.import_module(room), name)
    accepted = []
    for parameter in inspect.signature(target).parameters.values():
        if (
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            or f"{name}.{parameter.name}" in OF_TORCH
        ):
            continue
        for value in wrong_values(parameter.name, parameter.annotation):
            message = refusal(target, call, parameter.name, value)
            names = f"{name}|{SPEAKS_FOR.get(name, name)}"
            if not re.match(rf"InputError: (?:\w+\.)?(?:{names})\b.*\b{parameter.name}\b", message):
                accepted.append(f"{parameter.name}={value!r}: {message}")
    assert accepted == []


def refusal(target: Callable[..., Any], call: Call, name: str, value: Any) -> str:
    """Return the error of a call with one argument replaced, or of the call of its result."""
    given = inspect.BoundArguments(call.arguments.signature, call.arguments.arguments | {name: value})
    order = list(given.signature.parameters)
    given.arguments = dict(sorted(given.arguments.items(), key=lambda pair: order.index(pair[0])))
    try:
        with quiet():
            result = target(*given.args, **given.kwargs)
            if call.then is not None:
                result(*call.then[0], **call.then[1])
    except HodiffError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    except Exception as error:
        return f"{type(error).__name__} of Python or torch: {error}".splitlines()[0]
    return "accepted"
