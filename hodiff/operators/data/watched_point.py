"""The tensors of an operator's point, watched for changes: they belong to the caller, and to its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.torch_internals.tensors import version_of

# How many numbers of each tensor are compared, spread over all of it: enough to notice an optimizer step.
SAMPLE = 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Point:
    """The leaves of a point, with a record of their values.

    Version counters record changes in place, except those through `.data`, for which some numbers are compared. A copy
    of all numbers would take as much memory as the parameters.

    Args:
        leaves: The tensors.
    """

    def __init__(self, leaves: Sequence[Tensor]):
        self.leaves = tuple(leaves)
        self._versions = [version_of(leaf) for leaf in leaves]
        self._samples: dict[torch.device, list[Tensor]] = {}
        for leaf in leaves:
            # A tensor on the device "meta" has no numbers.
            if leaf.numel() and type(leaf) is Tensor and not leaf.is_meta and leaf.dtype.itemsize in _BITS:
                self._samples.setdefault(leaf.device, []).append(_sample(leaf))
        self._before = [torch.cat(samples) for samples in self._samples.values()]

    # A copy's tensors start with new version counters.
    def __getstate__(self) -> dict[str, tuple[Tensor, ...]]:
        return {"leaves": self.leaves}

    def __setstate__(self, state: dict[str, tuple[Tensor, ...]]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def require_unchanged(self, caller: str) -> None:
        """Raise if the point has changed: products would mix old and new values."""
        # Kept results belong to the old values, newly computed ones would belong to the new values.
        if [version_of(leaf) for leaf in self.leaves] != self._versions or not all(
            torch.equal(samples[0] if len(samples) == 1 else torch.cat(samples), before)
            for samples, before in zip(self._samples.values(), self._before, strict=True)
        ):
            raise InputError(
                f"{caller}: x: expected the values with which the operator was created, got tensors that were changed "
                "in place since, such as by an optimizer step or through .data; use A.at(x), or create the operator "
                "with clones."
            )


def _sample(leaf: Tensor) -> Tensor:
    """Return some numbers of a leaf in memory order, as integers, because NaN would differ from itself."""
    bits = leaf.detach().resolve_conj().resolve_neg().view(_BITS[leaf.dtype.itemsize])
    if bits.is_contiguous():
        return bits.view(-1)[:: max(1, math.ceil(leaf.numel() / SAMPLE))]
    # In dense memory, sorting the dimensions by falling strides gives a contiguous tensor.
    order = sorted(range(bits.dim()), key=bits.stride().__getitem__, reverse=True)
    return _sample(leaf.permute(order)) if leaf.permute(order).is_contiguous() else bits.flatten()[:0]
