"""Patches times the weight equal torch's convolution."""

from typing import Any

import pytest
import torch
from torch import nn

from hodiff.operators.kfac.sources import patches

CONVOLUTIONS: dict[str, Any] = {
    "same, of an even size": (nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(3, 1)), (4, 5)),
    "valid": (nn.Conv1d(4, 2, 3, padding="valid", stride=2, groups=2), (8,)),
    "circular": (nn.Conv1d(2, 2, 3, padding=2, padding_mode="circular"), (5,)),
    "reflect, same": (nn.Conv2d(2, 2, (3, 2), padding="same", padding_mode="reflect"), (4, 5)),
    "replicate": (nn.Conv3d(1, 2, (1, 2, 3), padding=(0, 1, 2), padding_mode="replicate"), (2, 3, 4)),
    "of every channel": (nn.Conv2d(3, 6, 2, stride=(1, 2), padding=1, dilation=2, groups=3), (4, 6)),
}


# torch warns that it pads a copy for even kernels.
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patches_times_weight_match_convolution(name: str) -> None:
    module, size = CONVOLUTIONS[name]
    module = module.double()
    x = torch.randn(2, module.in_channels, *size).double()
    weight = module.weight.reshape(module.groups, -1, module.weight[0].numel())
    expected = module(x)
    found = torch.einsum("nrgq,gpq->ngpr", patches(module, x), weight).reshape(expected.shape)
    shape = (-1, *[1] * len(size))
    torch.testing.assert_close(found + module.bias.reshape(shape), expected, rtol=0, atol=1e-13)
