"""Rules of the terms: a formula with the roles of its tensors, and its evaluation by tiles, blocks or batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.functions.losses.linear_terms import term_formulas as formulas
from hodiff.functions.losses.linear_terms import tiles
from hodiff.kernels.products_in_float32 import factor
from hodiff.rules.autocast import without_autocast
from hodiff.rules.blockwise import Plan, all_batched, allows_in_place, blockwise

# Whether x, weight, bias, class weights, target and log-sum-exp have samples, not classes.
OWN = (True, False, False, False, True, True)
DIRECTIONS = (True, False, False)


class Rule(NamedTuple):
    """A formula with its settings and the roles of its tensors.

    Attributes:
        formula: A function of `formulas`.
        settings: First arguments of the formula.
        inputs: Whether each tensor has samples.
        outputs: Whether each result has samples.
        like_x: Indices of the tensors that are x or its tangent.
        gives_x: Whether the first result has the shape of x.
        merge: Adds up results of several tiles of classes.
        tiled: Computes the results by tiles, from the rule and the tensors, if several passes are needed.
    """

    formula: Any
    settings: tuple[Any, ...]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    like_x: tuple[int, ...] = (0,)
    gives_x: bool = False
    merge: tiles.Merge = tiles.add
    tiled: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, start: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Compute results for some samples and all classes, and differentiate through the log-sum-exp."""
        del start
        w = tensors[1]
        assert w is not None
        with without_autocast(w.device.type):
            return self.formula(*self.settings, None, *tensors[:5], None, *tensors[6:])

    def plan(self, tensors: Sequence[Tensor | None]) -> Plan:
        """Plan blocks of samples."""
        x, w = tensors[:2]
        assert x is not None
        assert w is not None
        return Plan(x.shape[-2], math.prod(x.shape[:-2]) * w.shape[-2], self.inputs, self.outputs)


def evaluated(rule: Any, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute the results of a rule, by tiles if there are several."""
    plan, given = rule.plan(tensors), [each for each in tensors if each is not None]
    # Compiled code plans its own memory, and its sizes may be symbols.
    if not allows_in_place(*given):
        return rule(0, *tensors) if torch.compiler.is_compiling() else blockwise(rule, plan, *tensors)
    if plan.length * plan.width <= tiles.WHOLE:
        return rule(0, *tensors)
    with without_autocast(tensors[1].device.type):
        return (rule.tiled or by_tiles)(rule, tensors)


def by_tiles(rule: Rule, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute the results in one pass over all tiles."""
    options, target = rule.settings[0], tensors[4]
    tensors = [
        formulas.only_counted(options, target, factor(each)) if i in rule.like_x and each is not None else each
        for i, each in enumerate(tensors)
    ]
    formula = partial(rule.formula, *rule.settings)
    found = tiles.tilewise(formula, rule.inputs, rule.outputs, tensors, rule.merge, tensors[1].dtype)
    return (formulas.only_counted(options, target, found[0]), *found[1:]) if rule.gives_x else found


def batched(function: Any, rule: Rule, size: int, in_dims: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """Fold a batch into the samples if no tensor with classes is batched or returned, else into dimensions before."""
    joins = all(rule.outputs) and all(
        dim is None or has_samples for dim, has_samples in zip(in_dims, rule.inputs, strict=True)
    )
    if not joins:
        found = function(*all_batched(size, in_dims, tensors))
        return found, (0,) * len(found)
    front = all_batched(size, in_dims, tensors)
    joined = [
        new.movedim(0, -3).flatten(-3, -2) if has_samples and new is not None else each
        for new, each, has_samples in zip(front, tensors, rule.inputs, strict=True)
    ]
    found = tuple(each.unflatten(-2, (size, -1)).movedim(-3, 0) for each in function(*joined))
    return found, (0,) * len(found)


def chosen(values: Sequence[Any], wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    """Select the wanted values."""
    return tuple(each for each, want in zip(values, wanted, strict=True) if want)
