"""Whether a function gives the same value twice, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hodiff.common.randomness import RandomState
from hodiff.derivatives.steady import difference, same
from hodiff.errors import InputError
from hodiff.recompute.reachable import reachable
from hodiff.torch_internals.modules import Dropout, RunningNorm, buffers_by_name


def modules_in(*roots: Any) -> list[nn.Module]:
    """The modules that callables close over, outermost first."""
    return [value for value in reachable(*roots) if isinstance(value, nn.Module)]


def require_deterministic(
    caller: str, value: Callable[[], Tensor], leaves: Sequence[Tensor], modules: Sequence[nn.Module]
) -> None:
    """Refuse a function that gives another value the second time, and name the cause."""
    state = RandomState(leaves)
    first, second = value(), value()
    if same(first, second):
        state.rewind()
        return
    state.rewind()
    again = value()
    state.rewind()
    repeated = value()
    state.rewind()
    raise InputError(
        f"{caller}: f: expected the same value each time for the same batch, got {difference(first, second)}; every "
        f"product would belong to another matrix. {_cause(modules, by_chance=same(again, repeated))}"
    )


def _cause(modules: Sequence[nn.Module], *, by_chance: bool) -> str:
    if by_chance:
        active = [f"{type(each).__name__}(p={each.p})" for each in modules if _drops(each)]
        named = f" of {', '.join(sorted(set(active)))}" if active else ""
        return f"The cause are random numbers{named}: call model.eval(), or let f seed a generator of its own."
    moving = sorted({type(each).__name__ for each in modules if each.training and _has_state(each)})
    if moving:
        return f"The cause may be {', '.join(moving)} in training mode, with its buffers: call model.eval()."
    return "The cause is no random number generator of torch: look for state that f changes, or random.random()."


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout) and module.training and module.p > 0


def _has_state(module: nn.Module) -> bool:
    """Whether a module has numbers that training may move: running statistics, vectors of power iteration."""
    buffers = buffers_by_name(module).values()
    return isinstance(module, RunningNorm) or any(b is not None and b.is_floating_point() for b in buffers)
