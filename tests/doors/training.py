"""A small problem, the optimizers that training loops of other programs use, and the loop written by hand."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hodiff.optim as ho

# With settings that refresh the curvature several times in few steps.
OPTIMIZERS = {
    "AdaHessian": partial(ho.AdaHessian, lr=0.05, update_every=2),
    "SophiaH": partial(ho.SophiaH, lr=0.02, update_every=2),
    "SophiaG": partial(ho.SophiaG, lr=0.02, update_every=2),
    "Shampoo": partial(ho.Shampoo, lr=0.05, refresh_every=2),
    "SOAP": partial(ho.SOAP, lr=0.02, refresh_every=2),
    "KFAC": partial(ho.KFAC, lr=0.05, update_every=2, refresh_every=2),
    "EKFAC": partial(ho.EKFAC, lr=0.05, update_every=2, refresh_every=2),
}


def network():
    """Return a network with the same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)).double()


def dataset(dtype=torch.float64, count=96):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), inputs[:, :3].argmax(1))


def loader(dtype=torch.float64, **options):
    return DataLoader(dataset(dtype), batch_size=16, **options)


def warm_up(optimizer, steps=3):
    """Raise the learning rate linearly over the first steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def by_hand(make, *, epochs=2, accumulate=1, clip=None, warm=False, net=None, wrapped=None):
    """Train by the loop that everyone writes, and return the network; `wrapped` computes the outputs."""
    net = network() if net is None else net
    optimizer = make(net.parameters())
    scheduler = warm_up(optimizer) if warm else None
    for _ in range(epochs):
        for index, (inputs, labels) in enumerate(loader()):
            loss = cross_entropy((wrapped or net)(inputs), labels)
            (loss / accumulate).backward()
            if (index + 1) % accumulate:
                continue
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return net


def assert_same(a, b, **tolerances):
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(x, y, msg=lambda words, name=name: f"{name}: {words}", **tolerances)
