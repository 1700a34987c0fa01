"""Checks that a function returns the same value each time, with the likely cause if it does not."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from hodiff.common.randomness import RandomState
from hodiff.errors import InputError
from hodiff.recompute.contents import difference, same
from hodiff.torch_internals.modules import Dropout, RunningNorm, buffers_by_name
from hodiff.torch_internals.tensors import has_numbers
from hodiff.torch_internals.wording import Wording, says

P = ParamSpec("P")
R = TypeVar("R")


def require_deterministic(
    caller: str,
    value: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    modules: Sequence[nn.Module],
    together: Callable[[bool], bool] | None = None,
) -> bool:
    """Raise if a function returns another value the second time, and name the cause.

    Args:
        caller: The operator, for error messages.
        value: Evaluates the function.
        leaves: The point.
        modules: The modules that the function calls.
        together: Tells whether all ranks that evaluate the function together say yes.

    Returns:
        Whether the values were compared; tensors without numbers have none.

    Raises:
        InputError: If the values differ.
    """
    if not all(map(has_numbers, leaves)):
        return False
    state = RandomState(leaves)
    first, second = value(), value()
    is_same = same(first, second)
    if is_same if together is None else together(is_same):
        state.rewind()
        return True
    state.rewind()
    again = value()
    state.rewind()
    repeated = value()
    state.rewind()
    raise InputError(
        f"{caller}: f: expected the same value each time for the same batch, got {difference(first, second)}; each "
        f"product would be of a different matrix. {_cause(modules, by_chance=same(again, repeated))}"
    )


def _cause(modules: Sequence[nn.Module], *, by_chance: bool) -> str:
    if by_chance:
        active = [f"{type(each).__name__}(p={each.p})" for each in modules if _drops(each)]
        named = f" of {', '.join(sorted(set(active)))}" if active else ""
        return (
            f"The cause are random numbers{named}: call model.eval(), pass randomness='fixed' for fixed random "
            f"numbers, or seed a generator in f."
        )
    moving = sorted({type(each).__name__ for each in modules if each.training and _has_state(each)})
    if moving:
        return f"The cause may be {', '.join(moving)} in training mode, with its buffers: call model.eval()."
    return "The cause is no random number generator of torch: look for state that f changes, or random.random()."


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout) and module.training and module.p > 0


def _has_state(module: nn.Module) -> bool:
    """Whether a module has numbers that training may change: running statistics, vectors of power iteration."""
    buffers = buffers_by_name(module).values()
    return isinstance(module, RunningNorm) or any(b is not None and b.is_floating_point() for b in buffers)


class Checked:
    """A model and functions that an operator evaluates once, and whether their values were compared before.

    Random numbers of an unknown generator, which the model may draw later, give one draw's result then. The comparison
    holds for later operators of the same class, until a module enters or leaves training mode.

    Args:
        caller: The operator's class.
        functions: The functions, of which the first is the model; only modules are remembered.
        modules: All modules that the functions call.
    """

    # The operators and identities of models, the objects, and the modules' settings.
    _known: ClassVar[dict[tuple[str, int], tuple[list[weakref.ref[Any]], tuple[Any, ...]]]] = {}

    def __init__(self, caller: str, functions: Sequence[Callable[..., Any]], modules: Sequence[nn.Module]):
        self._key = caller, id(functions[0])
        self._functions, self._modules = functions, modules

    @property
    def before(self) -> bool:
        """Whether the values were compared before."""
        references, settings = self._known.get(self._key, ([], ()))
        return (
            bool(references)
            and settings == self._settings()
            and all(reference() is each for reference, each in zip(references, self._functions, strict=True))
        )

    def remember(self) -> None:
        """Remember that the values are the same each time."""
        if not isinstance(self._functions[0], nn.Module):
            return
        (model, *others), key, known = self._functions, self._key, self._known
        try:
            references = [weakref.ref(model, lambda _: known.pop(key, None)), *map(weakref.ref, others)]
        except TypeError:  # an object without weak references
            return
        known[key] = references, self._settings()

    def _settings(self) -> tuple[Any, ...]:
        return tuple((type(each), each.training) for each in self._modules)


@dataclass(frozen=True)
class Mark:
    """A fingerprint of tensors: weighted sums of their numbers, the tolerances of the sums, and the tensors' shapes."""

    sums: tuple[float, ...]
    tolerances: tuple[float, ...]
    shapes: tuple[torch.Size, ...]

    def agrees(self, other: Mark) -> bool:
        """Whether two marks agree within the tolerances."""
        return len(self.sums) == len(other.sums) and all(
            # Non-finite sums cannot be compared, and count as equal.
            abs(one - two) <= tolerance or not (math.isfinite(one) or math.isfinite(two))
            for one, two, tolerance in zip(self.sums, other.sums, self.tolerances, strict=True)
        )


def mark_of(tensors: Sequence[Tensor]) -> Mark:
    """Compute sums with weights that grow along a tensor, so that they depend on the order of its numbers."""
    sums, tolerances = [], []
    for tensor in tensors:
        if not has_numbers(tensor):
            continue
        flat = tensor.detach().reshape(-1).double()
        weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)
        sums.append(float(flat @ weights))
        tolerances.append(100 * torch.finfo(tensor.dtype).eps * float(flat.abs() @ weights))
    return Mark(tuple(sums), tuple(tolerances), tuple(each.shape for each in tensors))


def another_function(caller: str, index: int) -> InputError:
    """Return the error for a function whose value differs from the previous pass."""
    return InputError(
        f"{caller}: f: expected the same value on every pass, got another one on batch {index} than before; each "
        "product would be of a different matrix. Look for random numbers, for model.train() and model.eval(), and for "
        "weights or hyperparameters that f reads and that have changed since; make another operator, or use A.at(x)."
    )


def read_unchanged(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method to raise `InputError` if a tensor of a recorded graph was changed in place."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if not says(error, Wording.CHANGED_IN_PLACE):
                raise
            said = f" torch says: {str(error).splitlines()[0]}"
            raise read_and_changed(type(args[0]).__name__, said) from error

    return run


def read_and_changed(caller: str, said: str = "") -> InputError:
    """Return the error for a tensor that f read and that was changed since."""
    return InputError(
        f"{caller}: f: expected the tensors that it read when it was linearized, got one that was changed in place "
        f"since, such as by an optimizer step or by f itself; create a new operator, use A.at(x), or read clones in "
        f"f.{said}"
    )
