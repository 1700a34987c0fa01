"""Recurrent networks computed step by step, for padded or packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

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
        """Return the outputs of the last layer and the final states of all layers.

        Args:
            sequence: Tensor (steps, batch, features), or (rows, features) of a packed sequence.
            sizes: Number of sequences at each step of a packed sequence, or None.
            state: Initial states (layers * directions, batch, size).
            parameters: Parameters in torch's order.

        Returns:
            The outputs, like the sequence, and the final states, like the initial ones.
        """
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
