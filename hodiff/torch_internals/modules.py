"""What modules of `torch.nn` hold behind their public attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from hodiff.torch_internals.compilers.dynamo import is_compiled

# The base of all norms with running statistics, and of all dropouts.
RunningNorm = _NormBase
Dropout = _DropoutNd
# Attributes that a recurrent layer makes anew whenever one of its parameters is set, and reads no others of.
MADE_OF_PARAMETERS = {"_flat_weights", "_flat_weight_refs"}


def buffers_by_name(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict that holds a module's own buffers, to read and to write."""
    return module._buffers


def parametrized_weights_are_kept() -> bool:
    """Whether `torch.nn.utils.parametrize.cached` is active, by which a weight is computed once, at whatever point."""
    return parametrize._cache_enabled > 0


@contextmanager
def parametrized_anew() -> Iterator[None]:
    """Forget for a while what it has kept, and that it is active."""
    held = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = held


def padding_of_both_sides(convolution: Any) -> list[int]:
    """A convolution's padding as `torch.nn.functional.pad` takes it."""
    padding: list[int] = convolution._reversed_padding_repeated_twice
    return padding


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides parameters, buffers and submodules, which others may exchange for a while."""
    exchanged = (module._parameters, module._buffers, module._modules)
    return {name: value for name, value in vars(module).items() if not any(value is each for each in exchanged)}


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks change or read the gradients of a module's outputs or inputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `torch.compile` stands in the place of a module's call."""
    return is_compiled(module) or module._compiled_call_impl is not None


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers by name, as it looks them up."""
    return module._parameters, module._buffers
