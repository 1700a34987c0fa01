"""A check that gradients of layers' outputs for one row of a model's outputs depend on no other row's cotangent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hodiff.operators.kfac import moments
from hodiff.operators.kfac.columns import example_factors
from hodiff.operators.kfac.kfac_options import EXPAND
from hodiff.operators.kfac.layers import Source


def coupled_blocks(
    cotangent: Tensor,
    plain: Mapping[Source, Tensor],
    gradients: Callable[[Tensor], Mapping[Source, Tensor]],
    by_example: Callable[[Source], bool],
    eps: float,
) -> set[Source]:
    """Return the blocks whose gradients for one row of the outputs depend on cotangents of other rows.

    Args:
        cotangent: A random cotangent of the outputs.
        plain: Gradients g of the blocks for the cotangent, (1, rows, places, groups, p).
        gradients: Computes them for another cotangent.
        by_example: Whether a block's gradients are summed over the places of a row, which may then hold no positions
            of several examples, such as those of a sequence in the first dimension.
        eps: The relative rounding of the gradients.
    """
    factors = example_factors(cotangent)
    scaled = gradients(factors * cotangent)
    pending = {source for source, g in plain.items() if not _scale_by(factors.flatten(), g, scaled[source], eps)}
    # Of a layer whose rows have another order, squares of gradients do not depend on the sign of a row. Every two
    # rows have different signs in some of these.
    found: set[Source] = set()
    for bit in range(max(1, (len(factors) - 1).bit_length()) if pending else 0):
        index = torch.arange(len(factors), device=cotangent.device)
        signs = (1 - 2 * ((index >> bit) & 1)).to(cotangent).view_as(factors)
        signed = gradients(signs * cotangent)
        for source in pending - found:
            B, other = (
                moments.of_gradients(source, each.sum(2, keepdim=True) if by_example(source) else each, EXPAND)
                for each in (plain[source], signed[source])
            )
            if not bool((B - other).norm() <= eps**0.5 * B.norm()):
                found.add(source)
    return found


def _scale_by(factors: Tensor, plain: Tensor, scaled: Tensor, eps: float) -> bool:
    """Whether gradients (1, rows, ...) scale with the factors of the outputs' rows, in the same order."""
    rows = plain.shape[1]
    if not len(factors) or rows % len(factors):
        return False
    each = factors.repeat_interleave(rows // len(factors)).to(plain).reshape(1, -1, *[1] * (plain.dim() - 2))
    return moments.is_multiple(scaled, each, plain, eps)
