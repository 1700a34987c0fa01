"""Options of attention, and the keys that its queries see."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Options(NamedTuple):
    """Options of attention: query i sees key j only if low <= j - i <= high, where None is no bound."""

    scale: float
    low: int | None
    high: int | None
    softcap: float | None
    dropout_p: float
    # Batch shape of the weights, which numbers them for dropout.
    batch: tuple[int, ...]

    @property
    def has_band(self) -> bool:
        """Whether a bound may hide some keys from some query."""
        return self.low is not None or self.high is not None

    def keys_seen(self, start: int, rows: int, keys: int) -> tuple[int, int]:
        """Return the first key that a query from `start` on may see, and the number of keys seen, at least one."""
        if torch.compiler.is_compiling():  # a cut would be valid for the traced sizes only
            return 0, keys
        first = 0 if self.low is None else min(max(0, start + self.low), keys - 1)
        last = keys if self.high is None else max(min(keys, start + rows + self.high), first + 1)
        return first, last - first

    def every_row_sees(self, start: int, rows: int, keys: int) -> bool:
        """Whether every one of these queries has a key within its band."""
        nearest = self.high is None or start + self.high >= 0
        if torch.compiler.is_compiling() and self.low is not None:  # as above
            return False
        farthest = self.low is None or start + rows - 1 + self.low < keys
        return nearest and farthest
