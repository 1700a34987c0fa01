"""Base class of Shampoo, SOAP and their variants.

Parameters are tensors of few large dimensions, and states have at least 32 bits.

Parameters of one shape step together, because calls cost more than small tensors. Their gradients are stacked, and
their states are views of stacked tensors.

Dimensions of a parameter: their choice, second moments along them, and products with a factor for each.

A factor is a stack of matrices (k, n, n), of diagonals (k, n), or None for the identity.

Roots and eigenvectors of second moments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from hodiff.distributed.layouts import is_distributed
from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import symmetric_eigen
from hodiff.optim.finite_numbers import require_norms
from hodiff.optim.local_models import Closure
from hodiff.optim.optimizer_states import Shapes, precise
from hodiff.optim.owned_steps import OwnedSteps
from hodiff.optim.ranks import attempted
from hodiff.optim.training_optimizer import Group, Pair, StochasticOptimizer, is_plain, large_size
from hodiff.torch_internals import many_tensors as many

# Entry of a sharded parameter's state on the ranks that do not own it: the owner's rank.
_ON_RANK = "on_rank"


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors along a new first dimension; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def sizes_of(tensors: Tensor) -> Tensor:
    """Return the Euclidean norms of stacked tensors, with their number of dimensions."""
    return torch.linalg.vector_norm(tensors.flatten(1), dim=1).view(-1, *[1] * (tensors.dim() - 1))


def inverse_root(moments: Tensor, power: float, damping: float) -> Tensor:
    r"""Compute $(M + \epsilon \lambda_{\max} I)^{-p}$ of nonzero positive semi-definite matrices, or of diagonals."""
    # Inverse roots of small eigenvalues magnify rounding errors.
    precise = moments if moments.device.type == "mps" else moments.double()
    values, vectors = (precise, None) if moments.dim() == 2 else symmetric_eigen(precise)
    largest = values.amax(-1, keepdim=True)
    # Eigenvalues of zero up to rounding had no gradients; without damping their scale is zero.
    seen = values > values.shape[-1] * torch.finfo(moments.dtype).eps * largest
    scales = (values.where(seen, 0) + damping * largest) ** -power
    scales = scales.nan_to_num_(posinf=0.0)
    return (scales if vectors is None else torch.bmm(vectors * scales[:, None], vectors.mT)).to(moments.dtype)


def eigenvectors(moments: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices as columns, by decreasing eigenvalue."""
    precise = moments if moments.device.type == "mps" else moments.double()
    return symmetric_eigen(precise)[1].flip(-1).to(moments.dtype)


