"""Laplacians by folx on compiled JAX and by hodiff: the same networks, weights and points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import folx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.workloads import taylor, taylor_sparse, wavefunction

Array = Any
# Fewer rounds where a call takes seconds.
ROUNDS = {"sparse-nodes": 3, "sparse-wavefunction": 5}


def problems() -> Iterator[Problem]:
    """Yield the problems of the workloads `taylor` and `taylor_sparse` in float32, under the same names."""
    net = taylor.network(taylor.WIDTHS, torch.float32)
    for points in taylor.BATCHES:
        problem = taylor.laplacian_problem(net, points, torch.float32, full=True)
        x = taylor.inputs(points, taylor.WIDTHS[0], torch.float32)
        yield _beside_folx(problem, partial(_through, _layers(net), jnp.tanh), x, (0,))
    f, x = taylor_sparse.on_nodes()
    yield _beside_folx(taylor_sparse.nodes_problem(quick=False), _on_nodes(f), x, (0, 4))
    weights = jax.tree.map(lambda each: jnp.asarray(each, jnp.float32), wavefunction.parameters())
    x = wavefunction.positions(taylor_sparse.WALKERS)
    yield _beside_folx(taylor_sparse.wavefunction_problem(quick=False), partial(log_psi, weights), x, (0, 6))


def _beside_folx(problem: Problem, port: Callable[[Array], Array], x: Tensor, thresholds: tuple[int, ...]) -> Problem:
    """Return a problem without torch's own ways and with folx at several sparsity thresholds."""
    points = jnp.asarray(x.numpy())
    peers = [
        Contestant(
            f"folx {version('folx')}, JAX jit, sparsity_threshold={threshold}", "peer", _ready(port, threshold, points)
        )
        for threshold in thresholds
    ]
    others = [each for each in problem.contestants if each.group != "torch"]
    return replace(
        problem,
        contestants=[*others, *peers],
        error=lambda found: problem.error(_tensor(found)),
        targets=(),
    )


def _ready(port: Callable[[Array], Array], threshold: int, points: Array) -> Callable[[], Array]:
    """Return a compiled call that waits for the Laplacian."""
    operator = folx.ForwardLaplacianOperator(threshold)(port)
    compiled = jax.jit(jax.vmap(lambda x: operator(x)[0]))
    return lambda: jax.block_until_ready(compiled(points))


def _tensor(found: Any) -> Tensor:
    """Convert the result of either library to a torch tensor."""
    return found if isinstance(found, Tensor) else torch.from_numpy(np.array(found))


def _layers(net: nn.Module) -> list[tuple[Array, Array]]:
    return [
        (jnp.asarray(layer.weight.detach().numpy().T), jnp.asarray(layer.bias.detach().numpy()))
        for layer in net.modules()
        if isinstance(layer, nn.Linear)
    ]


def _through(layers: list[tuple[Array, Array]], activation: Callable[[Array], Array], x: Array) -> Array:
    for weight, bias in layers[:-1]:
        x = activation(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def _on_nodes(f: Any) -> Callable[[Array], Array]:
    layers = _layers(f.net)
    return lambda x: _through(layers, jax.nn.silu, x).sum()


def log_psi(weights: Any, x: Array) -> Array:
    """Compute `benchmarks.workloads.wavefunction.log_psi` in JAX for one walker (n, 3)."""
    n = x.shape[0]
    radius = jnp.linalg.norm(x, axis=-1, keepdims=True)
    single = jnp.tanh(jnp.concatenate([x, radius], -1) @ weights["embedding"])
    gathered = single
    for block in weights["blocks"]:
        q, k, v = (
            (single @ block[name]).reshape(n, wavefunction.HEADS, -1).transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        shares = jax.nn.softmax(q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5, -1)
        gathered = gathered + (shares @ v).transpose(1, 0, 2).reshape(n, -1) @ block["out"]
        single = single + jnp.tanh(single @ block["inner"]) @ block["outer"]
    orbitals = ((gathered + single) @ weights["orbitals"]) * jnp.exp(-radius * weights["decay"])
    sign, log = jnp.linalg.slogdet(orbitals.reshape(n, -1, n).transpose(1, 0, 2))
    top = jax.lax.stop_gradient(log.max())
    gaps = x[:, None] - x[None]
    distances = jnp.sqrt((gaps**2).sum(-1) + jnp.eye(n, dtype=x.dtype))
    return jnp.log(jnp.abs((sign * jnp.exp(log - top)).sum())) + top - jnp.triu(0.5 / (1 + distances), 1).sum()
