"""Reference answers for checking contestants, computed without second-order differentiation."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.objectives import Objective


def difference_product(objective: Objective, direction: Tensor) -> Tensor:
    """Compute a Hessian-vector product as the central difference of two float64 gradients.

    The step is far smaller than the distance to the kinks of a ReLU network and far larger than rounding errors. The
    result's relative error is about 1e-7.

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
    """Compute the gradient in all parameters as one vector."""
    vector = vector.detach().requires_grad_()
    return torch.autograd.grad(objective.flat(vector), vector)[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor."""
    return ((found.double() - expected).norm() / expected.norm()).item()
