"""Support for hodiff functions that take functions, where these functions close over jets."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

from hodiff.common.overriding import CLOSURE_WATCHERS, MOVING, TENSORS_ALONE
from hodiff.common.randomness import RandomState, is_generator
from hodiff.taylor.fallback import moment, unknown
from hodiff.taylor.registry import RULES
from hodiff.taylor.running import (
    JetMet,
    as_constant,
    frames,
    is_constant_here,
    is_moving,
    is_running,
    knowing_no_jets,
)


def watch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function unchanged; fall back to nested forward mode once it meets a jet."""
    if not is_running() or all(frame.moment is not None for frame in frames()):
        return NotImplemented
    constant = [frame for frame in frames() if frame.moment is None and is_constant_here(frame)]
    if constant:
        # Jets stay constant, even if the function enables gradients inside.
        with ExitStack() as held:
            for frame in constant:
                held.enter_context(moment(frame, as_constant))
            return function(*args, **kwargs)
    entry = RULES.get(function)
    if entry is not None:
        return entry.rule(frames()[-1], function, *args, **kwargs)
    state = RandomState((), filter(is_generator, (*args, *kwargs.values())))
    try:
        with knowing_no_jets():
            return function.__wrapped__(*args, **kwargs)
    except JetMet as met:
        state.rewind()
        frame = met.frame
    return unknown(frame, function, args, kwargs)


CLOSURE_WATCHERS.append(watch)
MOVING.append(is_moving)
TENSORS_ALONE.append(lambda: knowing_no_jets() if is_running() else nullcontext())
