"""Meta-gradients of MAML on sine waves and on digits: loops in torch against hodiff, eager and compiled.

learn2learn, higher and TorchOpt would be the peers; none of them could be installed with this torch. The loop over
tasks does the same: an inner gradient with `create_graph=True`, then a step by hand. `benchmarks.meta_memory` measures
the memory of these ways and of long inner loops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error
from examples.maml_sinusoid import COMPILE_FROM, draw_tasks, make_meta_gradient, make_network, mean_squared_error
from hodiff.meta import MAML

Parameters = dict[str, Tensor]
Tasks = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Episode:
    """Meta-step: tasks on which a network takes inner steps before it is evaluated."""

    name: str
    title: str
    network: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    tasks: Tasks
    steps: int
    rate: float

    def parameters(self) -> Parameters:
        """Return the network's parameters as leaves that share its memory."""
        return {name: each.detach().requires_grad_() for name, each in self.network.named_parameters()}

    def value(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        """Compute the loss on one batch of one task."""
        return self.loss(functional_call(self.network, parameters, (x,)), y)

    def double(self) -> Episode:
        """Return the same episode in float64."""
        support_x, support_y, query_x, query_y = (
            each.double() if each.is_floating_point() else each for each in self.tasks
        )
        network = copy.deepcopy(self.network).double()
        return replace(self, network=network, tasks=(support_x, support_y, query_x, query_y))


def sinusoid(tasks: int = 25, shots: int = 5) -> Episode:
    """Return a meta-step of Finn et al., 2017, section 5.1: 1-40-40-1 with ReLU, one inner step."""
    torch.manual_seed(0)
    data = draw_tasks(tasks, shots, shots, torch.Generator().manual_seed(0))
    title = f"sine waves: 1-40-40-1, {tasks} tasks of {shots} + {shots} points, 1 inner step, in units of the loop"
    return Episode("sinusoid", title, make_network(), mean_squared_error, data, steps=1, rate=0.01)


def digits_cnn(tasks: int = 4, images: int = 32, steps: int = 2) -> Episode:
    """Return an episode with two convolutions, to 16 and 32 channels, on scikit-learn's digits."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )
    pixels, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(labels))[: tasks * 2 * images].view(tasks, 2 * images)
    x = (torch.from_numpy(pixels / 16).float()[chosen]).view(tasks, 2 * images, 1, 8, 8)
    y = torch.from_numpy(labels)[chosen]
    data = x[:, :images], y[:, :images], x[:, images:], y[:, images:]
    shape = f"{tasks} tasks of {images} + {images} images, {steps} inner steps"
    title = f"digits: CNN of 16 and 32 channels, {shape}, in units of the loop"
    return Episode("digits-cnn", title, network, F.cross_entropy, data, steps=steps, rate=0.1)


def task_by_task(episode: Episode) -> Parameters:
    """Compute the meta-gradient as one writes it by hand: one task after another, every step recorded."""
    start = episode.parameters()
    losses = []
    for support_x, support_y, query_x, query_y in zip(*episode.tasks, strict=True):
        adapted = start
        for _ in range(episode.steps):
            value = episode.value(adapted, support_x, support_y)
            slopes = torch.autograd.grad(value, list(adapted.values()), create_graph=True)
            adapted = {
                name: each - episode.rate * slope for (name, each), slope in zip(adapted.items(), slopes, strict=True)
            }
        losses.append(episode.value(adapted, query_x, query_y))
    return dict(zip(start, torch.autograd.grad(torch.stack(losses).mean(), list(start.values())), strict=True))


def batched(episode: Episode) -> Callable[[Parameters], Parameters]:
    """Return the meta-gradient of all tasks at once by `torch.func`, as a function of the parameters."""

    def judged(start: Parameters, support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> Tensor:
        adapted = start
        for _ in range(episode.steps):
            slopes = grad(episode.value)(adapted, support_x, support_y)
            adapted = {name: each - episode.rate * slopes[name] for name, each in adapted.items()}
        return episode.value(adapted, query_x, query_y)

    return grad(lambda start: vmap(judged, (None, 0, 0, 0, 0))(start, *episode.tasks).mean())


def contestants(episode: Episode, quick: bool) -> list[Contestant]:
    """Return the contestants, the loop over tasks first as the unit; quick omits compilation, which takes a minute."""
    detached = {name: each.detach() for name, each in episode.parameters().items()}
    maml = MAML(episode.network, episode.loss, episode.rate, episode.steps)
    at_once = batched(episode)

    def recorded() -> Parameters:
        leaves = dict(maml.named_parameters())
        return dict(zip(leaves, torch.autograd.grad(maml(episode.tasks), list(leaves.values())), strict=True))

    eager = [
        Contestant("torch, loop over tasks", "torch", partial(task_by_task, episode)),
        Contestant("torch.func, vmap of grad", "torch", partial(at_once, detached)),
        Contestant("hodiff MAML", "hodiff", recorded),
    ]
    if quick:
        return eager
    learned = {name: each.detach() for name, each in maml.named_parameters()}
    compiled = make_meta_gradient(maml, COMPILE_FROM)
    return [
        *eager,
        Contestant("torch.func, vmap of grad, compiled", "torch", partial(torch.compile(at_once), detached)),
        Contestant("hodiff MAML, compiled", "hodiff", lambda: compiled(learned, episode.tasks)[0]),
    ]


def problems(quick: bool) -> Iterator[Problem]:
    """Yield the sine waves and, unless quick, the digits."""
    for build in (sinusoid, digits_cnn)[: 1 if quick else None]:
        episode = build()
        yield Problem(
            name=episode.name,
            title=episode.title,
            contestants=contestants(episode, quick),
            error=partial(_error, flat(task_by_task(episode.double()))),
            tolerance=1e-4,
        )


def flat(gradients: Parameters) -> Tensor:
    """Return the gradients in one vector, in the order of the network's parameters."""
    return torch.cat([each.flatten() for each in gradients.values()])


def _error(expected: Tensor, found: Parameters) -> float:
    return relative_error(flat(found), expected)
