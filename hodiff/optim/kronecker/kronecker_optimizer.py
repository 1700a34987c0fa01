"""Base class of Shampoo and SOAP: parameters as tensors of few large dimensions, and states in at least 32 bits.

Dimensions of a parameter: their choice, second moments along them, and products with a factor for each.

A factor is a matrix (n, n), a diagonal (n,), or None for the identity.

Roots and eigenvectors of second moments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import symmetric_eigen
from hodiff.optim.finite_numbers import require_norms
from hodiff.optim.local_models import Closure
from hodiff.optim.optimizer_states import precise
from hodiff.optim.training_optimizer import Group, StochasticOptimizer


def inverse_root(caller: str, moment: Tensor, power: float, damping: float) -> Tensor:
    r"""Compute $(M + \epsilon \lambda_{\max} I)^{-p}$ of a nonzero positive semi-definite M, or of a diagonal."""
    _require_finite(caller, moment)
    # Inverse roots of small eigenvalues magnify rounding errors.
    precise = moment if moment.device.type == "mps" else moment.double()
    values, vectors = (precise, None) if moment.dim() == 1 else symmetric_eigen(precise)
    largest = values.max()
    # Eigenvalues of zero up to rounding had no gradients; without damping their scale is zero.
    seen = values > len(values) * torch.finfo(moment.dtype).eps * largest
    scales = (values.where(seen, 0) + damping * largest) ** -power
    scales = scales.nan_to_num(posinf=0.0)
    return (scales if vectors is None else (vectors * scales) @ vectors.mT).to(moment.dtype)


def eigenvectors(caller: str, moment: Tensor) -> Tensor:
    """Return the eigenvectors of a symmetric matrix as columns, by decreasing eigenvalue."""
    _require_finite(caller, moment)
    precise = moment if moment.device.type == "mps" else moment.double()
    return symmetric_eigen(precise)[1].flip(-1).to(moment.dtype)


def turned(caller: str, moment: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of orthogonal iteration; return the order of the old columns and the new basis."""
    _require_finite(caller, moment)
    products = moment @ basis
    order = (basis * products).sum(0).argsort(descending=True, stable=True)
    return order, torch.linalg.qr(products[:, order]).Q


def _require_finite(caller: str, moment: Tensor) -> None:
    if not bool(moment.isfinite().all()):
        raise InputError(
            f"{caller}: step: expected gradients whose squares are finite, got NaN or infinity in the sum of them; "
            "find the step at which the loss becomes NaN or infinite, or scale the loss down."
        )


Factors = Sequence[Tensor | None]


def working_shape(shape: Sequence[int], limit: int, merge: bool) -> tuple[int, ...]:
    """Drop dimensions of size 1, and merge those behind the first from the last on, up to the limit."""
    first, *rest = [size for size in shape if size != 1] or [1]
    if not merge:
        return first, *rest
    merged: list[int] = []
    for size in reversed(rest):
        if merged and merged[0] * size <= limit:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return first, *merged


def second_moment(tensor: Tensor, dim: int, diagonal: bool) -> Tensor:
    """Compute the sum of $v v^T$ over all vectors v along a dimension, or its diagonal."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    return rows.square().sum(1) if diagonal else rows @ rows.mT


def multiplied(tensor: Tensor, factors: Factors, *, transposed: bool = False) -> Tensor:
    """Multiply a tensor along each dimension by a factor or its transpose."""
    for factor in factors:
        # The first dimension moves to the end, so after a round every dimension is multiplied and the order is
        # restored.
        if factor is None:
            tensor = tensor.movedim(0, -1)
        elif factor.dim() == 1:
            tensor = tensor.movedim(0, -1) * factor
        else:
            tensor = torch.tensordot(tensor, factor, dims=([0], [0 if transposed else 1]))
    return tensor


State = dict[str, Any]


class KroneckerOptimizer(StochasticOptimizer):
    """Optimizer whose preconditioner is a Kronecker product with a factor for each dimension."""

    precise_state = True

    @abstractmethod
    def _direction(self, state: State, group: Group, gradient: Tensor) -> Tensor | None:
        """Return the direction that is subtracted from the parameter, or None for no step."""

    @abstractmethod
    def _least(self, group: Group) -> float:
        """Return the gradient norm below which no step is taken, so that squares may vanish."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step, by the gradients in `grad` or by a closure.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph. It may zero
                gradients and call backward, as for torch's optimizers, but need not.

        Returns:
            The loss, or None without a closure.

        Raises:
            InputError: If the closure returns no loss, gradients are sparse or not finite, or their squares are out of
                the range of the state's dtype.
        """
        self.require_dtypes()
        loss = None if closure is None else self.evaluated(closure, accumulates=True)
        found = [(p, group, g) for group in self.param_groups for p, g in self.gradients(group) if p.numel()]
        require_norms(self.caller, [(precise(g), self._least(group)) for _, group, g in found])
        for parameter, group, gradient in found:
            self._move(parameter, group, gradient)
        return loss

    def _move(self, parameter: Tensor, group: Group, gradient: Tensor) -> None:
        shape = working_shape(parameter.shape, group["max_preconditioner_size"], group["merge_dims"])
        direction = self._direction(self.state[parameter], group, precise(gradient).reshape(shape))
        if direction is None:
            return
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_((direction.reshape(parameter.shape) * group["lr"]).to(parameter.dtype))

    @staticmethod
    def _average(moments: list[Tensor | None], gradient: Tensor, keep: float, weight: float) -> None:
        """Update the second moments along the dimensions by a gradient."""
        for dim, moment in enumerate(moments):
            if moment is not None:
                moment.mul_(keep).add_(second_moment(gradient, dim, moment.dim() == 1), alpha=weight)
