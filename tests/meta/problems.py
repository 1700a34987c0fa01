"""Small inner problems for the tests of hodiff.meta."""

from collections.abc import Callable
from typing import Any

import torch
from drawing import draw
from torch import Tensor, nn
from torch.func import functional_call

Tree = dict[str, Tensor]


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def module_loss(module: nn.Module) -> Callable[[Tree, tuple[Tensor, Tensor]], Tensor]:
    return lambda params, batch: mse(functional_call(module, params, (batch[0],)), batch[1])


def batch(seed: int = 0, size: int = 5) -> tuple[Tensor, Tensor]:
    x = draw(size, 2, seed=seed)
    return x, x.sum(1, keepdim=True).sin()


def quartic(w: Tensor, shift: Tensor) -> Tensor:
    """Compute a loss with nonzero derivatives up to fourth order."""
    return ((w - shift) ** 2).sum() / 2 + (w * w.roll(1)).sin().sum() / 3 + (w**4).sum() / 20


def flat(tree: Any) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in torch.utils._pytree.tree_leaves(tree)])
