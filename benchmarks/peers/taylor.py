"""Laplacians by folx on JAX, compiled, beside hodiff's: the same networks, weights and points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import folx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.workloads import taylor, taylor_sparse, wavefunction

Array = Any


def problems() -> Iterator[Problem]:
    """The problems of the workloads `taylor` and `taylor_sparse` in float32, by their names."""
    net = taylor.network(taylor.WIDTHS, torch.float32)
    for points in taylor.BATCHES:
        x = torch.randn(points, taylor.WIDTHS[0], generator=torch.Generator().manual_seed(1))
        expected = taylor.by_hand(net.double(), x.double())[:, 0]
        net = net.float()
        by_hand = Contestant("by hand, eager torch", "unit", partial(taylor.by_hand, net, x))
        yield _problem(f"laplacian-{points}-float32", by_hand, _first(net), _tanh(net), x, (0,), expected)
    nodes, x = taylor_sparse.on_nodes()
    yield _problem("sparse-nodes", None, nodes, _on_nodes(nodes), x, (0, 4))
    weights = wavefunction.parameters()
    f = partial(wavefunction.log_psi, wavefunction.as_tensors(weights, torch.float32))
    x = torch.randn(taylor_sparse.WALKERS, wavefunction.ELECTRONS, 3, generator=torch.Generator().manual_seed(1))
    port = partial(log_psi, jax.tree.map(lambda each: jnp.asarray(each, jnp.float32), weights))
    yield _problem("sparse-wavefunction", None, f, port, x, (0, 6))


def _problem(
    name: str,
    unit: Contestant | None,
    f: Callable[[Tensor], Tensor],
    port: Callable[[Array], Array],
    x: Tensor,
    thresholds: tuple[int, ...],
    expected: Tensor | None = None,
) -> Problem:
    ready = partial(hodiff.laplacian(f, batched=True), x)
    laplacian = Contestant("hodiff.laplacian", "unit" if unit is None else "torch", ready)
    right = hodiff.laplacian(f, batched=True, sparse=False)(x) if expected is None else expected
    points = jnp.asarray(x.numpy())
    peers = [
        Contestant(
            f"folx {version('folx')}, JAX jit, sparsity_threshold={threshold}", "peer", _ready(port, threshold, points)
        )
        for threshold in thresholds
    ]
    return Problem(
        name=name,
        title=name,
        contestants=[*([] if unit is None else [unit]), laplacian, *peers],
        error=lambda found: _error(found, right),
        tolerance=1e-3,
    )


def _ready(port: Callable[[Array], Array], threshold: int, points: Array) -> Callable[[], Array]:
    """A compiled call that waits for its result, the Laplacian alone."""
    operator = folx.ForwardLaplacianOperator(threshold)(port)
    compiled = jax.jit(jax.vmap(lambda x: operator(x)[0]))
    return lambda: jax.block_until_ready(compiled(points))


def _error(found: Any, right: Tensor) -> float:
    own = found if isinstance(found, Tensor) else torch.from_numpy(np.array(found))
    return taylor_sparse.typical_error(own.reshape(-1), right.double().reshape(-1))


def _first(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """The only output."""
    return lambda x: net(x)[..., 0]


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


def _tanh(net: nn.Module) -> Callable[[Array], Array]:
    layers = _layers(net)
    return lambda x: _through(layers, jnp.tanh, x)[0]


def _on_nodes(f: Any) -> Callable[[Array], Array]:
    layers = _layers(f.net)
    return lambda x: _through(layers, jax.nn.silu, x).sum()


def log_psi(weights: Any, x: Array) -> Array:
    """`benchmarks.workloads.wavefunction.log_psi` in JAX, of one walker (n, 3)."""
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
