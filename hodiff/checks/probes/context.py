"""Replacement for a Function's context, whose saved tensors can be inspected, copied and changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Attributes of the stand-in; everything else in its __dict__ was set by the Function.
_OWN = {"needs_input_grad", "for_backward", "for_forward", "dirty", "constant_outputs", "reading", "materializes"}


class StandInContext:
    """Replacement for `ctx` in the rules of a Function, without a graph."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.for_backward: tuple[Any, ...] = ()
        self.for_forward: tuple[Any, ...] | None = None
        self.dirty: tuple[Any, ...] = ()
        self.constant_outputs: tuple[Any, ...] = ()
        self.materializes = True
        self.reading = "backward"

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors for backward, as torch does."""
        self.for_backward = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Save tensors for jvp, as torch does."""
        self.for_forward = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        """Record the arguments that forward changes in place, as torch does."""
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Record the outputs without derivatives, as torch does."""
        self.constant_outputs = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether missing gradients become zeros, as torch does."""
        self.materializes = value

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Saved tensors; in jvp the tensors saved for forward mode, if there are any."""
        if self.reading == "forward" and self.for_forward is not None:
            return self.for_forward
        return self.for_backward

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """Torch's old name of `saved_tensors`."""
        return self.saved_tensors

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that the Function set on the context."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a rule could read, by a name that users understand."""
        found = {f"saved_tensors[{i}]": t for i, t in enumerate(self.saved_tensors) if isinstance(t, Tensor)}
        for name, value in self.attributes().items():
            found |= {f"ctx.{name}{path}": t for path, t in _within(value)}
        return found

    def replaced(self, change: Callable[[str, Tensor], Tensor], reading: str) -> StandInContext:
        """Return a copy in which `change(name, tensor)` replaces every tensor."""
        copy = StandInContext(self.needs_input_grad)
        copy.__dict__.update(vars(self))
        copy.reading = reading

        def moved(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                change(f"saved_tensors[{i}]", t) if isinstance(t, Tensor) else t for i, t in enumerate(tensors)
            )

        if reading == "forward" and self.for_forward is not None:
            copy.for_forward = moved(self.for_forward)
        else:
            copy.for_backward = moved(self.for_backward)
        for name, value in self.attributes().items():
            setattr(copy, name, _changed(value, f"ctx.{name}", change))
        return copy


def _within(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in _within(each, f"{path}[{key!r}]")]
    if type(value) in {list, tuple}:
        return [pair for i, each in enumerate(value) for pair in _within(each, f"{path}[{i}]")]
    return []


def _changed(value: Any, path: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _changed(each, f"{path}[{key!r}]", change) for key, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_changed(each, f"{path}[{i}]", change) for i, each in enumerate(value))
    return value
