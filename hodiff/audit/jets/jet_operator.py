"""Judgement of an operator of the database in Taylor mode, against both oracles.

Distances between Taylor coefficients by jets and by an oracle, where the oracle knows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.audit.audit_sample import obstacle
from hodiff.audit.jets.curves import Curves, curves_of, places_of
from hodiff.audit.jets.oracles import Coefficients, by_jets, by_nesting, by_values
from hodiff.audit.jets.verdict import JetVerdict, merged
from hodiff.audit.samples import name_of, samples
from hodiff.checks.mutations.sample import Sample
from hodiff.torch_internals.function_names import function_name

# Relative tolerance of neighbouring intervals, within which interpolated values settle a number.
SETTLED = 1e-7


def distances(found: list[list[Tensor | None]], right: list[Coefficients], order: int) -> dict[int, float]:
    """Return the largest distance of all outputs by order; orders without a known number are omitted."""
    if len(found) != len(right):
        return dict.fromkeys(range(order + 1), math.inf)
    distances: dict[int, float] = {}
    for k in range(order + 1):
        errors = [_distance(own, each, k) for own, each in zip(found, right, strict=True)]
        known = [error for error in errors if error is not None]
        if known:
            distances[k] = max(known)
    return distances


def _distance(own: Sequence[Tensor | None], right: Coefficients, k: int) -> float | None:
    expected = right.numbers[k]
    got = own[k]
    got = torch.zeros_like(expected) if got is None else got.detach()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    known = torch.isfinite(expected)
    if right.errors is None:
        if not torch.equal(torch.isfinite(got), known):
            return math.inf
    else:
        known = _settled(right, k)
    if not known.any():
        return None if right.errors is not None and expected.numel() else 0.0
    return _relative(got[known], expected[known])


def _settled(right: Coefficients, k: int) -> Tensor:
    """Return a mask of the numbers whose intervals agree."""
    assert right.errors is not None
    size = 1 + right.numbers[k].abs().nan_to_num(0.0, 0.0, 0.0)
    return torch.isfinite(right.numbers[k]) & (right.errors[k] <= SETTLED * size)


def settled_everywhere(right: list[Coefficients], k: int) -> bool:
    """Whether values settle every number of a coefficient."""
    return all(bool(_settled(each, k).all()) for each in right)


def distance_of_sums(found: list[list[Tensor | None]], plain: list[list[Tensor | None]], order: int) -> float:
    """Return the distance of collapsed jets to plain jets, whose highest coefficient is summed."""
    worst = 0.0
    for own, right in zip(found, plain, strict=True):
        for k in range(order + 1):
            if own[k] is None and right[k] is None:
                continue
            got, expected = _dense(own[k], right[k], k == order)
            finite = torch.isfinite(expected)
            if got.shape != expected.shape or not torch.equal(torch.isfinite(got), finite):
                return math.inf
            worst = max(worst, _relative(got[finite], expected[finite]))
    return worst


def _relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / (1 + expected.abs().max())).item() if got.numel() else 0.0


def slack_of(plain: list[list[Tensor | None]]) -> float:
    """Return a factor of tolerances for outputs coarser than double precision; 1 for double precision."""
    coarsest = max(torch.finfo(own[0].dtype).eps for own in plain if own[0] is not None)
    return coarsest / torch.finfo(torch.float64).eps / 1e4 if coarsest > 1e-10 else 1.0


def _dense(got: Tensor | None, expected: Tensor | None, summed: bool) -> tuple[Tensor, Tensor]:
    """Return both as tensors, with zeros for None; `expected` is summed over the directions if `summed`."""
    if expected is not None and summed:
        expected = expected.sum(0)
    # The caller skips the case that both are None.
    zeros = torch.zeros_like(next(each for each in (got, expected) if each is not None))
    return zeros if got is None else got, zeros if expected is None else expected


# Tolerances of jets against the oracles, relative to the largest number of a coefficient or to 1.
NESTED_TOLERANCE = 1e-9
VALUES_TOLERANCE = 1e-6
# Largest size of a sample: nested forward mode of the fifth order computes 32 copies of every number.
_ELEMENTS = 1500
_LISTED = 40
COLLAPSED = (2, 4)


def audit_jets(op: Any, *, order: int, count: int, seed: int) -> JetVerdict:
    """Return the worst verdict on an operator at up to `count` of its samples."""
    found: list[JetVerdict] = []
    listed = samples(name_of(op), op, _LISTED)
    for sample in [each for each in listed if each.size <= _ELEMENTS] or listed[:1]:
        verdict = _judge_sample(sample, op.name, order, seed)
        if verdict is not None:
            found.append(verdict)
        if len(found) == count:
            break
    return merged(found) if found else JetVerdict("not differentiable", "no sample with real numbers to move")


def _judge_sample(sample: Sample, name: str, order: int, seed: int) -> JetVerdict | None:
    verdict = None
    for places in places_of(sample, name):
        curves = curves_of(sample, places, order, seed)
        verdict = None if curves is None else judge_curves(curves)
        if verdict is not None and verdict.status not in ("refused", "no oracle"):
            break
    return verdict


def judge_curves(curves: Curves) -> JetVerdict:
    """Judge jets of all orders along curves."""
    try:
        with torch.no_grad():
            outputs = curves.along(0, torch.zeros((), dtype=torch.float64))
    except Exception as error:
        return JetVerdict("not differentiable", f"raises: {_first_line(error)}")
    reason = obstacle(outputs)
    if reason:
        return JetVerdict("not differentiable", reason)
    names: dict[str, None] = {}
    try:
        plain = by_jets(curves, curves.order, observer=lambda function: names.update({function_name(function): None}))
        sums = {k: by_jets(curves, k, collapsed=True) for k in COLLAPSED if k <= curves.order}
    except Exception as error:
        return JetVerdict("refused", f"{type(error).__name__}: {_first_line(error)}", without_rule=tuple(names))
    nested, reason = _attempt(by_nesting, curves)
    values, _ = _attempt(by_values, curves)
    return _compared(curves, plain, sums, nested, values, reason, tuple(names))


def _compared(
    curves: Curves,
    plain: list[list[Tensor | None]],
    sums: dict[int, list[list[Tensor | None]]],
    nested: list[Coefficients] | None,
    values: list[Coefficients] | None,
    reason: str,
    names: tuple[str, ...],
) -> JetVerdict:
    """Return the verdict from the jets, both oracles and collapsed jets."""
    order = curves.order
    to_nested = {} if nested is None else distances(plain, nested, order)
    to_values = {} if values is None else distances(plain, values, order)
    to_plain = {k: distance_of_sums(found, plain, k) for k, found in sums.items()}
    slack = slack_of(plain)
    everything: dict[str, Any] = {
        "nested": {str(k): error for k, error in to_nested.items()},
        "values": {str(k): error for k, error in to_values.items()},
        "collapsed": {str(k): error for k, error in to_plain.items()},
        "without_rule": names,
        "coarse": slack > 1,
    }
    off_values = [k for k, error in to_values.items() if error > VALUES_TOLERANCE * slack]
    off_nested = [k for k, error in to_nested.items() if error > NESTED_TOLERANCE * slack]
    off_sums = [k for k, error in to_plain.items() if error > NESTED_TOLERANCE * slack]
    if off_sums:
        return JetVerdict(
            "off", f"collapsed jets of order {_listed(off_sums)} are not the sum of plain ones", **everything
        )
    if off_values and not off_nested and to_nested and _draws(curves):
        return JetVerdict("random", "a sample of a distribution that moves, to torch a constant", **everything)
    if off_values:
        return JetVerdict("off", f"values say otherwise at order {_listed(off_values)}", **everything)
    if off_nested:
        if values is not None and all(settled_everywhere(values, k) for k in off_nested):
            return JetVerdict("right", "values agree, nested forward mode is off", **everything)
        return JetVerdict("off", f"nested forward mode says otherwise at order {_listed(off_nested)}", **everything)
    if not to_nested and len(to_values) < order:
        return JetVerdict("no oracle", reason, **everything)
    return JetVerdict("right", f"by values alone: {reason}" if not to_nested else "", **everything)


def _draws(curves: Curves) -> bool:
    """Whether values depend on the seed."""
    zero = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        first, second = (replace(curves, seed=seed).along(0, zero) for seed in (1, 2))
    return not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _attempt(oracle: Any, curves: Curves) -> tuple[list[Coefficients] | None, str]:
    try:
        return oracle(curves, curves.order), ""
    except Exception as error:
        return None, _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:150]


def _listed(orders: list[int]) -> str:
    return ", ".join(map(str, orders))
