"""Modules of linear layers and convolutions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.functions.convolution.convolve import conv1d, conv2d, conv3d
from hodiff.functions.linear.activations import FUSED_ACTIVATIONS
from hodiff.functions.linear.fused_linear import fused_linear
from hodiff.torch_internals.modules import padding_of_both_sides


class Conv1d(torch.nn.Conv1d):
    """`torch.nn.Conv1d`, computed by `hodiff.functions.conv1d`.

    Example:
        >>> import torch
        >>> Conv1d(2, 4, 3, padding=1)(torch.ones(1, 2, 5)).shape
        torch.Size([1, 4, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply `hodiff.functions.conv1d`."""
        return _convolve(self, conv1d, input)


class Conv2d(torch.nn.Conv2d):
    """`torch.nn.Conv2d`, computed by `hodiff.functions.conv2d`.

    Example:
        >>> import torch
        >>> Conv2d(2, 4, 3, padding="same", padding_mode="circular")(torch.ones(1, 2, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply `hodiff.functions.conv2d`."""
        return _convolve(self, conv2d, input)


class Conv3d(torch.nn.Conv3d):
    """`torch.nn.Conv3d`, computed by `hodiff.functions.conv3d`.

    Example:
        >>> import torch
        >>> Conv3d(2, 4, 2, stride=2)(torch.ones(1, 2, 4, 4, 4)).shape
        torch.Size([1, 4, 2, 2, 2])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply `hodiff.functions.conv3d`."""
        return _convolve(self, conv3d, input)


def _convolve(module: Any, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    padding = module.padding
    if module.padding_mode != "zeros":
        x = F.pad(x, padding_of_both_sides(module), mode=module.padding_mode)
        padding = 0
    return function(x, module.weight, module.bias, module.stride, padding, module.dilation, module.groups)


UNFUSED = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}


class FusedLinear(nn.Linear):
    """`torch.nn.Linear` and an activation in one, by `hodiff.functions.fused_linear`; parameters keep their names.

    Tools that look for layers of exactly the type `torch.nn.Linear`, such as torch's `quantize_dynamic`, silently skip
    it; pass them `hodiff.nn.unfused(model)`. Tools that accept subclasses, such as torchao, need no change.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        activation: "relu", "tanh", "silu" or "gelu".
        bias: Whether there is a bias.
        **options: `device` and `dtype`.

    Raises:
        InputError: If the activation is unknown.

    Example:
        >>> import torch
        >>> layer = FusedLinear(3, 2, activation="gelu")
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 2])
        >>> layer
        FusedLinear(in_features=3, out_features=2, bias=True, activation='gelu')
    """

    def __init__(
        self, in_features: int, out_features: int, activation: str = "relu", bias: bool = True, **options: Any
    ) -> None:
        require_choice("FusedLinear", "activation", activation, tuple(FUSED_ACTIVATIONS))
        super().__init__(in_features, out_features, bias, **options)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Apply layer and activation."""
        return fused_linear(input, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        """Return the settings of the layer, and the activation."""
        return f"{super().extra_repr()}, activation={self.activation!r}"


def unfused(model: nn.Module) -> nn.Module:
    r"""Return a copy of a model in which each `FusedLinear` is a `torch.nn.Linear` followed by its activation.

    The copy computes the same values, for tools that recognize layers by their exact type, such as torch's dynamic
    quantization. Parameter names gain a "0", the index of the layer in the pair.

    Args:
        model: A module, which is not changed.

    Returns:
        The copy.

    Raises:
        InputError: If `model` is not a module.

    Example:
        >>> import torch
        >>> unfused(torch.nn.Sequential(FusedLinear(3, 2, "gelu"), torch.nn.Linear(2, 1)))
        Sequential(
          (0): Sequential(
            (0): Linear(in_features=3, out_features=2, bias=True)
            (1): GELU(approximate='none')
          )
          (1): Linear(in_features=2, out_features=1, bias=True)
        )
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"unfused: model: expected a module, got {type(model).__name__}.")
    made: dict[nn.Module, nn.Module] = {}

    def apart(module: nn.Module) -> nn.Module:
        if isinstance(module, FusedLinear):
            if module not in made:
                made[module] = _pair(module)
            return made[module]
        for name, child in module.named_children():
            setattr(module, name, apart(child))
        return module

    return apart(copy.deepcopy(model))


def _pair(layer: FusedLinear) -> nn.Module:
    """Split a layer into a linear layer and its activation, with the same parameters."""
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias
    return nn.Sequential(plain, UNFUSED[layer.activation]()).train(layer.training)
