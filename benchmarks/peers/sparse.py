"""Sparse Hessians by asdex on compiled JAX and by hodiff: the same functions and points, in float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import asdex
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import torch
from torch import Tensor

import hodiff
from benchmarks.peers.costs import Preparation
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.workloads import sparse
from benchmarks.workloads.potentials import lennard_jones

# This module runs in its own process, so the global setting affects nothing else.
jax.config.update("jax_enable_x64", True)

Array = Any
Port = Callable[[Array], Array]
SIZES = (1000, 10_000, 100_000)
ATOMS = 1000
NAME = f"asdex {version('asdex')}, JAX jit"


def rosenbrock(x: Array) -> Array:
    """Compute `benchmarks.workloads.sparse.rosenbrock` in JAX."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def pair_energy(x: Array, one: Array, other: Array, cutoff: float) -> Array:
    """Compute the energy of the example `vibrational_modes` in JAX."""
    places = x.reshape(-1, 3)
    squared = ((places[one] - places[other]) ** 2).sum(-1)
    gate = jnp.maximum(1 - squared / cutoff**2, 0) ** 3
    cube = squared**-3
    return (4 * (cube**2 - cube) * gate).sum()


@dataclass(frozen=True)
class Case:
    """A function in both libraries, and a point."""

    name: str
    title: str
    f: Callable[[Tensor], Tensor]
    port: Port
    x: Tensor


def cases() -> Iterator[Case]:
    """Yield chains of several lengths, and atoms with a cutoff."""
    for n in SIZES:
        x = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        yield Case(f"chain-{n}", f"Chained Rosenbrock function, n = {n:,}", sparse.rosenbrock, rosenbrock, x)
    atoms = lennard_jones(ATOMS)
    words = atoms.energy.keywords
    one, other = (jnp.asarray(words[name].numpy()) for name in ("one", "other"))
    cutoff = atoms.energy.func.__globals__["CUTOFF"]
    port = partial(pair_energy, one=one, other=other, cutoff=cutoff)
    yield Case("atoms", f"{ATOMS:,} atoms, {atoms.name}", atoms.energy, port, atoms.x)


def prepared(case: Case) -> tuple[Problem, dict[str, Preparation]]:
    """Return the race of one case, and the costs of its patterns and colorings."""
    x = jnp.asarray(case.x.numpy())
    begun = time.process_time()
    theirs = asdex.hessian_coloring(case.port, x)
    halfway = time.process_time()
    ours = hodiff.sparse.color(hodiff.sparse.hessian_pattern(case.f, case.x))
    seconds = halfway - begun, time.process_time() - halfway
    compiled = jax.jit(asdex.hessian_from_coloring(case.port, theirs))
    contestants = [
        Contestant("one gradient", "unit", partial(sparse.gradient, case.f, case.x)),
        Contestant("hodiff", "hodiff", partial(hodiff.sparse.hessian(case.f, coloring=ours), case.x)),
        Contestant(
            "hodiff, compile=True",
            "hodiff",
            partial(hodiff.sparse.hessian(case.f, coloring=ours, compile=True), case.x),
        ),
        Contestant(NAME, "peer", lambda: jax.block_until_ready(compiled(x))),
    ]
    v = torch.randn(len(case.x), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = sparse.difference(case.f, case.x, v)
    problem = Problem(
        case.name,
        case.title,
        contestants,
        error=lambda found: float((product(found, v) - expected).norm() / expected.norm()),
        tolerance=sparse.TOLERANCE,
    )
    colors = theirs.num_colors, ours.num_colors
    return problem, {
        who: Preparation(*each)
        for who, each in zip((NAME.split(",")[0], "hodiff"), zip(seconds, colors, strict=True), strict=True)
    }


def product(found: Any, v: Tensor) -> Tensor:
    """Multiply a vector by a sparse matrix of either library."""
    if isinstance(found, Tensor):
        return found @ v
    indices = np.asarray(found.indices).T
    matrix = scipy.sparse.coo_array((np.asarray(found.data), indices), shape=found.shape)
    return torch.from_numpy(matrix @ v.numpy())
