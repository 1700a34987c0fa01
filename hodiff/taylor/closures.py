"""Functions of hodiff that take functions, and know no jets: what becomes of jets that those close over."""

from __future__ import annotations

from typing import Any

from hodiff.common.overriding import CLOSURE_WATCHERS
from hodiff.common.randomness import RandomState
from hodiff.taylor.fallback import unknown
from hodiff.taylor.registry import RULES
from hodiff.taylor.running import JetMet, frames, is_running, knowing_no_jets


def watch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call as it is; once a jet is met, by nested forward mode."""
    if not is_running() or all(frame.moment is not None for frame in frames()):
        return NotImplemented
    entry = RULES.get(function)
    if entry is not None:
        return entry.rule(frames()[-1], function, *args, **kwargs)
    state = RandomState(())
    try:
        with knowing_no_jets():
            return function.__wrapped__(*args, **kwargs)
    except JetMet as met:
        state.rewind()
        frame = met.frame
    return unknown(frame, function, args, kwargs)


CLOSURE_WATCHERS.append(watch)
