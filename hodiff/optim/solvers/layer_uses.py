"""Inputs of linear layers, and gradients of a residual by their outputs, for values and derivatives of a network.

In Taylor mode a layer multiplies the value, the first derivatives and the Laplacian of its input by one weight. Each of
these vectors is a use of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.taylor.jets import Jet, new_jet
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

Note = Callable[[Tensor], None]


@dataclass(frozen=True)
class Uses:
    """Uses of the matrix of a layer, the weight with the bias as its last column, by N residuals.

    Attributes:
        inputs: Input vectors (N, S, q), in the scale of derivatives; the last element is 1 for values, 0 for
            derivatives, if the layer has a bias.
        gradients: Gradients of the residuals by the output vectors (k, N, S, p), for k residuals of each sample.
        moving: Whether some of the vectors are derivatives.
    """

    inputs: Tensor
    gradients: Tensor
    moving: bool

    @classmethod
    def joined(cls, parts: Sequence[Uses]) -> Uses:
        """Join the uses by chunks of residuals."""
        inputs = torch.cat([each.inputs for each in parts])
        return cls(inputs, torch.cat([each.gradients for each in parts], 1), parts[0].moving)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sum the gradients of the residuals (N, k) by the matrix, with weights; (p, q)."""
        return torch.einsum("nk,knsp,nsq->pq", weights, self.gradients, self.inputs)

    def products(self, matrix: Tensor) -> Tensor:
        """Differentiate the residuals along a matrix (p, q); (N, k)."""
        return torch.einsum("knsp,pq,nsq->nk", self.gradients, matrix, self.inputs)


@dataclass(frozen=True)
class UsedTerm:
    """A term at the parameters, scaled by the root of its number of points.

    Attributes:
        residuals: Residuals (N, k).
        uses: Uses of the layers on which they depend.
        gradients: Gradients of half the sum of squares.
    """

    residuals: Tensor
    uses: dict[nn.Linear, Uses]
    gradients: dict[Tensor, Tensor]

    @classmethod
    def joined(cls, parts: Sequence[UsedTerm]) -> UsedTerm:
        """Join the terms of chunks of points."""
        first = parts[0]
        if len(parts) == 1:
            return first
        uses = {layer: Uses.joined([each.uses[layer] for each in parts]) for layer in first.uses}
        gradients = {p: torch.stack([each.gradients[p] for each in parts]).sum(0) for p in first.gradients}
        return cls(torch.cat([each.residuals for each in parts]), uses, gradients)

    def along(self, way: dict[nn.Linear, Tensor]) -> Tensor:
        """Differentiate the residuals along a step, a matrix for each layer; (N k,)."""
        found = torch.zeros_like(self.residuals)
        for layer, uses in self.uses.items():
            found += uses.products(way[layer])
        return found.reshape(-1)


def matrix_of(layer: nn.Linear, of: Mapping[Tensor, Tensor]) -> Tensor:
    """Join the tensors of weight and bias to the matrix (p, q) of a layer."""
    return of[layer.weight] if layer.bias is None else torch.cat([of[layer.weight], of[layer.bias][:, None]], 1)


def split_matrices(matrices: Mapping[nn.Linear, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of layers with their parts of the matrices."""
    for layer, matrix in matrices.items():
        width = layer.weight.shape[1]
        yield layer.weight, matrix[:, :width]
        if layer.bias is not None:
            yield layer.bias, matrix[:, width]


@dataclass
class _Call:
    """Vectors that one call of a layer maps: physical tensors (N, ..., q) and (N, ..., p), and their factor."""

    layer: nn.Linear
    factor: float
    order: int
    input: Tensor
    output: Tensor


class _Noted(torch.autograd.Function):
    """The identity of a tensor for one sample; its note receives the tensor of all samples."""

    @staticmethod
    def forward(x: Tensor, sample: Tensor, note: Note) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g, None, None

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor, *_: Any) -> Tensor:
        return x_t.view_as(x_t)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, sample: Tensor, note: Note) -> tuple[Tensor, int]:
        axis, of_sample, _ = in_dims
        x = x.expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0)
        if is_wrapped(x):
            inner: Tensor = _Noted.apply(x, sample if of_sample is None else sample.select(of_sample, 0), note)
            return inner, 0
        note(x)
        return x, 0


class LayerRecorder:
    """Records the calls of the linear layers of a module while functions of one sample run in `torch.func.vmap`."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers = layers
        self._calls: list[_Call] = []
        self._sample: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the context."""
        self._calls.clear()
        with ExitStack() as stack:
            for layer in self._layers:
                handle = layer.register_forward_hook(self._after)
                stack.callback(handle.remove)
            yield

    def of_sample(self, function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Wrap a function of one sample that is mapped over all samples."""

        def run(sample: Any) -> Tensor:
            self._sample = next(each for each in pytree.tree_leaves(sample) if isinstance(each, Tensor))
            return function(sample)

        return run

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        assert isinstance(layer, nn.Linear)
        return self._noted(layer, args[0], output, 1.0, 0)

    def _noted(self, layer: nn.Linear, given: Any, found: Any, factor: float, order: int) -> Any:
        """Note the vectors of a call, and return its output with them in the graph."""
        if isinstance(found, Jet):
            inputs = given.coefficients if isinstance(given, Jet) else (given, *[None] * len(found.coefficients))
            parts = [
                one if one is None else self._noted(layer, a, one, factor * math.factorial(k), order + k)
                for k, (a, one) in enumerate(zip(inputs, found.coefficients, strict=False))
            ]
            return new_jet(found.frame, parts)
        if not isinstance(given, Tensor) or not isinstance(found, Tensor) or self._sample is None:
            return found
        held: list[Tensor] = []
        _Noted.apply(given, self._sample, held.append)

        def keep(output: Tensor) -> None:
            self._calls.append(_Call(layer, factor, order, held[-1].detach(), output))

        return _Noted.apply(found, self._sample, keep)

    def uses(self, values: Tensor) -> dict[nn.Linear, Uses]:
        """Differentiate residuals (N, k) by the outputs of all calls; calls without influence on them are left out."""
        calls = [each for each in self._calls if each.output.requires_grad]
        count, width = values.shape
        columns = []
        for k in range(width):
            columns.append(
                torch.autograd.grad(
                    values[:, k].sum(), [each.output for each in calls], retain_graph=True, allow_unused=True
                )
                if values.requires_grad and calls
                else [None] * len(calls)
            )
        found: dict[nn.Linear, list[tuple[Tensor, Tensor, bool]]] = {}
        for call, *gradients in zip(calls, *columns, strict=True):
            if all(each is None for each in gradients):
                continue
            a = call.factor * call.input.reshape(count, -1, call.input.shape[-1])
            if call.layer.bias is not None:
                a = torch.cat([a, a.new_full((*a.shape[:2], 1), float(call.order == 0))], 2)
            g = torch.stack([torch.zeros_like(call.output) if each is None else each for each in gradients])
            g = g.reshape(width, count, -1, g.shape[-1]) / call.factor
            found.setdefault(call.layer, []).append((a, g, call.order > 0))
        self._calls.clear()
        return {
            layer: Uses(
                torch.cat([a for a, _, _ in own], 1), torch.cat([g for _, g, _ in own], 2), any(m for *_, m in own)
            )
            for layer, own in found.items()
        }
