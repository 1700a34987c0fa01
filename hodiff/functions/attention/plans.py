"""Plans of attention by blocks: q, its cotangents and tangents, and some masks have rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hodiff.rules.blockwise import Plan


def rows_plan(tensors: Any, outputs: tuple[bool, ...]) -> Plan:
    """Plan for (q, k, v, mask, seed) and further tensors; keys, values and the seed are shared."""
    q, k, _, mask = tensors[:4]
    mask_has_rows = mask is not None and mask.shape[-2] > 1
    own = (True, False, False, mask_has_rows)
    rest = {5: (), 6: (True,), 9: own, 11: (True, *own, True)}[len(tensors)]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in (q, k, mask) if each is not None))
    return Plan(q.shape[-2], math.prod(batch) * k.shape[-2], (*own, False, *rest), outputs)


def gradient_plan(tensors: Any, wanted: Sequence[bool]) -> Plan:
    """Plan for the wanted gradients of q, k, v and the mask."""
    plan = rows_plan(tensors, ())
    return plan._replace(outputs=tuple(rows for rows, want in zip(plan.inputs[:4], wanted, strict=True) if want))
