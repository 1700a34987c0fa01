"""Rules for packing and padding sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.operators import pack_padded_sequence, pad_packed_sequence

_packing = partial(
    register,
    kind="missing",
    routes=ROUTES[1:],
    reason="the kernel has no forward mode",
    reference="a gather of the rows",
)


@_packing(pack_padded_sequence, name="torch.nn.utils.rnn.pack_padded_sequence")
def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    if input.dim() < 2 or not input.numel():
        return INVALID
    # The kernel checks the lengths and counts the sequences at each step, here on a tensor without tangent.
    _, sizes = pack_padded_sequence(torch.empty((*input.shape[:2], 1), device="cpu"), lengths, batch_first)
    steps = (input.transpose(0, 1) if batch_first else input).unbind(0)
    rows = [step if step.shape[0] == size else step[:size] for step, size in zip(steps, sizes.tolist(), strict=False)]
    return torch.cat(rows), sizes


@_packing(pad_packed_sequence, name="torch.nn.utils.rnn.pad_packed_sequence")
def _pad(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int) -> Any:
    sizes = batch_sizes.tolist()
    batch, length = sizes[0], max(len(sizes), total_length)
    if 0 < total_length < len(sizes):
        return INVALID
    steps = [
        step if size == batch else torch.cat([step, step.new_full((batch - size, *data.shape[1:]), padding_value)])
        for step, size in zip(data.split(sizes), sizes, strict=True)
    ]
    steps += [data.new_full((batch, *data.shape[1:]), padding_value)] * (length - len(sizes))
    lengths = (batch_sizes[:, None] > torch.arange(batch, device=batch_sizes.device)).sum(0)
    return torch.stack(steps, 0 + batch_first), lengths
