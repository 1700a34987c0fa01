"""Value, gradient and curvature products of a closure's loss at the parameters, as vectors.

Checks of closures and their return values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.bound_function import bind
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.distributed.layouts import local_part
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.inner_products import InnerProduct
from hodiff.optim.ranks import ALONE, Ranks
from hodiff.optim.recorded_losses import gradient_of, model_of
from hodiff.optim.sharded_closures import ShardedClosure

Closure = Callable[[], Any]


def detached(value: Any) -> Any:
    """Detach the return value of a closure."""
    return value.detach() if isinstance(value, Tensor) else value


def require_loss(caller: str, loss: Any) -> None:
    """Raise unless the loss is one real number that depends on parameters."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        remedy = (
            "; return it, and in Lightning's manual optimization call step(closure=closure)" if loss is None else ""
        )
        got = describe(loss)
        raise InputError(
            f"{caller}: closure: expected a closure that returns the loss, one real number, got {got}{remedy}."
        )
    if not loss.requires_grad:
        raise InputError(
            f"{caller}: closure: expected a loss with its graph, got one that depends on no parameter; look for "
            ".detach(), .item() or torch.no_grad() in the closure, and for a missing backward."
        )


def require_closure(caller: str, closure: Any) -> None:
    """Raise if there is no closure."""
    if not callable(closure):
        raise InputError(
            f"{caller}: step: expected a closure that computes the loss and returns it, because a step needs the loss "
            f"at more than one point, got {closure!r}; pass step(lambda: criterion(model(inputs), targets))."
        )


class LocalModel:
    """Quadratic model of the loss that a closure returned, at the parameters that it is differentiated by."""

    loss: Tensor
    gradient: Tensor
    ranks: Ranks = ALONE

    def __init__(self, caller: str, parameters: Sequence[Tensor], returned: Any, shards: ShardedClosure | None = None):
        self.caller, self.parameters, self._shards = caller, list(parameters), shards
        # Leaves of the graph: the parameters, or their shards.
        self._operands = self.parameters if shards is None else shards.leaves_of(self.parameters)
        self.space = Space.of([p.detach() for p in self._operands])
        self.inner = InnerProduct() if shards is None else shards.inner_product(self.parameters)
        self._record(returned)

    @abstractmethod
    def _record(self, returned: Any) -> None:
        """Compute loss and gradient from the return value of the closure."""

    @abstractmethod
    def _product(self, v: Tensor) -> Tensor:
        """Multiply the curvature of this rank's loss with a vector."""

    def product(self, v: Tensor) -> Tensor:
        """Multiply the curvature with a vector."""
        found = self._product(v)
        self._average([found])
        return found

    def _average(self, vectors: list[Tensor]) -> None:
        """Replace vectors by their means over the ranks; those of shards are joint already."""
        if self._shards is None:
            self.ranks.mean_(vectors)

    def join(self, ranks: Ranks) -> None:
        """Replace the model of this rank's loss by that of the mean loss of all ranks."""
        self.ranks, self.loss, self.gradient = ranks, self.loss.clone(), self.gradient.clone()
        self._average([self.loss, self.gradient])

    def require_finite(self) -> None:
        """Raise if the loss or the gradient contains NaN or infinity."""
        require_finite(self.caller, "losses and gradients", [self.loss, self.gradient])

    def vector(self, leaves: Sequence[Tensor]) -> Tensor:
        """Join leaves to a vector."""
        return self.space.join([local_part(leaf)[None] for leaf in leaves], 1)[:, 0]

    def leaves(self, v: Tensor) -> list[Tensor]:
        """Split a vector into tensors like the parameters."""
        parts = self._parts(v)
        return parts if self._shards is None else list(map(self._shards.like, self.parameters, parts))

    def _parts(self, v: Tensor) -> list[Tensor]:
        """Split a vector into tensors like the leaves of the graph."""
        return [leaf[0] for leaf in self.space.split(v[:, None])]


