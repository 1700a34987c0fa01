"""Value, gradient and curvature of a closure's loss at the parameters, as vectors and products."""

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
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space
from hodiff.optim.stochastic.closures import require_loss
from hodiff.optim.stochastic.found_graphs import gradient_of, model_of
from hodiff.optim.stochastic.magnitudes import require_finite


class LocalModel:
    """A loss near the parameters.

    Args:
        caller: The optimizer, for messages.
        parameters: What it is differentiated by.
        returned: What the closure returned.
    """

    loss: Tensor
    gradient: Tensor

    def __init__(self, caller: str, parameters: Sequence[Tensor], returned: Any):
        self.caller, self.parameters = caller, list(parameters)
        self.space = Space.of([p.detach() for p in self.parameters])
        self._record(returned)

    @abstractmethod
    def _record(self, returned: Any) -> None:
        """Take loss and gradient of what the closure returned."""

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """The curvature times a vector."""

    def require_finite(self) -> None:
        """Refuse a loss or a gradient with NaN or infinity."""
        require_finite(self.caller, "losses and gradients", [self.loss, self.gradient])

    def vector(self, leaves: Sequence[Tensor]) -> Tensor:
        """Leaves, one after another."""
        return self.space.join([leaf[None] for leaf in leaves], 1)[:, 0]

    def leaves(self, v: Tensor) -> list[Tensor]:
        """A vector by parameters."""
        return [leaf[0] for leaf in self.space.split(v[:, None])]


class HessianModel(LocalModel):
    """By the Hessian."""

    def _record(self, returned: Any) -> None:
        require_loss(self.caller, returned)
        self._recorded = gradient_of(self.caller, returned, self.parameters, numbers=True)
        self.loss, self.gradient = returned.detach(), self.vector(self._recorded.gradient)

    def product(self, v: Tensor) -> Tensor:
        """The Hessian times a vector."""
        return self.vector(self._recorded.product(self.leaves(v), keep=True))


class GaussNewtonModel(LocalModel):
    """By the Gauss-Newton matrix, of a closure that returns outputs and their loss apart."""

    def _record(self, returned: Any) -> None:
        outputs, loss = outputs_and_loss(self.caller, returned)
        self._model = model_of(self.caller, outputs, self.parameters)
        detached = pytree.tree_unflatten(list(self._model.outputs), self._model.spec)
        function = bind(f"{self.caller}: closure: loss", loss, (detached,), name="outputs")
        self._curvature = RecordedGradient(function, numbers=True)
        self.loss = self._curvature.value.detach()
        self.gradient = self.vector(self._model.pull(self._curvature.gradient))

    def product(self, v: Tensor) -> Tensor:
        """The Gauss-Newton matrix times a vector."""
        pushed = self._curvature.product(self._model.push(self.leaves(v)), keep=True)
        return self.vector(self._model.pull(pushed))

    def squared_gradients(self, draws: int, generator: torch.Generator, least: float) -> tuple[Tensor, float]:
        """The mean of examples' squared gradients of a mean loss, from gradients with random signs of the examples.

        Returns:
            The squares in a unit, as they may be out of range, and the unit, no smaller than `least`.

        Raises:
            InputError: If outputs do not have examples along their first dimension.
        """
        # Of two examples the signs make the product zero in the mean.
        examples = {len(u) if u.dim() else 0 for u in self._curvature.gradient}
        if len(examples) != 1 or 0 in examples:
            raise InputError(
                f"{self.caller}: closure: expected outputs with the examples along their first dimension, got tensors "
                f"of lengths {sorted(examples)}; pass preconditioner=None."
            )
        (count,) = examples
        total, unit = torch.zeros_like(self.gradient), 0.0
        for _ in range(draws):
            signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
            signed = [signs.to(u).reshape(-1, *[1] * (u.dim() - 1)) * u for u in self._curvature.gradient]
            found = self.vector(self._model.pull(signed))
            unit = unit or max(least, float(found.abs().max()) if found.numel() else 0.0) or 1.0
            total += (found / unit).square()
        return total * (count / draws), unit


CURVATURES: Mapping[str, type[LocalModel]] = {"hessian": HessianModel, "gauss-newton": GaussNewtonModel}


def outputs_and_loss(caller: str, returned: Any) -> tuple[PyTree, Callable[[Any], Tensor]]:
    """The pair that a closure returns for Gauss-Newton matrices."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
        got = describe(returned) if isinstance(returned, Tensor) else type(returned).__name__
        raise InputError(
            f"{caller}: closure: expected the pair (outputs, loss), outputs of the model and a function of them that "
            f"returns one number, got {got}; return model(inputs), lambda outputs: criterion(outputs, targets)."
        )
    return returned


def value_of(caller: str, returned: Any) -> Tensor:
    """The loss of what a closure returned, whether it is that or the pair."""
    if isinstance(returned, tuple):
        outputs, loss = outputs_and_loss(caller, returned)
        returned = loss(outputs)
    value: Tensor = returned
    return value.detach()


def put_gradients(parameters: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Set `grad` as a backward pass would, with all hooks."""
    for parameter in parameters:
        parameter.grad = None
    torch.autograd.backward(list(parameters), list(leaves))
