"""The answer that contestants are checked against, free of second-order differentiation."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.objectives import Objective


def difference_product(objective: Objective, direction: Tensor) -> Tensor:
    """A Hessian-vector product as the central difference of two float64 gradients.

    The step is far below what separates a network of ReLUs from its kinks, and far above rounding: the result is
    good to about 1e-7 of its norm.

    Args:
        objective: The function.
        direction: The vector, (n,), parameters flattened in their order.

    Returns:
        The product, (n,), float64.
    """
    precise = objective.double()
    center = torch.cat([parameter.flatten() for parameter in precise.parameters().values()])
    step = 1e-7 * direction.double() / direction.double().norm()
    ahead, behind = (flat_gradient(precise, center + sign * step) for sign in (1, -1))
    return (ahead - behind) * (direction.double().norm() / 2e-7)


def flat_gradient(objective: Objective, vector: Tensor) -> Tensor:
    """The gradient in all parameters, as one vector."""
    vector = vector.detach().requires_grad_()
    return torch.autograd.grad(objective.flat(vector), vector)[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((found.double() - expected).norm() / expected.norm()).item()
