"""Rules for convolutions, also transposed ones with output padding."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff import functions
from hodiff.corrections.mechanism.declining import INVALID
from hodiff.corrections.mechanism.registry import register


def _is_recorded(input: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> bool:
    tensors = [each for each in (input, weight, bias) if each is not None]
    return (
        all(isinstance(each, Tensor) and each.is_floating_point() for each in tensors)
        and not torch.is_autocast_enabled(input.device.type)
        and any(each.requires_grad for each in tensors)
    )


_lean = partial(
    register,
    kind="slow",
    reason="the double backward also computes the gradient of constant data",
    covers=_is_recorded,
    # Three nodes in Python were measured to take half a millisecond longer than torch's one node, at any size.
    least_elements=2**16,
    devices=("cpu",),
)

_lean(F.conv1d)(functions.conv1d)
_lean(F.conv2d)(functions.conv2d)


def _extends_its_output(*args: Any, output_padding: Any = 0, **_: Any) -> bool:
    return any(_each(args[5] if len(args) > 5 else output_padding, 1))


_transposed = partial(
    register,
    kind="missing",
    reason="with output_padding the third derivative is not implemented",
    reference="the convolution without padding, then cropped and extended",
    covers=_extends_its_output,
)


def _extended(function: Callable[..., Tensor], spatial: int) -> Callable[..., Any]:
    """Return a rule for a transposed convolution, which cuts off padding and adds output padding afterwards."""

    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        steps, spreads, cut, added = (_each(given, spatial) for given in (stride, dilation, padding, output_padding))
        if any(more >= max(step, spread) for more, step, spread in zip(added, steps, spreads, strict=True)):
            return INVALID
        whole = function(input, weight, None, stride, 0, 0, groups, dilation)
        ends = [end for n, more in zip(reversed(cut), reversed(added), strict=True) for end in (-n, more - n)]
        result = F.pad(whole, ends)
        return result if bias is None else result + bias.reshape(-1, *(1,) * spatial)

    return rule


def _each(given: Any, spatial: int) -> list[int]:
    """Return one integer for each dimension."""
    try:
        return [operator.index(given)] * spatial
    except TypeError:
        numbers = [operator.index(each) for each in given]
    return numbers * spatial if len(numbers) == 1 else numbers


for _function, _spatial in ((F.conv_transpose1d, 1), (F.conv_transpose2d, 2), (F.conv_transpose3d, 3)):
    _transposed(_function, name=f"torch.nn.functional.{_function.__name__}")(_extended(_function, _spatial))
