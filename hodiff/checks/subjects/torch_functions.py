"""Search for the torch function inside a module whose routes disagree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.report.data import Entry
from hodiff.checks.subjects.module_calls import ModuleCall
from hodiff.checks.subjects.subject import Subject, failures, is_free, raises, subject_of_function, tensors_of
from hodiff.graphs import nodes_of
from hodiff.torch_internals.autograd.graph_nodes import function_of
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
        if told and any(each.is_floating_point() or each.is_complex() for each in tensors_of(result)):
            self.uses.append(use)
        return result


def culprits(
    prepare: Callable[[], Callable[[], Any]],
    mode: Callable[[], AbstractContextManager[Any]],
    order: int,
    seed: int,
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
        with mode():
            failed = () if raising and not raises(subject, order, seed) else failures(subject, order, seed)
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
    with torch.enable_grad(), call.setting.entered():
        # A call may write into its parameters, as embeddings with max_norm do; the check has yet to see that.
        parameters = {name: each.clone() for name, each in call.module.named_parameters()}
        outputs = tensors_of(torch.func.functional_call(call.module, {**_buffers(call), **parameters}, args, kwargs))
    classes = [function_of(node) for output in outputs for node in nodes_of(output)]
    return tuple(dict.fromkeys(each for each in classes if each and not each.__module__.startswith("hodiff.")))


def _buffers(call: ModuleCall) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in call.module.named_buffers()}


def _caller(frame: FrameType | None) -> str:
    """Return the line that called a torch function."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_MACHINERY) and module != "torch.nn.functional":
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
