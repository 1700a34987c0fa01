"""Interface of functional optimizers: a state and an update over pytrees, out of place and differentiable."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import is_number, require_bool
from hodiff.common.trees import PyTree, describe, flatten_primals, leaf_names
from hodiff.errors import InputError
from hodiff.rules.arguments import broadcasts_to

Setting = (
    Any  # a number, a tensor that broadcasts to each parameter, or a pytree of them with the parameters' structure
)
Slots = dict[str, Tensor]


@dataclass(eq=False)
class OptimizerState:
    """State of an optimizer, a pytree of tensors with a slot dictionary for each parameter.

    Attributes:
        steps: Number of updates so far for each leaf of the parameters; static, no tensors.
        slots: Tensors of each leaf, by the names of `torch.optim`.
    """

    steps: tuple[int, ...]
    slots: tuple[Slots, ...]


pytree.register_pytree_node(
    OptimizerState,
    lambda state: ([state.slots], state.steps),
    lambda children, steps: OptimizerState(steps, *children),
    serialized_type_name="hodiff.meta.OptimizerState",
)


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Base class of the functional optimizers; a subclass defines `slots` and `rule` for one parameter.

    Settings may be numbers, tensors (with gradients, if they are learned) that broadcast to every parameter, or pytrees
    of numbers and tensors with the structure of the parameters.
    """

    lr: Setting = 1e-3
    weight_decay: Setting = 0.0
    maximize: bool = field(default=False, kw_only=True)

    pairs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool):
                require_bool(name, each.name, value)
            elif each.name in self.pairs:
                if not (isinstance(value, (tuple, list)) and len(value) == 2):
                    raise InputError(f"{name}: {each.name}: expected a pair, got {describe(value)}.")
                for one in value:
                    _require_numbers(name, each.name, one, limit=1.0)
            else:
                _require_numbers(name, each.name, value)

    def init(self, params: PyTree) -> OptimizerState:
        """Return the state before the first update.

        Args:
            params: A tensor or a pytree of tensors, real and floating-point.

        Returns:
            Initial state.

        Raises:
            InputError: If a leaf of `params` is no such tensor.
        """
        leaves, spec = flatten_primals(params, type(self).__name__, "params")
        self.require_fit(params)
        rules = self._leafwise(len(leaves), spec, params)
        slots = tuple(rule.slots(leaf.detach()) for rule, leaf in zip(rules, leaves, strict=True))
        return OptimizerState((0,) * len(leaves), slots)

    def update(self, grads: PyTree, state: OptimizerState, params: PyTree) -> tuple[PyTree, OptimizerState]:
        """Take one step, without changing the arguments.

        Args:
            grads: Gradients with the structure of `params`; for a gradient of None the parameter and its state do not
                change.
            state: State from `init` or the last update.
            params: Parameters.

        Returns:
            New parameters and new state.

        Raises:
            InputError: If `grads`, `state` or a setting does not match `params`.
        """
        name = type(self).__name__
        leaves, spec = pytree.tree_flatten(params)
        gradients, own = pytree.tree_flatten(grads)
        if own != spec:
            raise InputError(
                f"{name}: grads: expected the structure of params, {leaf_names(params)}, got {leaf_names(grads)}; "
                "pass one gradient, or None, for each parameter."
            )
        if not isinstance(state, OptimizerState) or len(state.slots) != len(leaves):
            got = len(state.slots) if isinstance(state, OptimizerState) else type(state).__name__
            raise InputError(f"{name}: state: expected a state for {len(leaves)} parameters, got {got}; call init.")
        new_leaves, new_steps, new_slots = [], [], []
        rules = self._leafwise(len(leaves), spec, params)
        for rule, leaf, grad, steps, slots in zip(rules, leaves, gradients, state.steps, state.slots, strict=True):
            if grad is not None:
                steps += 1
                leaf, slots = self._applied(rule, grad, slots, leaf, steps)
            new_leaves.append(leaf)
            new_steps.append(steps)
            new_slots.append(slots)
        return pytree.tree_unflatten(new_leaves, spec), OptimizerState(tuple(new_steps), tuple(new_slots))

    def require_fit(self, params: PyTree) -> None:
        """Raise if settings do not broadcast to the parameters."""
        leaves, spec = pytree.tree_flatten(params)
        for rule, leaf, name in zip(self._leafwise(len(leaves), spec, params), leaves, leaf_names(params), strict=True):
            for key, value in rule.settings():
                if isinstance(value, Tensor) and not broadcasts_to(value.shape, leaf.shape):
                    raise InputError(
                        f"{type(self).__name__}: {key}: expected a number or a tensor that broadcasts to "
                        f"params{name}, {describe(leaf)}, got {describe(value)}; for rates of each parameter pass a "
                        "pytree with the structure of params."
                    )

    def _applied(self, rule: Any, grad: Tensor, slots: Slots, leaf: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Apply the rule; raise on shapes that would broadcast silently."""
        name = type(self).__name__
        if grad.shape != leaf.shape:
            raise InputError(f"{name}: grads: expected {describe(leaf)} as in params, got {describe(grad)}.")
        try:
            new, slots = rule.rule(-grad if self.maximize else grad, slots, leaf, step)
        except KeyError as missing:
            raise InputError(
                f"{name}: state: expected a state of {name}, got one without {missing}; call init."
            ) from None
        if new.shape != leaf.shape:
            raise InputError(
                f"{name}: settings: expected tensors that broadcast to {describe(leaf)}, got a step of shape "
                f"{tuple(new.shape)}; pass settings with the shapes of the parameters, or scalars."
            )
        return (new if new.dtype == leaf.dtype else new.to(leaf.dtype)), slots

    def slots(self, param: Tensor) -> Slots:
        """Return the tensors to store for one parameter before its first update."""
        del param
        return {}

    def rule(self, grad: Tensor, slots: Slots, param: Tensor, step: int) -> tuple[Tensor, Slots]:
        """Return the new parameter and slots; `step` counts from 1."""
        raise NotImplementedError

    def decayed(self, grad: Tensor, param: Tensor) -> Tensor:
        """Add the gradient of the weight penalty."""
        return add_scaled(grad, self.weight_decay, param) if is_active(self.weight_decay) else grad

    def _leafwise(self, count: int, spec: pytree.TreeSpec, params: PyTree) -> list[Any]:
        """Return an optimizer for each leaf, with the settings of the leaf."""
        if all(_is_single(value) for _, value in self.settings()):
            return [self] * count
        columns: dict[str, list[Any]] = {}
        for key in (each.name for each in fields(self)):
            value = getattr(self, key)
            spread = [self._spread(key, one, count, spec, params) for one in (value if key in self.pairs else [value])]
            columns[key] = list(zip(*spread, strict=True)) if key in self.pairs else spread[0]
        rules = []
        for i in range(count):
            rule = copy.copy(self)
            for key, column in columns.items():
                object.__setattr__(rule, key, column[i])
            rules.append(rule)
        return rules

    def settings(self) -> list[tuple[str, Setting]]:
        """Return names and values of all settings, with pairs split."""
        values = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return [(key, one) for key, value in values for one in (value if key in self.pairs else [value])]

    def _spread(self, key: str, value: Setting, count: int, spec: pytree.TreeSpec, params: PyTree) -> list[Any]:
        if _is_single(value):
            return [value] * count
        leaves, own = pytree.tree_flatten(value)
        if own == spec:
            return leaves
        raise InputError(
            f"{type(self).__name__}: {key}: expected a number, a tensor, or a pytree with the structure of params, "
            f"{leaf_names(params)}, got {leaf_names(value)}."
        )


def _is_single(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor))


def _require_numbers(name: str, key: str, value: Any, limit: float | None = None) -> None:
    """Raise on settings that are negative or at least `limit`; tensors are not read."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            continue
        if is_number(leaf) and leaf >= 0 and (limit is None or leaf < limit):
            continue
        wanted = "a number of at least 0" + ("" if limit is None else f" and below {limit:g}")
        raise InputError(f"{name}: {key}: expected {wanted}, or a floating-point tensor, got {describe(leaf)}.")


def require_optimizer(caller: str, value: Any) -> None:
    """Raise if the value is no functional optimizer."""
    if not isinstance(value, Optimizer):
        remedy = "; convert it with hodiff.meta.from_torch" if isinstance(value, torch.optim.Optimizer) else ""
        raise InputError(f"{caller}: optimizer: expected one of hodiff.meta, got {type(value).__name__}{remedy}.")


def is_active(setting: Setting) -> bool:
    """Whether a setting has an effect; tensors always do, as their gradient may be needed."""
    return isinstance(setting, Tensor) or setting != 0


def add_scaled(x: Tensor, factor: Setting, y: Tensor) -> Tensor:
    """Compute `x + factor * y`, by one operator if the factor is a number."""
    return x + factor * y if isinstance(factor, Tensor) else x.add(y, alpha=factor)


def add_quotient(x: Tensor, factor: Setting, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute `x + factor * numerator / denominator`, by one operator if the factor is a number."""
    if isinstance(factor, Tensor):
        return x + factor * (numerator / denominator)
    return torch.addcdiv(x, numerator, denominator, value=factor)


def mixed(average: Tensor, new: Tensor, decay: Setting) -> Tensor:
    """Compute the moving average `decay * average + (1 - decay) * new`."""
    return average * decay + new * (1 - decay)


def root(x: Tensor) -> Tensor:
    r"""Compute the square root, with derivatives of every order defined as zero where $x \le 0$.

    A second moment is zero if all gradients were zero. torch's root has an infinite slope there, which makes NaN.

    Args:
        x: Any tensor.

    Returns:
        Square root.
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)
