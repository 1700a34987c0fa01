"""Modules whose derivatives are right to every order; they take the place of those in `torch.nn`."""

from hodiff.nn.activations import GELU as GELU
from hodiff.nn.activations import ClippedReLU as ClippedReLU
from hodiff.nn.activations import LogSigmoid as LogSigmoid
from hodiff.nn.activations import Mish as Mish
from hodiff.nn.activations import ReLU as ReLU
from hodiff.nn.activations import ScaledSigmoid as ScaledSigmoid
from hodiff.nn.activations import SiLU as SiLU
from hodiff.nn.activations import Softplus as Softplus
from hodiff.nn.activations import Swish as Swish
from hodiff.nn.convolution import Conv1d as Conv1d
from hodiff.nn.convolution import Conv2d as Conv2d
from hodiff.nn.convolution import Conv3d as Conv3d
from hodiff.nn.gradient_control import GradientReversal as GradientReversal
from hodiff.nn.gradient_control import ScaleGradient as ScaleGradient
from hodiff.nn.linear import FusedLinear as FusedLinear
from hodiff.nn.normalization import BatchNorm1d as BatchNorm1d
from hodiff.nn.normalization import BatchNorm2d as BatchNorm2d
from hodiff.nn.normalization import BatchNorm3d as BatchNorm3d
from hodiff.nn.normalization import GroupNorm as GroupNorm
from hodiff.nn.normalization import InstanceNorm1d as InstanceNorm1d
from hodiff.nn.normalization import InstanceNorm2d as InstanceNorm2d
from hodiff.nn.normalization import InstanceNorm3d as InstanceNorm3d
from hodiff.nn.normalization import LayerNorm as LayerNorm
from hodiff.nn.normalization import RMSNorm as RMSNorm
from hodiff.nn.quantization import FakeQuantize as FakeQuantize
