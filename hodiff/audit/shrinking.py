"""Reduction of failing calls to smaller calls that still fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.mutations.changes import cut
from hodiff.checks.mutations.sample import Sample

# Largest number of attempts, each of which judges the call again.
_ATTEMPTS = 40


def shrink(sample: Sample, still_fails: Callable[[Sample], bool]) -> Sample:
    """Make a failing call smaller as long as it fails: fewer numbers, fewer moving tensors, rounder numbers."""
    left, found = _ATTEMPTS, True
    while found and left > 0:
        found = False
        for smaller in _smaller(sample):
            left -= 1
            if still_fails(smaller):
                sample, found = smaller, True
                break
            if left <= 0:
                break
    return sample


def _smaller(sample: Sample) -> Iterator[Sample]:
    """Yield simpler calls, the greatest reductions first."""
    sizes = sorted({n for leaf in sample.leaves if isinstance(leaf, Tensor) for n in leaf.shape}, reverse=True)
    for old in sizes:
        for new, last in itertools.product(sorted({1, 2, old // 2} & set(range(1, old))), (False, True)):
            yield _with_layouts_that_fit(cut(sample, old, new, last=last))
    for place in sample.places if len(sample.places) > 1 else ():
        yield replace(
            sample,
            places=tuple(each for each in sample.places if each != place),
            layouts={each: layout for each, layout in sample.layouts.items() if each != place},
        )
    for place in sample.layouts:
        yield replace(sample, layouts={each: layout for each, layout in sample.layouts.items() if each != place})
    for place in sample.places:
        for rounded in (_rounded(sample.leaves[place], 0), _rounded(sample.leaves[place], 1)):
            if not torch.equal(rounded, sample.leaves[place]):
                leaves = list(sample.leaves)
                leaves[place] = rounded
                yield replace(sample, leaves=tuple(leaves))


def _rounded(x: Any, decimals: int) -> Any:
    return x.round(decimals=decimals) + 0.0  # no -0.0


def _with_layouts_that_fit(sample: Sample) -> Sample:
    """Remove expansions, whose shapes may no longer fit the other arguments."""
    return replace(sample, layouts={i: each for i, each in sample.layouts.items() if ".expand(" not in each.source})