class HessianModel(LocalModel):
    """Quadratic model with the Hessian."""

    def _record(self, returned: Any) -> None:
        require_loss(self.caller, returned)
        loss = returned if self._shards is None else self._shards.joint(returned)
        self._recorded = gradient_of(self.caller, loss, self._operands, numbers=True)
        self.loss, self.gradient = loss.detach(), self.vector(self._recorded.gradient)

    def _product(self, v: Tensor) -> Tensor:
        return self.vector(self._recorded.product(self._parts(v), keep=True))


class GaussNewtonModel(LocalModel):
    """Quadratic model with the Gauss-Newton matrix, for closures that return outputs and a loss function."""

    def _record(self, returned: Any) -> None:
        outputs, loss = outputs_and_loss(self.caller, returned)
        self._model = model_of(self.caller, outputs, self._operands)
        detached = pytree.tree_unflatten(list(self._model.outputs), self._model.spec)
        function = bind(f"{self.caller}: closure: loss", loss, (detached,), name="outputs")
        self._curvature = RecordedGradient(function, numbers=True)
        self.loss = self._curvature.value.detach()
        if self._shards is not None:
            self.loss = self._shards.joint(self.loss)
        self.gradient = self._pulled(self._curvature.gradient)

    def _pulled(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Pull cotangents of the outputs back; over shards, to the mean over ranks."""
        if self._shards is not None:
            cotangents = [self._shards.weight * each for each in cotangents]
        return self.vector(self._model.pull(cotangents))

    def _product(self, v: Tensor) -> Tensor:
        return self._pulled(self._curvature.product(self._model.push(self._parts(v)), keep=True))

    def squared_gradients(self, draws: int, generator: torch.Generator, least: float) -> tuple[Tensor, float]:
        """Estimate the mean of the examples' squared gradients, by gradients with random signs of the examples.

        Returns:
            Squares of the gradients divided by a unit, which keeps them in range; and the unit, no smaller than
            `least`.

        Raises:
            InputError: If the outputs do not have examples along their first dimension.
        """
        # Random signs make the products of two different examples vanish in the mean.
        examples = {len(u) if u.dim() else 0 for u in self._curvature.gradient}
        if len(examples) != 1 or 0 in examples:
            raise InputError(
                f"{self.caller}: closure: expected outputs with the examples along their first dimension, got tensors "
                f"of lengths {sorted(examples)}; pass preconditioner=None."
            )
        (count,) = examples
        # Signs are drawn for the examples of all ranks.
        counts = self.ranks.gather(count, self.gradient.device)
        start, whole = sum(counts[: self.ranks.rank]), sum(counts)
        total, unit = torch.zeros_like(self.gradient), 0.0
        for _ in range(draws):
            signs = torch.randint(0, 2, (whole,), generator=generator, device=generator.device) * 2 - 1
            signs = signs[start : start + count]
            signed = [signs.to(u).reshape(-1, *[1] * (u.dim() - 1)) * u for u in self._curvature.gradient]
            found = self._pulled(signed)
            self._average([found])
            unit = unit or max(least, self.inner.largest(found)) or 1.0
            total += (found / unit).square()
        return total * (whole / draws), unit


CURVATURES: Mapping[str, type[LocalModel]] = {"hessian": HessianModel, "gauss-newton": GaussNewtonModel}


def outputs_and_loss(caller: str, returned: Any) -> tuple[PyTree, Callable[[Any], Tensor]]:
    """Validate and return the pair that a closure returns for Gauss-Newton matrices."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
        got = describe(returned) if isinstance(returned, Tensor) else type(returned).__name__
        raise InputError(
            f"{caller}: closure: expected the pair (outputs, loss), outputs of the model and a function of them that "
            f"returns one number, got {got}; return model(inputs), lambda outputs: criterion(outputs, targets)."
        )
    return returned


def value_of(caller: str, returned: Any) -> Tensor:
    """Compute the loss from the return value of a closure, which is the loss or a pair."""
    if isinstance(returned, tuple):
        outputs, loss = outputs_and_loss(caller, returned)
        returned = loss(outputs)
    value: Tensor = returned
    return value.detach()


def put_gradients(parameters: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Set `grad` by a backward pass, which runs all hooks."""
    for parameter in parameters:
        parameter.grad = None
    torch.autograd.backward(list(parameters), list(leaves))
