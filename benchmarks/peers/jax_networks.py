"""JAX versions of the networks of `benchmarks.objectives`, with torch's parameters under torch's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
Parameters = dict[str, Array]


def cross_entropy(scores: Array, targets: Array) -> Array:
    """Compute the mean cross-entropy over rows."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[:, None], axis=1)
    return -chosen.mean()


def linear(parameters: Parameters, name: str, x: Array) -> Array:
    """Apply a linear layer, as torch's nn.Linear."""
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def layer_norm(parameters: Parameters, name: str, x: Array) -> Array:
    """Normalize over the last axis, as torch's nn.LayerNorm."""
    centered = x - x.mean(axis=-1, keepdims=True)
    normal = centered * lax.rsqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normal * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def mlp(parameters: Parameters, inputs: Array) -> Array:
    """Apply linear layers with tanh between them."""
    names = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    for name in names[:-1]:
        inputs = jnp.tanh(linear(parameters, name, inputs))
    return linear(parameters, names[-1], inputs)


def attention(parameters: Parameters, name: str, tokens: Array, heads: int = 4) -> Array:
    """Apply multi-head self-attention."""
    batch, length, width = tokens.shape
    split = linear(parameters, f"{name}.project", tokens).reshape(batch, length, 3, heads, width // heads)
    query, key, value = split.transpose(2, 0, 3, 1, 4)
    weights = jax.nn.softmax(query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5)
    mixed = (weights @ value).swapaxes(1, 2).reshape(batch, length, width)
    return linear(parameters, f"{name}.output", mixed)


def transformer(parameters: Parameters, tokens: Array) -> Array:
    """Compute class scores of every token by two transformer layers."""
    x = parameters["embedding.weight"][tokens] + parameters["position"]
    for name in ("layers.0", "layers.1"):
        x = x + attention(parameters, f"{name}.attention", layer_norm(parameters, f"{name}.attention_norm", x))
        hidden = linear(parameters, f"{name}.mlp.0", layer_norm(parameters, f"{name}.mlp_norm", x))
        x = x + linear(parameters, f"{name}.mlp.2", jax.nn.gelu(hidden, approximate=False))
    return linear(parameters, "output", layer_norm(parameters, "norm", x)).reshape(-1, 64)


def convolution(parameters: Parameters, name: str, images: Array) -> Array:
    """Apply a 3x3 convolution, ReLU, and max-pooling by 2."""
    images = lax.conv_general_dilated(images, parameters[f"{name}.weight"], (1, 1), "SAME")
    images = jax.nn.relu(images + parameters[f"{name}.bias"][:, None, None])
    return lax.reduce_window(images, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def cnn(parameters: Parameters, images: Array) -> Array:
    """Apply two convolutions and a linear layer."""
    images = convolution(parameters, "3", convolution(parameters, "0", images))
    return linear(parameters, "7", images.reshape(len(images), -1))


PORTS: dict[str, Callable[[Parameters, Array], Array]] = {"mlp": mlp, "transformer": transformer, "cnn": cnn}
