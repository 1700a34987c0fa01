"""Derivatives of an objective by compiled JAX; data are arguments, so that XLA does not fold them as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from torch import Tensor

from benchmarks.objectives import Objective
from benchmarks.peers.jax_networks import PORTS, cross_entropy, mlp

Run = Callable[[], Any]


def ways(objective: Objective, direction: Tensor) -> dict[str, Run]:
    """Return calls of the gradient and of two Hessian-vector products.

    Args:
        objective: The function, in torch.
        direction: The vector, (n,).

    Returns:
        Compiled calls that return vectors of shape (n,).
    """
    loss, x, data = ported(objective)
    v = jnp.asarray(direction.numpy())
    gradient = jax.grad(loss)

    def forward_over_reverse(x: Any, v: Any, *data: Any) -> Any:
        return jax.jvp(lambda x: gradient(x, *data), (x,), (v,))[1]

    def reverse_over_reverse(x: Any, v: Any, *data: Any) -> Any:
        return jax.grad(lambda x: jnp.vdot(gradient(x, *data), v))(x)

    return {
        "JAX jit, one gradient": ready(gradient, x, *data),
        "JAX jit, jvp of grad": ready(forward_over_reverse, x, v, *data),
        "JAX jit, grad of <grad, v>": ready(reverse_over_reverse, x, v, *data),
    }


def dense_ways(objective: Objective) -> dict[str, Run]:
    """Return calls of the gradient and of the dense Hessian.

    Args:
        objective: The function, in torch.

    Returns:
        Compiled calls.
    """
    loss, x, data = ported(objective)
    return {
        "JAX jit, one gradient": ready(jax.grad(loss), x, *data),
        "JAX jit, hessian": ready(jax.hessian(loss), x, *data),
    }


def ported(objective: Objective) -> tuple[Callable[..., Any], Any, tuple[Any, Any]]:
    """Return an objective in JAX as a function of parameter vector, inputs and targets, with these arguments."""
    network = PORTS.get(objective.name, mlp)
    parameters = objective.parameters()
    # JAX sorts the keys of a dict; a list keeps torch's order.
    x, unravel = ravel_pytree([jnp.asarray(tensor.numpy()) for tensor in parameters.values()])

    def loss(x: Any, inputs: Any, targets: Any) -> Any:
        return cross_entropy(network(dict(zip(parameters, unravel(x), strict=True)), inputs), targets)

    return loss, x, (jnp.asarray(objective.inputs.numpy()), jnp.asarray(objective.targets.numpy()))


def ready(function: Callable[..., Any], *arguments: Any) -> Run:
    """Return a compiled call that waits for its result."""
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*arguments))
