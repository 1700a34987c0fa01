"""Restriction of a function of many parameters to a small plane through a point, where a check is cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable, require_int, require_number
from hodiff.common.trees import PyTree, flatten_primals


def along_directions(
    f: Callable[..., Any], x: PyTree, *args: Any, count: int = 2, size: float = 0.01, seed: int = 0
) -> Callable[[Tensor], Any]:
    r"""Restrict a function to random directions from a point, as a function of few numbers.

    .. math:: t \mapsto f\Big(x + s \sum_k t_k \, d_k\Big), \qquad d_k \sim \mathcal{N}(0, I)

    A wrong derivative of any element shows in nearly every direction. With so few numbers, `hodiff.check` compares
    whole matrices, including SciPy's. Small steps avoid the kinks of networks.

    Args:
        f: Function `f(x, *args)`.
        x: The point: a floating-point tensor or a pytree of them, such as a dict of parameters.
        *args: Further arguments of `f`.
        count: Number of directions.
        size: The s: length of a step of 1.
        seed: Seed of the directions.

    Returns:
        A function of a float64 tensor (count,), to be checked at zeros. It has the name of `f`.

    Raises:
        InputError: If an argument has the wrong type or value.

    Example:
        >>> import torch, hodiff
        >>> network = torch.nn.Linear(300, 1).double()
        >>> def loss(parameters):
        ...     return torch.func.functional_call(network, parameters, torch.ones(300).double()).cos().sum()
        >>> weights = {name: each.detach() for name, each in network.named_parameters()}
        >>> few = hodiff.checks.along_directions(loss, weights)
        >>> hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64)).ok
        True
    """
    require_callable("along_directions", f=f)
    require_int("along_directions", "count", count, 1)
    require_int("along_directions", "seed", seed)
    require_number("along_directions", "size", size, positive=True, finite=True)
    leaves, spec = flatten_primals(x, "along_directions", "x")
    generator = torch.Generator().manual_seed(seed)
    start = [leaf.detach() for leaf in leaves]
    directions = [
        size * torch.randn(count, *leaf.shape, generator=generator, dtype=torch.float64, device=generator.device)
        for leaf in leaves
    ]
    directions = [d.to(leaf.device, leaf.dtype) for d, leaf in zip(directions, leaves, strict=True)]

    def along(t: Tensor) -> Any:
        moved = [leaf + torch.tensordot(t.to(d), d, 1) for leaf, d in zip(start, directions, strict=True)]
        return f(pytree.tree_unflatten(moved, spec), *args)

    along.__name__ = getattr(f, "__name__", type(f).__name__)
    return along
