"""Samples that are differentiable with respect to the parameters of their distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_generator, require_int
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.gradients.straight_through import straight_through
from hodiff.functions.softmax.softmax import Softmax
from hodiff.rules.arguments import (
    require_broadcasts_to,
    require_dims,
    require_floating,
    require_positive_or_floating,
)


@overridable
def gumbel_softmax(
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    hard: bool = False,
    dim: int = -1,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Relaxed one-hot sample of a class, $y = \operatorname{softmax}((x + g)/\tau)$ with Gumbel noise $g$.

    The noise is drawn once, so that the sample is a smooth function of the logits and the temperature, and has the
    derivatives of the soft sample at this noise. With `hard`, the value is the one-hot vector of the largest element,
    whose class has exactly the probabilities $\operatorname{softmax}(x)$. Its derivatives of every order remain those
    of the soft sample (straight-through).

    Under `torch.func.vmap`, pass `randomness="different"` or `"same"` to it, and no generator. For transforms that
    evaluate a function several times, call `sample_gumbel` outside and `perturbed_softmax` inside.

    Args:
        logits: Floating-point tensor of unnormalized log-probabilities.
        temperature: Positive number $\tau$, or positive floating-point tensor that broadcasts with `logits` and may
            require a gradient; of size 1 along `dim`.
        hard: Whether the values are one-hot.
        dim: The dimension of the classes.
        generator: Source of the noise, on the device of `logits`; torch's own if None.

    Returns:
        Tensor of the shape of `logits`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> logits = torch.tensor([0.0, 1.0, 2.0])
        >>> gumbel_softmax(logits, 0.5, hard=True, generator=torch.Generator().manual_seed(0)).sum()
        tensor(1.)

    Source: E. Jang, S. Gu & B. Poole, "Categorical reparameterization with Gumbel-softmax", 2017, equation 2 and
    section 2.2; C. Maddison, A. Mnih & Y. W. Teh, "The concrete distribution", 2017.
    """
    require_floating("gumbel_softmax", logits=logits)
    require_generator("gumbel_softmax", "generator", generator, device=logits.device)
    return _perturbed("gumbel_softmax", logits, sample_gumbel(logits, generator), temperature, hard, dim)


@overridable
def perturbed_softmax(
    logits: Tensor, noise: Tensor, temperature: Tensor | float = 1.0, hard: bool = False, dim: int = -1
) -> Tensor:
    r"""`gumbel_softmax` with given noise: $\operatorname{softmax}((x + g)/\tau)$, a deterministic function.

    Code that evaluates a function several times, such as transforms of `torch.func`, operators and checks, sees one
    function. Derivatives of every order, also with respect to the noise, are those of the soft sample.

    Args:
        logits: Floating-point tensor of unnormalized log-probabilities.
        noise: Floating-point tensor of the same shape, as from `sample_gumbel`.
        temperature: Temperature, as in `gumbel_softmax`.
        hard: Whether the values are one-hot.
        dim: The dimension of the classes.

    Returns:
        Tensor of the shape of `logits`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> logits = torch.tensor([0.0, 1.0, 2.0])
        >>> perturbed_softmax(logits, torch.zeros(3))
        tensor([0.0900, 0.2447, 0.6652])

    Source: E. Jang, S. Gu & B. Poole, "Categorical reparameterization with Gumbel-softmax", 2017, equation 2.
    """
    require_floating("perturbed_softmax", logits=logits, noise=noise)
    if noise.shape != logits.shape:
        raise InputError(
            f"perturbed_softmax: noise: expected the shape {tuple(logits.shape)} of logits, got {tuple(noise.shape)}."
        )
    return _perturbed("perturbed_softmax", logits, noise, temperature, hard, dim)


def sample_gumbel(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    r"""Standard Gumbel noise, $-\log(-\log u)$ with u uniform in (0, 1), finite and without a graph.

    Args:
        like: Floating-point tensor, whose shape, dtype and device the noise has.
        generator: Source of the noise, on the device of `like`; torch's own if None.

    Returns:
        Tensor of the shape of `like`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> noise = sample_gumbel(torch.zeros(1000), torch.Generator().manual_seed(0))
        >>> bool((noise.mean() - 0.5772).abs() < 0.1)  # Euler's constant
        True

    Source: E. Jang, S. Gu & B. Poole, "Categorical reparameterization with Gumbel-softmax", 2017, section 2.1.
    """
    require_floating("sample_gumbel", like=like)
    require_generator("sample_gumbel", "generator", generator, device=like.device)
    # Draw in single precision at least: a uniform number in half precision is zero too often.
    dtype = torch.promote_types(like.dtype, torch.float32)
    u = torch.rand(like.shape, generator=generator, dtype=dtype, device=like.device)
    limits = torch.finfo(dtype)
    u = u.clamp(limits.tiny, 1 - limits.eps / 2)
    return -torch.log(-torch.log(u)).to(like.dtype)


def _perturbed(name: str, logits: Tensor, noise: Tensor, temperature: Tensor | float, hard: bool, dim: int) -> Tensor:
    require_positive_or_floating(name, "temperature", temperature)
    require_bool(name, "hard", hard)
    require_int(name, "dim", dim)
    (axis,) = require_dims(name, logits, dim)
    if logits.dim() == 0:
        raise InputError(f"{name}: logits: expected at least one dimension, got a tensor of shape ().")
    samples = [1 if k == axis else size for k, size in enumerate(logits.shape)]
    require_broadcasts_to(name, "temperature", temperature, samples, remedy="pass one for all or for each sample")
    at = axis - logits.dim()
    scaled = (logits + noise) / temperature
    return _straight_through(scaled, at) if hard else Softmax.call(scaled, at)


def _one_hot(x: Tensor, dim: int) -> Tensor:
    # Take the maximum before the softmax, in which a small temperature makes unequal elements equal.
    return torch.zeros_like(x).scatter(dim, x.argmax(dim, keepdim=True), 1.0)


_straight_through = straight_through(_one_hot, lambda x, dim: Softmax.call(x, dim), name="gumbel_softmax")
