r"""The tangent of the gradient by tiles, in two passes: each tile needs $\gamma \dot L$, a sum over all classes.

The first pass is the tangent of the terms. It takes the matrix products of the logits and of their tangent, 1 + 2 if x
and the weight have tangents; the second pass takes 7. Without a soft-cap, the first pass takes only 2, because

$$ \gamma \dot L = \langle \dot X, \gamma P W \rangle + \gamma\,\langle X, P \dot W \rangle + \gamma P \dot b $$

row by row. Here $\gamma P W$ is the gradient of x, which is known, minus the terms that do not depend on P. With
$P \dot W$, the second pass knows $\bar S \dot W$, so that there are 8 matrix products, not 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hodiff.functions.losses.cross_entropy import class_of
from hodiff.functions.losses.linear_terms import term_formulas as formulas
from hodiff.functions.losses.linear_terms.term_formulas import Options, only_counted, wide
from hodiff.functions.losses.linear_terms.term_rules import DIRECTIONS, OWN, Rule, by_tiles, chosen


def tangent_rule(options: Options) -> Rule:
    """Rule of the tangent of the terms."""
    return Rule(formulas.tangent, (options,), (*OWN, *DIRECTIONS), (True,), like_x=(0, 6))


def gradient_tangent_rule(options: Options, wanted: tuple[bool, ...], with_terms: bool) -> Rule:
    """Rule of the tangent of the gradient; the last tensor is the gradient of x, which saves products."""
    return Rule(
        formulas.gradient_tangent,
        (options, wanted, with_terms, True),
        (*OWN, True, *DIRECTIONS, True, True),
        (*chosen(DIRECTIONS, wanted), *((True,) if with_terms else ())),
        like_x=(0, 7),
        tiled=_gradient_tangent,
    )


def _gradient_tangent(rule: Rule, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    options, wanted, with_terms, _ = rule.settings
    own, cotangent, directions, by_x = tensors[:6], tensors[6], tensors[7:10], tensors[11]
    mean_t = through_w_t = terms_t = None
    if any(each is not None for each in directions):
        known = directions[0] is None or (by_x is not None and wide(by_x) is by_x)
        if options.softcap is None and known and not with_terms:
            mean_t, through_w_t = _from_gradient(options, own, cotangent, directions, by_x)
        else:
            (terms_t,) = by_tiles(tangent_rule(options), (*own, *directions))
            mean_t = wide(cotangent)[..., :1] * terms_t[..., :1]
    second = rule._replace(
        settings=(options, wanted, False, through_w_t is None),
        inputs=(*rule.inputs, True),
        outputs=chosen(DIRECTIONS, wanted),
        gives_x=wanted[0],
    )
    found = by_tiles(second, (*tensors, mean_t))
    if wanted[0] and through_w_t is not None:
        found = (found[0] + only_counted(options, own[4], through_w_t), *found[1:])
    return found if terms_t is None or not with_terms else (*found, terms_t)


def _from_gradient(
    options: Options, own: Sequence[Any], cotangent: Tensor, directions: Sequence[Any], by_x: Any
) -> tuple[Tensor, Tensor | None]:
    r"""Compute $\gamma \dot L$ and $\bar S \dot W$ from the gradient of x."""
    x, w, _, u, target = own[:5]
    x_t, w_t, bias_t = directions
    g, place = wide(cotangent), class_of(target, options.ignore)

    def besides(t: Tensor) -> Tensor:
        """Contribution of target and smoothing to the product of the logits' cotangent with a matrix."""
        index = place.expand(*place.shape[:-1], t.shape[-1])
        total = only_counted(options, target, g[..., 1:2]) * wide(t.gather(-2, index))
        if not options.smoothed:
            return total
        return total + g[..., 2:] * (wide(t).sum(-2, keepdim=True) if u is None else wide(u).mT @ wide(t))

    terms, through_w_t = [], None
    if x_t is not None:
        terms.append((only_counted(options, target, wide(x_t)) * (by_x - besides(w))).sum(-1, keepdim=True))
    moving = [each for each in (w_t, bias_t) if each is not None]
    if moving:
        rule = Rule(formulas.means, (options,), (*OWN, False, False), (True,) * len(moving))
        found = list(by_tiles(rule, (*own, w_t, bias_t)))
        if w_t is not None:
            mean = g[..., :1] * found.pop(0)
            through_w_t = mean + besides(w_t)
            terms.append((only_counted(options, target, wide(x)) * mean).sum(-1, keepdim=True))
        terms += [g[..., :1] * each for each in found]
    return sum(terms[1:], terms[0]), through_w_t
