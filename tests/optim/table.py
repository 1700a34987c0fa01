"""A table of all optimizers, and a problem that all of them can minimize."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import hodiff.optim as ho

cross_entropy = nn.functional.cross_entropy


@dataclass(frozen=True)
class Case:
    """An optimizer with settings that cause several refreshes, and its properties."""

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    loop: bool = True  # `loss.backward(); optimizer.step()` suffices
    backward: bool = True  # closures may call backward
    pair: bool = False  # closures return (outputs, loss)
    maximize: bool = True
    complex_too: bool = False
    apart: bool = True  # groups behave like separate optimizers
    groups: bool = True
    systems: int = 1  # number of systems of equations, and so of graphs, in a step
    bare: bool = True  # accepts parameters that belong to no layer

    @property
    def watches(self):
        """Whether the optimizer intercepts the loss at `backward`."""
        return "update_every" in self.options

    def __call__(self, parameters, **options):
        return self.make(parameters, **{**self.options, **options})


TABLE = {
    "AdaHessian": Case(ho.AdaHessian, {"lr": 0.05, "update_every": 3, "weight_decay": 0.01}),
    "SophiaH": Case(ho.SophiaH, {"lr": 0.05, "update_every": 3, "weight_decay": 0.01, "probes": "rademacher"}),
    "SophiaG": Case(ho.SophiaG, {"lr": 0.05, "update_every": 3, "weight_decay": 0.01}),
    "Shampoo": Case(ho.Shampoo, {"lr": 0.05, "refresh_every": 3, "weight_decay": 0.01}),
    "Shampoo, the paper's": Case(
        partial(ho.Shampoo, accumulate=True, grafting=None, betas=(0.0, 0.0), eps=1e-3), {"lr": 0.1}
    ),
    "SOAP": Case(ho.SOAP, {"lr": 0.05, "refresh_every": 3, "weight_decay": 0.01}),
    "KLShampoo": Case(ho.KLShampoo, {"lr": 0.05, "refresh_every": 3, "weight_decay": 0.01}),
    "KLSOAP": Case(ho.KLSOAP, {"lr": 0.05, "refresh_every": 3, "weight_decay": 0.01}),
    "Muon": Case(ho.Muon, {"lr": 0.05, "weight_decay": 0.01}),
    "Muon, the original": Case(partial(ho.Muon, scaling="shape", nesterov=False), {"lr": 0.05}),
    "KFAC": Case(
        ho.KFAC, {"lr": 0.05, "update_every": 3, "refresh_every": 2, "kl_clip": None}, apart=False, bare=False
    ),
    "EKFAC": Case(
        partial(ho.EKFAC, fisher="exact", sharing="reduce"),
        {"lr": 0.05, "update_every": 3, "refresh_every": 2, "weight_decay": 0.01, "kl_clip": 0.1},
        apart=False,
        bare=False,
    ),
    "SAM": Case(partial(ho.SAM, base=torch.optim.Adam), {"lr": 0.05}, loop=False, complex_too=True, apart=False),
    "ASAM": Case(
        partial(ho.SAM, base=torch.optim.SGD, adaptive=True, rho=0.5),
        {"lr": 0.05, "momentum": 0.9},
        loop=False,
        complex_too=True,
        apart=False,
    ),
    "NewtonCG": Case(ho.NewtonCG, {"damping": 0.1, "cg_iterations": 20}, loop=False, backward=False, apart=False),
    "NewtonCG, Gauss-Newton": Case(
        partial(ho.NewtonCG, curvature="gauss-newton"),
        {"damping": 0.1, "cg_iterations": 20},
        loop=False,
        backward=False,
        pair=True,
        apart=False,
    ),
    "NewtonCG, line search": Case(
        partial(ho.NewtonCG, line_search_fn="backtracking"),
        {"cg_iterations": 20},
        loop=False,
        backward=False,
        apart=False,
    ),
    "LayerwiseGaussNewton": Case(
        ho.LayerwiseGaussNewton,
        {"damping": 0.01, "cg_iterations": 20},
        loop=False,
        backward=False,
        pair=True,
        apart=False,
        systems=4,
    ),
    "LayerwiseGaussNewton, adaptive": Case(
        ho.LayerwiseGaussNewton,
        {"cg_iterations": 20},
        loop=False,
        backward=False,
        pair=True,
        apart=False,
        systems=4,
    ),
    "HessianFree": Case(
        ho.HessianFree, {"cg_iterations": 30}, loop=False, backward=False, pair=True, maximize=False, apart=False
    ),
    "HessianFree, preconditioned": Case(
        partial(ho.HessianFree, preconditioner="empirical-fisher"),
        {"cg_iterations": 30},
        loop=False,
        backward=False,
        pair=True,
        maximize=False,
        apart=False,
    ),
    "LBFGS": Case(ho.LBFGS, {"max_iter": 4}, loop=False, maximize=False, complex_too=True, apart=False, groups=False),
    "SSBroyden": Case(ho.SSBroyden, {"max_iter": 4}, loop=False, maximize=False, apart=False, groups=False),
}


class Problem:
    """A small classifier in float64 and its batches."""

    def __init__(self, seed=0, count=8):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.batches = [(torch.randn(6, 3).double(), torch.randint(3, (6,))) for _ in range(count)]

    def copy(self):
        return copy.deepcopy(self)

    def loss(self, batch):
        inputs, labels = batch
        return cross_entropy(self.model(inputs), labels)

    def closure(self, case, batch):
        if case.pair:
            inputs, labels = batch
            return lambda: (self.model(inputs), lambda outputs: cross_entropy(outputs, labels))
        return lambda: self.loss(batch)

    def run(self, case, optimizer, batches=None):
        """Train with `loss.backward(); optimizer.step()` if it suffices, or else with closures."""
        for batch in self.batches if batches is None else batches:
            if case.loop:
                optimizer.zero_grad()
                self.loss(batch).backward()
                optimizer.step()
            else:
                optimizer.step(self.closure(case, batch))
        return self.numbers()

    def numbers(self):
        return [p.detach().clone() for p in self.model.parameters()]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))
