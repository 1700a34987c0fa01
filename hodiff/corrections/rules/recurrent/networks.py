"""Rules for recurrent networks, computed step by step, and for packing and padding sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.rules.autocast import autocast_like_torch
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.modules import in_flatten_parameters
from hodiff.torch_internals.operators import pack_padded_sequence, pad_packed_sequence

State = tuple[Tensor, ...]
# From the input's part of the gates, the state, weight and bias of the state's part: the new state, output first.
Step = Callable[[Tensor, State, Tensor, "Tensor | None"], State]


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent cell.

    Attributes:
        gates: Rows of the weights per element of the hidden state.
        states: Number of tensors in a state.
        step: The recurrence.
    """

    gates: int
    states: int
    step: Step


@dataclass(frozen=True)
class Layer:
    """Parameters of one layer in one direction."""

    by_input: Tensor
    by_state: Tensor
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None
    projection: Tensor | None = None


@dataclass(frozen=True)
class Stack:
    """A stack of recurrent layers.

    Attributes:
        cell: Kind of the layers.
        with_biases: Whether the layers have biases.
        layers: Number of layers.
        dropout: Probability that an output is dropped between two layers.
        directions: 2 if each layer also runs backwards, else 1.
    """

    cell: Cell
    with_biases: bool
    layers: int
    dropout: float
    directions: int

    def fits(self, features: int, batch: int, state: State, parameters: Sequence[Tensor]) -> bool:
        """Whether the numbers and shapes match this stack; the steps would accept some that do not."""
        each = 4 if self.with_biases else 2
        count = self.layers * self.directions
        if len(state) != self.cell.states or len(parameters) not in {count * each, count * (each + 1)}:
            return False
        size = parameters[1].shape[1]
        wide = parameters[0].shape[0] // self.cell.gates
        shapes = [(count, batch, size), (count, batch, wide)][: len(state)]
        return [tuple(s.shape) for s in state] == shapes and parameters[0].shape[1] == features

    def unpack(self, parameters: Sequence[Tensor]) -> list[Layer]:
        """Return the flat list of parameters as layers, with the directions of a layer one after the other."""
        each = len(parameters) // (self.layers * self.directions)
        remaining = iter(parameters)
        found = []
        for _ in range(self.layers * self.directions):
            by_input, by_state, *rest = islice(remaining, each)
            input_bias, state_bias = rest[:2] if self.with_biases else (None, None)
            projection = rest[-1] if len(rest) % 2 else None
            found.append(Layer(by_input, by_state, input_bias, state_bias, projection))
        return found

    def run(
        self, sequence: Tensor, sizes: list[int] | None, state: State, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """Return the outputs of the last layer and the final states of all layers, like the initial ones."""
        # The sequence is (steps, batch, features), or (rows, features) if it is packed, with the number of sequences at
        # each step in `sizes`. Initial states are (layers * directions, batch, size).
        layers = self.unpack(parameters)
        initial = list(zip(*(each.unbind(0) for each in state), strict=True))
        final: list[State] = []
        for number in range(self.layers):
            if number and self.dropout:
                sequence = torch.dropout(sequence, self.dropout, True)
            outputs = []
            for direction in range(self.directions):
                index = number * self.directions + direction
                output, last = _run_layer(self.cell, layers[index], sequence, sizes, initial[index], direction == 1)
                outputs.append(output)
                final.append(last)
            sequence = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return sequence, tuple(torch.stack(each) for each in zip(*final, strict=True))


def _run_layer(
    cell: Cell, layer: Layer, sequence: Tensor, sizes: list[int] | None, state: State, backwards: bool
) -> tuple[Tensor, State]:
    # One product for all steps; only the state's part is sequential.
    projected = F.linear(sequence, layer.by_input, layer.input_bias)
    steps = list(projected.unbind(0) if sizes is None else projected.split(sizes))
    outputs: list[Tensor] = []
    ended: list[State] = []
    waiting, rows = state, state[0].shape[0]
    if backwards:
        steps.reverse()
    if backwards and sizes is not None and sizes[-1] != rows:
        rows = sizes[-1]
        state = tuple(each[:rows] for each in state)
    for step in steps:
        if step.shape[0] > rows:  # backwards, the shorter sequences begin later
            new = slice(rows, step.shape[0])
            state = tuple(torch.cat([each, start[new]]) for each, start in zip(state, waiting, strict=True))
        elif step.shape[0] < rows:  # forwards, they end earlier
            ended.append(tuple(each[step.shape[0] :] for each in state))
            state = tuple(each[: step.shape[0]] for each in state)
        rows = step.shape[0]
        state = cell.step(step, state, layer.by_state, layer.state_bias)
        if layer.projection is not None:
            state = (F.linear(state[0], layer.projection), *state[1:])
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return (torch.stack(outputs) if sizes is None else torch.cat(outputs)), state


def _lstm(x: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell = state
    i, f, g, o = (x + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(x: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    r, z, n = x.chunk(3, -1)
    by_r, by_z, by_n = F.linear(hidden, weight, bias).chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + by_r) * by_n)
    return ((hidden - n) * torch.sigmoid(z + by_z) + n,)


def _plain(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(x: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
        return (activation(x + F.linear(state[0], weight, bias)),)

    return step


LSTM = Cell(4, 2, _lstm)
GRU = Cell(3, 1, _gru)
TANH = Cell(1, 1, _plain(torch.tanh))
RELU = Cell(1, 1, _plain(torch.relu))


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
_OF_KERNELS = "the kernels of oneDNN and cuDNN have no forward mode, and GPU kernels no second derivative"

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


@register(
    Tensor.data_ptr,
    kind="missing",
    routes=ROUTES[1:],
    reason="a recurrent layer whose parameters are replaced on a GPU asks for their addresses, which tensors inside "
    "transforms do not have",
    reference="torch.nn.RNNBase.flatten_parameters: its way for weights that share memory",
)
def _data_ptr(self: Tensor) -> Any:
    if torch.compiler.is_compiling() or not is_wrapped(self) or not in_flatten_parameters():
        return UNNEEDED
    return 0  # equal addresses: the weights stay where they are
