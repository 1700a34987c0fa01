"""Private attributes of `torch.nn` modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.optim import LBFGS, Optimizer


def unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class of optimizers as it was written."""
    # torch wraps the step once hooks may run; mypy does not know that functions have attributes.
    step: Callable[..., Any] = kind.step
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return unhooked


def step_with_own_hooks(optimizer: Optimizer) -> None:
    """Run an optimizer's step with its own hooks, inside of another optimizer's step, which runs global hooks."""
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (optimizer,), {})
    unhooked_step(type(optimizer))(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (optimizer,), {})


def join_parameters(optimizer: LBFGS, parameters: list[Tensor]) -> list[Tensor]:
    """Set the parameters that the vector of L-BFGS consists of; return those it consisted of before."""
    before: list[Tensor] = optimizer._params
    optimizer._params, optimizer._numel_cache = parameters, None
    return before


# The base classes of all norms with running statistics, and of all dropouts.
RunningNorm = _NormBase
Dropout = _DropoutNd
# Attributes that a recurrent layer recomputes whenever one of its parameters is set.
MADE_OF_PARAMETERS = {"_flat_weights", "_flat_weight_refs"}


def in_flatten_parameters() -> bool:
    """Whether a recurrent layer that moves its weights together, as cuDNN wants them, makes this call."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return False
        if frame.f_code is _FLATTENS:
            return True
        frame = frame.f_back
    return False


_FLATTENS = nn.RNNBase.flatten_parameters.__code__


class _ScriptTable(MutableMapping[str, Any]):
    """The parameters or buffers of a scripted module as a mapping; torch provides only some methods of a dict."""

    def __init__(self, own: Any):
        self._own = own

    def __getitem__(self, name: str) -> Any:
        return self._own[name]

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._own[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own.keys())

    def __len__(self) -> int:
        return len(self._own)


def _table(own: Any) -> MutableMapping[str, Any]:
    return own if isinstance(own, dict) else _ScriptTable(own)


def buffers_by_name(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the dict of a module's own buffers, to read and to write."""
    return _table(module._buffers)


def parameters_by_name(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the dict of a module's own parameters, to read and to write."""
    return _table(module._parameters)


def parametrized_weights_are_kept() -> bool:
    """Whether `torch.nn.utils.parametrize.cached` is active, which computes each weight once, at any point."""
    return parametrize._cache_enabled > 0


@contextmanager
def parametrized_anew() -> Iterator[None]:
    """Disable the cache of `parametrize` within the context, and hide its values."""
    held = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = held


def padding_of_both_sides(convolution: Any) -> list[int]:
    """Return a convolution's padding as `torch.nn.functional.pad` takes it."""
    padding: list[int] = convolution._reversed_padding_repeated_twice
    return padding


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module other than parameters, buffers and submodules, which others may replace."""
    attributes = vars(module).copy()
    for name in ("_parameters", "_buffers", "_modules"):
        attributes.pop(name, None)
    return attributes


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks, which change or read gradients of its outputs or inputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_forward_pre_hooks(attributes: dict[str, Any]) -> bool:
    """Whether a module with these attributes has hooks that run before its forward."""
    return bool(attributes.get("_forward_pre_hooks"))


def tables_of(module: nn.Module) -> tuple[MutableMapping[str, Any], MutableMapping[str, Any]]:
    """Return the module's own parameters and buffers by name, as the module looks them up."""
    return _table(module._parameters), _table(module._buffers)
