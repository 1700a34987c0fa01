"""Cost of a step of every optimizer in `hodiff.optim`, in gradients of the same loss and in steps of AdamW.

Memory of the optimizers' states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from benchmarks.language_model import LanguageModel
from benchmarks.machine import one_core
from benchmarks.race import Contestant, median_ratio, race
from benchmarks.report import table
from benchmarks.residual_steps import ADAMW, WIDTHS, measured_residuals
from benchmarks.training.tasks import TASKS
from hodiff.optim import (
    KFAC,
    KLSOAP,
    SAM,
    SOAP,
    AdaHessian,
    KLShampoo,
    Muon,
    NewtonCG,
    Shampoo,
    SophiaG,
    SophiaH,
)
from hodiff.optim.curvature_optimizer import CurvatureOptimizer
from hodiff.optim.kfac.layer_calls import LayerObserver, wait_for_layers
from hodiff.optim.watched_backward import wait

Batch = tuple[nn.Module, Tensor, Tensor]


def mlp() -> Batch:
    """Return a network 784-512-512-10 and a batch of 128."""
    layers = [nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(128, 784), torch.randint(10, (128,))


class Transformer(nn.Module):
    """Two transformer layers over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 128)
        layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(128, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits, with the classes in the second dimension."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits.transpose(1, 2)


def transformer() -> Batch:
    """Return a transformer of two layers with d = 128, and 8 x 64 tokens."""
    return Transformer(), torch.randint(64, (8, 64)), torch.randint(64, (8, 64))


def convolutions() -> Batch:
    """Return the network of the training benchmark and a batch of 128 digits."""
    task = TASKS["convolutions"]
    data = task.load()
    return task.make(), data.inputs[:128], data.targets[:128]


def gpt(vocabulary: int, batch: int, length: int, width: int, heads: int) -> Batch:
    """Return a GPT of two layers and a batch of tokens."""
    tokens = torch.randint(vocabulary, (batch, length))
    return LanguageModel(vocabulary, length, width, heads, layers=2), tokens, tokens.flatten().roll(1)


@dataclass(frozen=True)
class Run:
    """A step, and the optimizer that takes it, if any."""

    step: Callable[[], Any]
    optimizer: Any = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the optimizer watch modules and backward passes, which costs time for all models of the process."""
        watches = isinstance(self.optimizer, CurvatureOptimizer)
        if watches:
            self.optimizer._wait()
        yield
        if watches:
            wait(self.optimizer, False)
        if isinstance(self.optimizer, LayerObserver):
            wait_for_layers(self.optimizer, False)


def loop(make: Callable[..., Any], batch: Batch, of: Callable[[nn.Module], Any] = nn.Module.parameters) -> Run:
    """Return a step of an ordinary training loop."""
    model, inputs, labels = batch
    optimizer = make(of(model), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return Run(step, optimizer)


def known_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that K-FAC supports: all but those of torch's attention, which uses functional calls."""
    return [p for name, p in model.named_parameters() if "self_attn" not in name]


def closure(make: Callable[..., Any], batch: Batch) -> Run:
    """Return a step that takes a closure of the loss."""
    model, inputs, labels = batch
    optimizer = make(model.parameters(), lr=1e-6)
    return Run(lambda: optimizer.step(lambda: cross_entropy(model(inputs), labels)), optimizer)


def pair(make: Callable[..., Any], batch: Batch) -> Run:
    """Return a step that takes a closure of the outputs and their loss."""
    model, inputs, labels = batch
    optimizer = make(model.parameters(), lr=1e-6)

    def outputs_and_loss() -> Any:
        return model(inputs), lambda outputs: cross_entropy(outputs, labels)

    return Run(lambda: optimizer.step(outputs_and_loss), optimizer)


def gradient(batch: Batch) -> Run:
    """Return a gradient of the loss, the unit of the ratios."""
    model, inputs, labels = batch
    parameters = list(model.parameters())
    return Run(lambda: torch.autograd.grad(cross_entropy(model(inputs), labels), parameters))


NEVER = 10**9
newton = partial(NewtonCG, damping=1.0, cg_iterations=10, cg_tolerance=0.0)
WAYS: dict[str, Callable[[Batch], Run]] = {
    "gradient": gradient,
    "`torch.optim.SGD`": partial(loop, torch.optim.SGD),
    "`torch.optim.Adam`": partial(loop, torch.optim.Adam),
    ADAMW: partial(loop, torch.optim.AdamW),
    "`SophiaH`, `SophiaG` or `AdaHessian`, not due": partial(loop, partial(SophiaH, update_every=NEVER)),
    "`SophiaH`, due, loop": partial(loop, partial(SophiaH, update_every=1)),
    "`SophiaH`, due, closure": partial(closure, partial(SophiaH, update_every=1)),
    "`AdaHessian`, due, loop": partial(loop, partial(AdaHessian, update_every=1)),
    "`AdaHessian`, due, closure": partial(closure, partial(AdaHessian, update_every=1)),
    "`SophiaG`, due": partial(loop, partial(SophiaG, update_every=1)),
    "`KFAC`, not due": partial(loop, partial(KFAC, update_every=NEVER), of=known_layers),
    "`KFAC`, due for curvature": partial(loop, partial(KFAC, update_every=1, refresh_every=NEVER), of=known_layers),
    "`KFAC`, due for curvature and inverses": partial(
        loop, partial(KFAC, update_every=1, refresh_every=1), of=known_layers
    ),
    "`Shampoo`, not due": partial(loop, partial(Shampoo, refresh_every=NEVER)),
    "`Shampoo`, due for roots": partial(loop, partial(Shampoo, refresh_every=1)),
    "`SOAP`, not due": partial(loop, partial(SOAP, refresh_every=NEVER)),
    "`SOAP`, due for its basis": partial(loop, partial(SOAP, refresh_every=1)),
    "`KLShampoo`, not due": partial(loop, partial(KLShampoo, refresh_every=NEVER)),
    "`KLShampoo`, due for its basis": partial(loop, partial(KLShampoo, refresh_every=1)),
    "`KLSOAP`, not due": partial(loop, partial(KLSOAP, refresh_every=NEVER)),
    "`KLSOAP`, due for its basis": partial(loop, partial(KLSOAP, refresh_every=1)),
    "`Muon`": partial(loop, Muon),
    "`SAM`": partial(closure, partial(SAM, base=torch.optim.SGD)),
    "`NewtonCG`, 10 iterations": partial(closure, newton),
    "`NewtonCG`, Gauss-Newton, 10 iterations": partial(pair, partial(newton, curvature="gauss-newton")),
}
# Number of steps of every kind in a hundred, with the defaults.
AVERAGES = {
    "`SophiaH`, loop": {"`SophiaH`, `SophiaG` or `AdaHessian`, not due": 90, "`SophiaH`, due, loop": 10},
    "`SophiaH`, closure": {"`SophiaH`, `SophiaG` or `AdaHessian`, not due": 90, "`SophiaH`, due, closure": 10},
    "`SophiaG`": {"`SophiaH`, `SophiaG` or `AdaHessian`, not due": 90, "`SophiaG`, due": 10},
    "`AdaHessian`, loop": {"`AdaHessian`, due, loop": 100},
    "`AdaHessian`, closure": {"`AdaHessian`, due, closure": 100},
    "`KFAC`": {
        "`KFAC`, not due": 90,
        "`KFAC`, due for curvature": 9,
        "`KFAC`, due for curvature and inverses": 1,
    },
    "`Shampoo`": {"`Shampoo`, not due": 90, "`Shampoo`, due for roots": 10},
    "`SOAP`": {"`SOAP`, not due": 90, "`SOAP`, due for its basis": 10},
    "`KLShampoo`": {"`KLShampoo`, not due": 90, "`KLShampoo`, due for its basis": 10},
    "`KLSOAP`": {"`KLSOAP`, not due": 90, "`KLSOAP`, due for its basis": 10},
    "`Muon`": {"`Muon`": 100},
}
WORKLOADS: dict[str, Callable[[], Batch]] = {
    "MLP 784-512-512-10": mlp,
    "transformer, 2 layers, d = 128": transformer,
    "GPT, 2 layers, d = 32, 64 tokens": partial(gpt, vocabulary=64, batch=2, length=32, width=32, heads=2),
    "GPT, 2 layers, d = 256, 512 tokens": partial(gpt, vocabulary=256, batch=8, length=64, width=256, heads=8),
    "digits CNN of 8 and 16 channels, 128 images": convolutions,
}
Ratios = dict[str, dict[str, float]]


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of an optimizer's state for each parameter."""
    held = [each for each in pytree.tree_leaves(list(map(dict, optimizer.state.values()))) if isinstance(each, Tensor)]
    # States may be views of joint tensors.
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values()) / sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield title, table and data of single steps and of average steps; quick uses the smallest network."""
    wanted = [*WORKLOADS][-1:] if quick else [*WORKLOADS]
    states: Ratios = {name: {} for name in wanted}
    with one_core():
        columns = {name: measured(name, 2 if quick else 11, states[name]) for name in wanted}
        natural = {f"width {width}": of_residuals(width, 2 if quick else 11) for width in WIDTHS[: 1 if quick else 2]}
    unit = "In gradients of the same loss, float32, one thread, by the processor's clock; medians over the rounds."
    yield "one step", f"{unit}\n\n{as_table(columns, 'a step of')}", columns
    means = {name: averages(found) for name, found in columns.items()}
    how = (
        "With the defaults: curvature, roots and bases every 10 steps, `AdaHessian`'s always, "
        "`KFAC`'s inverses every 100."
    )
    yield "a step on average", f"{how}\n\n{as_table(means, 'an average step of')}", means
    in_steps = {
        name: {way: gradients / columns[name][ADAMW] for way, gradients in each.items()} for name, each in means.items()
    }
    how = f"The same in steps of {ADAMW}. Calls take most of the time of the GPT of width 32."
    yield f"a step on average, in steps of {ADAMW}", f"{how}\n\n{as_table(in_steps, 'an average step of')}", in_steps
    how = (
        "Poisson's equation in two dimensions, at 256 points inside and 64 on the boundary, by networks of three "
        f"hidden layers: in steps of {ADAMW} on the same loss, whose Laplacian `hodiff.laplacian` computes."
    )
    yield "a step on residuals", f"{how}\n\n{as_table(natural, 'a step of')}", natural
    how = "Bytes of the state for each parameter, in float32, where a parameter takes 4."
    yield "state", f"{how}\n\n{as_table(states, 'the state of', '.1f')}", states


# The ways whose states are measured; steps of one optimizer have equal states.
STATES = {
    ADAMW: ADAMW,
    "`SophiaH`": "`SophiaH`, due, loop",
    "`AdaHessian`": "`AdaHessian`, due, loop",
    "`KFAC`": "`KFAC`, due for curvature and inverses",
    "`Shampoo`": "`Shampoo`, due for roots",
    "`SOAP`": "`SOAP`, due for its basis",
    "`KLShampoo`": "`KLShampoo`, due for its basis",
    "`KLSOAP`": "`KLSOAP`, due for its basis",
    "`Muon`": "`Muon`",
}


def of_residuals(width: int, rounds: int) -> dict[str, float]:
    """Return the ratio of a step of `PINNKFAC` to AdamW's, and the bytes of its state for each parameter."""
    ratio, optimizer = measured_residuals(width, rounds)
    return {"`PINNKFAC`": ratio, "`PINNKFAC`, bytes of state for each parameter": state_bytes(optimizer)}


def measured(name: str, rounds: int, states: dict[str, float]) -> dict[str, float]:
    """Measure the ratio of every way to the gradient, and the bytes of states."""
    torch.manual_seed(0)
    contestants = []
    for way, of in WAYS.items():
        run = of(WORKLOADS[name]())
        with run.turn():
            run.step()
        states |= {each: state_bytes(run.optimizer) for each, its in STATES.items() if its == way}
        contestants.append(Contestant(way, "hodiff", run.step, run.turn))
    seconds = race(contestants, rounds, name, time.process_time)
    return {way: median_ratio(each, seconds["gradient"]) for way, each in seconds.items() if way != "gradient"}


def averages(found: dict[str, float]) -> dict[str, float]:
    """Compute the average cost of a step from the costs of its kinds."""
    return {
        name: sum(found[way] * count for way, count in kinds.items()) / sum(kinds.values())
        for name, kinds in AVERAGES.items()
    }


def as_table(columns: Ratios, title: str, digits: str = ".2f") -> str:
    """Return ratios by way and network as a Markdown table."""
    ways = next(iter(columns.values()))
    return table([title, *columns], [[way, *(f"{each[way]:{digits}}" for each in columns.values())] for way in ways])
