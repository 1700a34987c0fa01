"""Optimizers of `torch.optim` as solvers for minimisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import trange

from hodiff.common.options import require_callable
from hodiff.common.trees import PyTree
from hodiff.implicit.implicit_solution import require_positive
from hodiff.implicit.ravel import Ravel
from hodiff.implicit.sparse_matrices import Gradient


def torch_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = 1000,
    tol: float = 0.0,
    progress: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    r"""Minimise with an optimizer of `torch.optim`, for a number of steps or until the gradient is small.

    Args:
        optimizer: The class, or any function that makes an optimizer from a list of tensors. Optimizers that take a
            closure, such as `torch.optim.LBFGS`, get one.
        steps: Maximum number of steps.
        tol: Norm of the gradient, relative to $\max(1, \lVert x \rVert)$, at which the run ends.
        progress: Whether to show a progress bar.
        **options: Passed to `optimizer`, for example `lr=0.1`.

    Returns:
        Solver `(objective, x0, *params) -> x` for `hodiff.implicit.argmin`.

    Raises:
        InputError: If an option is invalid.

    Example:
        >>> import torch
        >>> solver = torch_optimizer(torch.optim.SGD, steps=100, lr=0.25)
        >>> solver(lambda x, p: ((x - p) ** 2).sum(), torch.zeros(2), torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    require_callable("torch_optimizer", optimizer=optimizer)
    require_positive("torch_optimizer", steps=steps)

    def run(objective: Callable[..., Tensor], x0: PyTree, *params: Any) -> PyTree:
        ravel = Ravel(x0)
        x = [each.detach().clone().requires_grad_() for each in ravel.like]
        method = optimizer(x, **options)
        value_of = Gradient("torch_optimizer", objective).value

        def loss() -> Any:
            method.zero_grad()
            value = value_of(ravel.spec.unflatten(x), *params)
            # .backward() would add to the gradients of tensors that the objective closes over.
            for each, slope in zip(x, torch.autograd.grad(value, x, materialize_grads=True), strict=True):
                each.grad = slope
            return value

        with torch.enable_grad():
            for _ in trange(steps, disable=not progress, desc="torch_optimizer"):
                if tol > 0:
                    loss()
                    slope = ravel.vector([each.grad for each in x])
                    if not slope.norm() > tol * max(1.0, ravel.vector(x).norm().item()):
                        break
                method.step(loss)
        return ravel.spec.unflatten([each.detach() for each in x])

    return run
