"""Functions against the torch compositions that they replace: forward, backward and double backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import Peak
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error
from hodiff import functions as hf

Way = Callable[..., Tensor]
SAVED = "Saved bytes, MiB: what the graph holds between forward and backward"


@dataclass(frozen=True)
class Pair:
    """Function, the composition that it replaces, and the shapes of its tensors."""

    name: str
    ours: Way
    theirs: Way
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self) -> tuple[Tensor, ...]:
        """Return normal float32 tensors that require gradients."""
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in self.shapes)


LARGE = (1024, 1024)
BATCH, WIDTH = 512, 512
LINEAR = ((BATCH, WIDTH), (WIDTH, WIDTH), (WIDTH,))
CLASSES = 8192


def _targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % x.shape[1]


def _log_cosh(x: Tensor) -> Tensor:
    return x.abs() + F.softplus(-2 * x.abs()) - math.log(2)  # log(cosh(x)) overflows


def _logsumexp(x: Tensor) -> Tensor:
    largest = x.detach().amax(-1, keepdim=True)  # exp(x) overflows
    return torch.log(torch.exp(x - largest).sum(-1)) + largest.squeeze(-1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def _fused_linear(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return hf.fused_linear(x, w, b, name)


def _linear(activation: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return activation(F.linear(x, w, b))


PAIRS = [
    Pair("scaled_sigmoid", lambda x: hf.scaled_sigmoid(x, 2.0), lambda x: 2.0 * torch.sigmoid(x), (LARGE,)),
    Pair("swish", hf.swish, lambda x, beta: x * torch.sigmoid(beta * x), (LARGE, ())),
    Pair("silu", hf.silu, lambda x: x * torch.sigmoid(x), (LARGE,)),
    Pair("gelu", hf.gelu, lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)), (LARGE,)),
    Pair("mish", hf.mish, lambda x: x * torch.tanh(F.softplus(x)), (LARGE,)),
    Pair("softplus", hf.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x)), (LARGE,)),
    Pair("log_sigmoid", hf.log_sigmoid, lambda x: -torch.logaddexp(-x, torch.zeros_like(x)), (LARGE,)),
    Pair("clipped_relu", lambda x: hf.clipped_relu(x, 1.0), lambda x: x.clamp(0, 1), (LARGE,)),
    Pair("bias_act gelu", lambda x, b: hf.bias_act(x, b, "gelu"), lambda x, b: F.gelu(x + b), (LARGE, LARGE[-1:])),
    Pair("log_cosh", hf.log_cosh, _log_cosh, (LARGE,)),
    Pair("logsumexp", lambda x: hf.logsumexp(x, -1), _logsumexp, (LARGE,)),
    Pair("softmax", lambda x: hf.softmax(x, -1), lambda x: F.softmax(x, -1), (LARGE,)),
    *(
        Pair(
            f"fused_linear {name}",
            partial(_fused_linear, name),
            partial(_linear, activation),
            LINEAR,
        )
        for name, activation in (("relu", torch.relu), ("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh))
    ),
    Pair("fused_add_relu", hf.fused_add_relu, lambda x, y: torch.relu(x + y), (LARGE, LARGE)),
    Pair("scale_shift", hf.scale_shift, lambda x, w, b: x * w + b, (LARGE, LARGE[-1:], LARGE[-1:])),
    Pair(
        "conv2d",
        lambda x, w, b: hf.conv2d(x, w, b, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        ((16, 32, 32, 32), (32, 32, 3, 3), (32,)),
    ),
    Pair(
        "layer_norm",
        lambda x, w, b: hf.layer_norm(x, w.shape, w, b),
        _layer_norm,
        (LARGE, LARGE[-1:], LARGE[-1:]),
    ),
    Pair("attention", hf.attention, _attention, ((2, 4, 512, 32),) * 3),
    Pair("attention, longer", hf.attention, _attention, ((1, 4, 1024, 64),) * 3),
    Pair(
        "cross_entropy",
        lambda x: hf.cross_entropy(x, _targets(x)),
        lambda x: F.cross_entropy(x, _targets(x)),
        ((BATCH, CLASSES),),
    ),
    Pair(
        "soft_threshold",
        lambda x: hf.soft_threshold(x, 0.5),
        lambda x: x.sign() * torch.relu(x.abs() - 0.5),
        (LARGE,),
    ),
]


def gradient(way: Way, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute the gradient of half the sum of squares of the outputs."""
    return torch.autograd.grad(0.5 * way(*inputs).square().sum(), inputs)


def product(way: Way, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute forward, backward, and the double backward of all gradients along the inputs."""
    gradients = torch.autograd.grad(0.5 * way(*inputs).square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(gradients, inputs, [x.detach() for x in inputs])


def problems(quick: bool) -> Iterator[Problem]:
    """Yield one problem per Function."""
    for pair in PAIRS[: 2 if quick else None]:
        inputs = pair.inputs()
        exact = product(pair.theirs, tuple(x.detach().double().requires_grad_() for x in inputs))
        yield Problem(
            name=pair.name,
            title=f"{pair.name}, inputs {', '.join(map(str, pair.shapes))}",
            contestants=[
                Contestant("composition, one gradient", "unit", partial(gradient, pair.theirs, inputs)),
                Contestant("hodiff, double backward", "hodiff", partial(product, pair.ours, inputs)),
                Contestant("composition, double backward", "torch", partial(product, pair.theirs, inputs)),
            ],
            error=partial(_error, exact),
            tolerance=1e-3,
        )


def _error(exact: tuple[Tensor, ...], found: Any) -> float:
    return relative_error(torch.cat([x.flatten() for x in found]), torch.cat([x.flatten() for x in exact]))


def saved(quick: bool) -> list[Peak]:
    """Measure the bytes that the graph of either way keeps for backward."""
    found = []
    for pair in PAIRS[: 2 if quick else None]:
        for name, way in (("hodiff", pair.ours), ("composition", pair.theirs)):
            found.append(Peak(pair.name, name, saved_bytes(way, pair.inputs()) / 2**20))
    return found


def saved_bytes(way: Way, inputs: tuple[Tensor, ...]) -> int:
    """Count the bytes of all tensors that the graph of one forward pass keeps, counting shared storage once.

    Args:
        way: Function to run.
        inputs: Arguments of `way`.

    Returns:
        The number of bytes.
    """
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = way(*inputs)
    assert output.requires_grad
    return sum(held.values())
