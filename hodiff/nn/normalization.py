"""Torch's normalization modules, with correct derivatives of every order by every route.

Each module is a subclass of torch's module of the same name, with its arguments, parameters and state dict; only the
computation is hodiff's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.normalization import layers as functions


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `hodiff.functions.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the trailing dimensions."""
        return functions.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `hodiff.functions.rms_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the trailing dimensions."""
        return functions.rms_norm(input, self.normalized_shape, self.weight, self.eps)


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm`, computed by `hodiff.functions.group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize groups of channels."""
        return functions.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _BatchNorm:
    """Forward pass of all batch normalizations, which overrides torch's."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Normalize each channel, in training by the batch; momentum None averages over all batches."""
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        update = not self.training or self.track_running_stats
        return functions.batch_norm(
            input,
            self.running_mean if update else None,
            self.running_var if update else None,
            self.weight,
            self.bias,
            by_batch,
            momentum,
            self.eps,
        )


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by `hodiff.functions.batch_norm`."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by `hodiff.functions.batch_norm`."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by `hodiff.functions.batch_norm`."""


class _InstanceNorm:
    """Computation of all instance normalizations; torch's module handles inputs without a batch."""

    def _apply_instance_norm(self: Any, input: Tensor) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        by_input = self.training or not self.track_running_stats
        return functions.instance_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, by_input, momentum, self.eps
        )


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, computed by `hodiff.functions.instance_norm`."""


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, computed by `hodiff.functions.instance_norm`."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, computed by `hodiff.functions.instance_norm`."""
