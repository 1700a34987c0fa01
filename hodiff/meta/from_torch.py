"""Conversion of optimizers of `torch.optim` to functional optimizers, with their states."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe, leaf_names
from hodiff.errors import InputError
from hodiff.meta.adam import Adam, Adamax, AdamW, NAdam
from hodiff.meta.adaptive import Adadelta, Adagrad, RMSprop
from hodiff.meta.optimizer import Optimizer, OptimizerState
from hodiff.meta.sgd import SGD

COUNTERPARTS: dict[type[torch.optim.Optimizer], type[Optimizer]] = {
    getattr(torch.optim, each.__name__): each for each in (SGD, Adam, AdamW, NAdam, Adamax, RMSprop, Adagrad, Adadelta)
}


def from_torch(optimizer: torch.optim.Optimizer, params: PyTree = None) -> tuple[Optimizer, OptimizerState]:
    r"""Copy an optimizer of `torch.optim`, with its settings, its parameter groups and its state.

    Settings that differ between groups become pytrees with the structure of `params`. The original does not change.

    Args:
        optimizer: One of `SGD`, `Adam`, `AdamW`, `NAdam`, `Adamax`, `RMSprop`, `Adagrad`, `Adadelta`.
        params: The tensors that it optimizes, not copies, in any structure, such as `dict(module.named_parameters())`;
            by default a list in the order of the groups.

    Returns:
        Functional optimizer and its state for `params`.

    Raises:
        InputError: If the optimizer is not supported, `params` does not hold its parameters, or a switch such as
            `nesterov` differs between groups.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> rule, state = from_torch(torch.optim.Adam(layer.parameters(), lr=0.1), dict(layer.named_parameters()))
        >>> rule.lr, state.steps
        (0.1, (0, 0))

    Source: the settings and states of `torch.optim`.
    """
    cls = COUNTERPARTS.get(type(optimizer))
    if cls is None:
        known = ", ".join(each.__name__ for each in COUNTERPARTS)
        raise InputError(f"from_torch: optimizer: expected one of {known}, got {type(optimizer).__name__}.")
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    if params is None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
    leaves, spec = pytree.tree_flatten(params)
    for leaf, name in zip(leaves, leaf_names(params), strict=True):
        if id(leaf) not in group_of:
            raise InputError(
                f"from_torch: params{name}: expected a parameter of the optimizer, got {describe(leaf)}, which the "
                "optimizer does not have; pass the same tensors, not copies."
            )
    groups = [group_of[id(leaf)] for leaf in leaves]
    names = [each.name for each in fields(cls) if each.init and each.name in groups[0]]
    rule = cls(**{name: _merged(name, [group[name] for group in groups], cls, spec) for name in names})
    fresh = rule.init(params)
    steps, slots = [], []
    for leaf, initial in zip(leaves, fresh.slots, strict=True):
        held: dict[str, Any] = optimizer.state.get(leaf, {})
        held = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        # SGD alone does not count steps; a buffer proves that there was one.
        steps.append(int(held["step"]) if "step" in held else int("momentum_buffer" in held))
        slots.append({name: held[name].detach().clone() if name in held else zero for name, zero in initial.items()})
    return rule, OptimizerState(tuple(steps), tuple(slots))


def _merged(name: str, values: list[Any], cls: type[Optimizer], spec: pytree.TreeSpec) -> Any:
    """Return the common value of a setting, or a tree if it differs between leaves."""
    if all(value is values[0] or _equal(value, values[0]) for value in values):
        return values[0]
    if isinstance(values[0], bool):
        raise InputError(f"from_torch: optimizer: expected the same {name} in all groups, got {values}.")
    if name in cls.pairs:
        return tuple(_merged(f"{name}[{i}]", [value[i] for value in values], cls, spec) for i in range(2))
    return pytree.tree_unflatten(values, spec)


def _equal(a: Any, b: Any) -> bool:
    pair = isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b)
    if pair:
        return all(map(_equal, a, b))
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b
