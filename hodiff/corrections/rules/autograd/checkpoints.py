"""Replacement of `torch.utils.checkpoint` where corrections are active: recompute in the surroundings of the first run.

Torch recomputes the function in the surroundings of the backward pass. If the rules differ from the first run, torch
notices. If the module's own parameters replace those of `torch.func.functional_call`, it does not. A mode cannot
intercept `checkpoint`, so its calls are rerouted; where no corrections are active, torch's own function runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from hodiff.common.tensor_rules import by_tensor_rule
from hodiff.corrections.mechanism.mode import Corrections
from hodiff.distributed.fully_sharded import sharded_modules_run
from hodiff.errors import InputError
from hodiff.recompute.checkpoint import checkpointed
from hodiff.recompute.closed_over import ClosedOver
from hodiff.recompute.surroundings import Surroundings
from hodiff.torch_internals.checkpointing import reroute_checkpoints
from hodiff.torch_internals.compilers.dynamo import run_uncompiled_where, watch_compiled_code
from hodiff.torch_internals.interception import active_function_modes, without_function_modes

_NAME = "torch.utils.checkpoint"
# Options of torch's function; all other arguments are passed to the checkpointed function.
_OPTIONS = {"preserve_rng_state"} | {
    name for name, each in inspect.signature(torch_checkpoint).parameters.items() if each.kind is each.KEYWORD_ONLY
}


# Whether a derivative by torch's own rules is being taken, perhaps at other parameters than the modules hold.
_OF_TORCH: ContextVar[bool] = ContextVar("of_torch", default=False)


@contextmanager
def uncorrected() -> Iterator[None]:
    """Make torch's own checkpoints recompute with the parameters of their call, without corrections."""
    watch_compiled_code()
    token = _OF_TORCH.set(True)
    try:
        yield
    finally:
        _OF_TORCH.reset(token)


def _checkpoint(own: Callable[[], Callable[..., Any]], /, function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Run torch's checkpoint, or hodiff's where corrections are active."""
    if not callable(function):
        return own()(function, *args, **kwargs)
    sharded = sharded_modules_run()
    if not (_are_active() or sharded):
        return own()((_Again if _OF_TORCH.get() else _Uncorrected)(function), *args, **kwargs)
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    saves_memory = _only_saves_memory(options)
    if _is_refused(options, kwargs) or not saves_memory:
        if sharded and not saves_memory:
            raise InputError(
                f"{_NAME}: expected context_fn of torch.utils.checkpoint.create_selective_checkpoint_contexts, or "
                f"none, in fully sharded modules, got {options.get('context_fn')}, which may change the results; "
                "leave it out, or use hodiff.functions.checkpoint."
            )
        return own()(_Again(function), *args, **options, **kwargs)
    result = by_tensor_rule(torch_checkpoint, (function, *args), kwargs)
    return checkpointed(_NAME, function, args, kwargs) if result is None else result


def _are_active() -> bool:
    return any(isinstance(mode, Corrections) for mode in active_function_modes())


def _is_refused(options: dict[str, Any], kwargs: dict[str, Any]) -> bool:
    """Whether torch refuses the arguments, with a better message."""
    reentrant = options.get("use_reentrant", False) is True
    contexts = options.get("context_fn", noop_context_fn)
    return reentrant and bool(kwargs or contexts is not noop_context_fn or options.get("debug", False))


def _only_saves_memory(options: dict[str, Any]) -> bool:
    """Whether the options leave the computed values unchanged."""
    contexts = options.get("context_fn", noop_context_fn)
    while isinstance(contexts, partial):
        contexts = contexts.func
    return contexts in (noop_context_fn, create_selective_checkpoint_contexts)


class _Uncorrected:
    """Checkpointed function that always runs without corrections, so that recomputation matches the first run."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with without_function_modes(Corrections):
            return self.function(*args, **kwargs)


class _Again:
    """Checkpointed function that recomputes with the corrections and parameters of its first run."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.closed_over = ClosedOver(_NAME, function)
        self.held = self.closed_over.take()
        self.surroundings = Surroundings(self.held, self.closed_over.generators)
        self.corrected, self.ran = _are_active(), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self.ran = self.ran, True
        if not again:
            return self._run(args, kwargs)
        with self._without_corrections(), self.surroundings.restored():
            return self._run(args, kwargs)

    @contextmanager
    def _without_corrections(self) -> Iterator[None]:
        if self.corrected:
            yield
            return
        with without_function_modes(Corrections), uncorrected():
            yield

    def _run(self, args: Any, kwargs: Any) -> Any:
        with self.closed_over.filled(self.held):
            return self.function(*args, **kwargs)


reroute_checkpoints(_checkpoint)
run_uncompiled_where(_OF_TORCH.get)