def turned(moments: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of orthogonal iteration; return the orders of the old columns and the new bases."""
    products = torch.bmm(moments, bases)
    order = (bases * products).sum(1).argsort(dim=1, descending=True, stable=True)
    return order, torch.linalg.qr(products.take_along_dim(order[:, None], 2)).Q


Factors = Sequence[Tensor | None]


@cache
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


def vectors_along(tensors: Tensor, dim: int) -> Tensor:
    """Return the vectors along a dimension of stacked tensors as columns of matrices (k, n, others)."""
    return tensors.movedim(dim + 1, 1).reshape(len(tensors), tensors.shape[dim + 1], -1)


def along(values: Tensor, dim: int, tensors: Tensor) -> Tensor:
    """Reshape (k, n) to broadcast along a dimension of stacked tensors."""
    return values.view(len(values), *[-1 if d == dim else 1 for d in range(tensors.dim() - 1)])


def multiplied(tensors: Tensor, factors: Factors, *, transposed: bool = False) -> Tensor:
    """Multiply stacked tensors along each dimension by factors or their transposes."""
    for factor in factors:
        # The first dimension moves to the end, so after a round every dimension is multiplied and the order is
        # restored.
        if factor is None:
            tensors = tensors.movedim(1, -1)
        elif factor.dim() == 2:
            tensors = tensors.movedim(1, -1)
            tensors = tensors * along(factor, tensors.dim() - 2, tensors)
        else:
            count, size, *others = tensors.shape
            products = torch.bmm(tensors.reshape(count, size, -1).mT, factor if transposed else factor.mT)
            tensors = products.view(count, *others, size)
    return tensors


State = dict[str, Any]


class KroneckerOptimizer(StochasticOptimizer):
    """Optimizer whose preconditioner is a Kronecker product with a factor for each dimension."""

    precise_state = True
    # Whether dimensions above `max_preconditioner_size`, and vectors, have second moments, too.
    all_moments: ClassVar[bool]
    # Their name in states.
    moments_name: ClassVar[str] = "moments"

    def __init__(self, params: Any, defaults: Group):
        # By name, dimension and first state: stacked entries of states, and their views in the states.
        self._joint: dict[tuple[Any, ...], tuple[Tensor, Sequence[Tensor]]] = {}
        # Owners of the sharded parameters, once they are known.
        self._owned: OwnedSteps | None = None
        super().__init__(params, defaults)

    @abstractmethod
    def _directions(self, states: Sequence[State], group: Group, gradients: Tensor) -> Tensor | None:
        """Return what is subtracted from parameters with equal numbers of steps, (k, *shape), or None for no step."""

    def shapes_of_state(self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Shapes:
        """See `StochasticOptimizer`."""
        shape = self._working_shape(parameter.shape, group)
        sizes = self._sizes(shape, group)
        matrices = dict.fromkeys((self.moments_name, "roots", "bases"), sizes)
        return {"exp_avg": shape, "exp_avg_sq": shape, **matrices, "eigenvalues": [(n,) for n in shape]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._joint, self._owned = {}, None

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
        found = [(group, [pair for pair in self.gradients(group) if pair[0].numel()]) for group in self.param_groups]
        sharded = [(group, p, g) for group, pairs in found for p, g in pairs if is_distributed(p)]
        found = [(group, [pair for pair in pairs if not is_distributed(pair[0])]) for group, pairs in found]
        if sharded:
            self._move_shards(sharded)
        require_norms(self.caller, [(precise(g), self._least(group)) for group, pairs in found for _, g in pairs])
        for group, pairs in found:
            for alike in self._alike(group, pairs):
                self._move(group, [p for p, _ in alike], [g for _, g in alike])
        return loss

    def _move_shards(self, given: Sequence[tuple[Group, Tensor, Tensor]]) -> None:
        """Move sharded parameters; the owner of each computes its step from the whole gradient."""
        steps = self._owned_steps()
        wholes = [steps.gathered(p, g, p) for _, p, g in given]
        own = [(group, p, g) for (group, p, _), g in zip(given, wholes, strict=True) if g is not None]

        def computed() -> dict[int, Tensor | None]:
            return {id(p): self._steps(group, [self.state[p]], p.shape, [g], p.dtype) for group, p, g in own}

        # No state may change if a gradient is refused on any rank.
        least = [(precise(g), self._least(group)) for group, _, g in own]
        steps.exchange(attempted(require_norms, self.caller, least)[1], [])
        found, error = attempted(computed)
        found = found or {}
        moving = steps.exchange(error, [float(found.get(id(p)) is not None) for _, p, _ in given])
        for (group, p, _), moves in zip(given, moving, strict=True):
            if not steps.owns(p) and self.state[p].get(_ON_RANK) != steps.owner(p):
                self.state[p] = {_ON_RANK: steps.owner(p)}
            if moves:
                self._decay(group, [p])
                p.sub_(steps.scattered(p, found.get(id(p)), p.dtype))

    def _owned_steps(self) -> OwnedSteps:
        sharded = [(g, p) for g in self.param_groups for p in g["params"] if is_distributed(p) and p.numel()]
        if self._owned is None or not self._owned.covers([p for _, p in sharded]):
            sizes = [self._sizes(self._working_shape(p.shape, g), g) for g, p in sharded]
            costs = [
                p.numel() * sum(each[0] for each in own if each) + sum(float(each[0]) ** 3 for each in own if each)
                for (_, p), own in zip(sharded, sizes, strict=True)
            ]
            states = [self.state.get(p, {}) for _, p in sharded]
            elsewhere = [_ON_RANK in state for state in states]
            held = [bool(state) and not away for state, away in zip(states, elsewhere, strict=True)]
            self._owned = OwnedSteps(self.caller, [p for _, p in sharded], costs, held, elsewhere)
        return self._owned

    def _alike(self, group: Group, pairs: Sequence[Pair]) -> Iterable[list[Pair]]:
        """Group parameters that step together: small ones of one shape, dtype, device and number of steps."""
        lists: dict[Any, list[Pair]] = {}
        for pair in pairs:
            parameter = pair[0]
            joins = is_plain(parameter) and self._numbers(parameter.shape, group) < large_size(parameter)
            kind = parameter.shape, parameter.dtype, parameter.device, self.state[parameter].get("step")
            lists.setdefault(kind if joins else id(parameter), []).append(pair)
        return lists.values()

    def _move(self, group: Group, parameters: list[Tensor], gradients: Sequence[Tensor]) -> None:
        states, first = [self.state[p] for p in parameters], parameters[0]
        steps = self._steps(group, states, first.shape, gradients, first.dtype)
        if steps is not None:
            self._decay(group, parameters)
            many.sub_(parameters, steps.unbind())

    def _steps(
        self, group: Group, states: Sequence[State], shape: torch.Size, gradients: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor | None:
        """Return what is subtracted from parameters of one shape, (k, *shape), or None for no step."""
        given = precise(stacked(gradients)).reshape(len(states), *self._working_shape(shape, group))
        directions = self._directions(states, group, given)
        return None if directions is None else (directions * group["lr"]).to(dtype).reshape(len(states), *shape)

    @staticmethod
    def _decay(group: Group, parameters: Sequence[Tensor]) -> None:
        if group["weight_decay"]:
            keep = 1 - group["lr"] * group["weight_decay"]
            for parameter in parameters:
                parameter.mul_(keep)

    @staticmethod
    def _working_shape(shape: Sequence[int], group: Mapping[str, Any]) -> tuple[int, ...]:
        return working_shape(shape, group["max_preconditioner_size"], group["merge_dims"])

    def _numbers(self, shape: Sequence[int], group: Group) -> int:
        """Return the numbers of a parameter's largest tensor."""
        sizes = self._sizes(self._working_shape(shape, group), group)
        return max(map(prod, [shape, *(size for size in sizes if size)]))

    def _sizes(self, shape: Sequence[int], group: Mapping[str, Any]) -> list[tuple[int, ...] | None]:
        """Return the shapes of the second moments of a parameter."""
        limit = group["max_preconditioner_size"]
        if self.all_moments:
            return [(n,) if n > limit else (n, n) for n in shape]
        return [None if len(shape) == 1 or n > limit else (n, n) for n in shape]

    def _begin(self, states: Sequence[State], group: Group, gradients: Tensor) -> None:
        """Initialize states by zeros."""
        shape = gradients.shape[1:]
        for state in states:
            state["step"], state["exp_avg"] = 0, gradients.new_zeros(shape)
            state[self.moments_name] = [
                None if size is None else gradients.new_zeros(size) for size in self._sizes(shape, group)
            ]

    def _joined(self, states: Sequence[State], name: str, dim: int | None = None) -> Tensor:
        """Return an entry of states, or of a list in states, as a stack whose changes change the states."""
        holders: list[Any] = [state if dim is None else state[name] for state in states]
        place: Any = name if dim is None else dim
        tensors: list[Tensor] = [holder[place] for holder in holders]
        if len(tensors) == 1:
            return tensors[0][None]
        key = name, dim, id(states[0])
        joint, views = self._joint.get(key, (None, ()))
        # Other code may have replaced an entry, and parameters may have no gradient for a step.
        if joint is None or len(views) != len(tensors) or not all(map(is_, views, tensors)):
            joint = torch.stack(tensors)
            views = joint.unbind()
            self._joint[key] = joint, views
            for holder, view in zip(holders, views, strict=True):
                holder[place] = view
        return joint

    def _factors(self, states: Sequence[State], name: str) -> list[Tensor | None]:
        """Return the factors of each dimension, stacked; None where there is none."""
        return [None if each is None else self._joined(states, name, dim) for dim, each in enumerate(states[0][name])]

    def _average(self, states: Sequence[State], gradients: Tensor, keep: float) -> None:
        """Update averages of the second moments along the dimensions; sums, if all is kept."""
        weight = 1.0 if keep == 1 else 1 - keep
        for dim, moments in enumerate(self._factors(states, self.moments_name)):
            if moments is None:
                continue
            vectors = vectors_along(gradients, dim)
            if moments.dim() == 3:
                moments.baddbmm_(vectors, vectors.mT, beta=keep, alpha=weight)
            else:
                moments.mul_(keep).add_(vectors.square().sum(2), alpha=weight)

    def _require_finite(self, finite: bool) -> None:
        """Raise unless all second moments are finite."""
        if not finite:
            raise InputError(
                f"{self.caller}: step: expected gradients whose squares are finite, got NaN or infinity in the sum of "
                "them; find the step at which the loss becomes NaN or infinite, or scale the loss down."
            )
