"""Rules for recurrent networks, and for packing and padding sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.recurrent.unrolled import GRU, LSTM, RELU, TANH, Cell, Stack
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.rules.autocast import autocast_like_torch
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
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


_missing = partial(register, kind="missing", routes=ROUTES)
_OF_KERNELS = "oneDNN's and cuDNN's kernels have no forward mode, and those of a GPU no second derivative"

_NETWORKS: dict[Callable[..., Any], tuple[Cell, str]] = {
    torch.lstm: (LSTM, "Hochreiter & Schmidhuber (1997); Sak et al. (2014) with a projection"),
    torch.gru: (GRU, "Cho et al. (2014), eqs. 5 to 8"),
    torch.rnn_tanh: (TANH, "Elman (1990)"),
    torch.rnn_relu: (RELU, "Elman (1990)"),
}


def _network(cell: Cell, *args: Any, **kwargs: Any) -> Any:
    """Run a padded or a packed call: torch has one name for both."""
    # The argument at this place is a tensor in packed calls only: batch sizes for an LSTM, else the state.
    place = 1 if cell is LSTM else 2
    is_packed = "data" in kwargs or (len(args) > place and isinstance(args[place], Tensor))
    return (_packed if is_packed else _padded)(cell, *args, **kwargs)


def _padded(
    cell: Cell,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    if input.dim() != 3:
        return INVALID
    sequence = input.transpose(0, 1) if batch_first else input
    stack = Stack(cell, has_biases, num_layers, dropout if train else 0.0, 1 + bidirectional)
    found = _differentiable(stack, sequence, None, sequence.shape[1], hx, params)
    if isinstance(found, Declined) or not batch_first:
        return found
    return (found[0].transpose(0, 1), *found[1:])


def _packed(
    cell: Cell,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Any:
    if data.dim() != 2:
        return INVALID
    sizes = batch_sizes.tolist()
    stack = Stack(cell, has_biases, num_layers, dropout if train else 0.0, 1 + bidirectional)
    return _differentiable(stack, data, sizes, sizes[0], hx, params)


def _differentiable(
    stack: Stack, sequence: Tensor, sizes: list[int] | None, batch: int, hx: Any, params: Sequence[Tensor]
) -> Any:
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    tensors = (sequence, *state, *params)
    if not may_be_differentiated(tensors) or not all(each.is_floating_point() for each in tensors):
        return UNNEEDED
    if not stack.fits(sequence.shape[-1], batch, state, params) or not sequence.shape[0]:
        return INVALID
    if sequence.device.type != "cpu" or (stack.cell is LSTM and sizes is None and len({s.shape for s in state}) == 1):
        # Autocast treats the kernel as one operator; elsewhere it lowers only the products inside.
        sequence, *lowered = autocast_like_torch(sequence, *state, *params)
        state, params = tuple(lowered[: len(state)]), lowered[len(state) :]
    output, final = stack.run(sequence, sizes, state, params)
    return (output, *final)


for _function, (_cell, _reference) in _NETWORKS.items():
    _missing(_function, reason=_OF_KERNELS, reference=_reference)(partial(_network, _cell))
