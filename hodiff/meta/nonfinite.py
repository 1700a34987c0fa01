"""Detection of the inner step at which numbers stop being finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hodiff.common.trees import PyTree, leaf_names, tensors_in
from hodiff.errors import HodiffError
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


class NonFiniteError(HodiffError, ArithmeticError):
    """An inner loop met a number that is not finite; the message names the step and the parameter."""


def all_finite(tree: PyTree) -> bool:
    """Return whether all numbers of a tree are finite, in all elements of a `torch.func.vmap` batch."""
    # A sum may overflow although every number is finite; `explain` then raises nothing.
    return all(math.isfinite(float(_plain(leaf).sum())) for leaf in tensors_in(tree))


def explain(step: Callable[..., Any], point: Any, batches: Sequence[PyTree]) -> None:
    """Repeat an inner loop without derivatives, and raise at the first number that is not finite."""
    where = _fault(point[0])
    if where is not None:
        raise NonFiniteError(f"adapt: params: expected finite numbers, but params{where} before the first step.")
    for number, batch in enumerate(batches):
        point, loss, gradients = step(point, batch)
        bad = _plain(loss)[~_plain(loss).isfinite()].tolist()
        before = f"adapt: step {number} of {len(batches)}:"
        remedy = "lower the learning rate, pass clip=, or look at the batch of that step"
        at_loss = f", where the loss is {bad[0]:g}" if bad else ""
        for what, tree in (("gradient", gradients), ("updated parameter", point[0])):
            where = _fault(tree)
            if where is not None:
                raise NonFiniteError(f"{before} the {what} of params{where}{at_loss}; {remedy}.")
        if bad:
            raise NonFiniteError(f"{before} the loss is {bad[0]:g}, with finite gradients; {remedy}.")


def _fault(tree: PyTree) -> str | None:
    for name, leaf in zip(leaf_names(tree), tensors_in(tree), strict=True):
        plain = _plain(leaf)
        if not plain.isfinite().all():
            kind = "NaN" if plain.isnan().any() else "infinite"
            return f"{name} is {kind}"
    return None


def _plain(tensor: Tensor) -> Tensor:
    """Return the numbers below all transforms, which can be read."""
    return below_transforms(tensor.detach()).detach()
