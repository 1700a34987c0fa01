"""The numbers of an attention, and which keys its queries see."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Options(NamedTuple):
    """The numbers of an attention: query i sees key j only if low <= j - i <= high, where None is no bound."""

    scale: float
    low: int | None
    high: int | None
    softcap: float | None
    dropout_p: float
    # Of the weights: it numbers them for dropout.
    batch: tuple[int, ...]

    @property
    def has_band(self) -> bool:
        """Whether some keys are too far from some query."""
        return self.low is not None or self.high is not None

    def keys_seen(self, start: int, rows: int, keys: int) -> tuple[int, int]:
        """The first key that a query from `start` on may see, and how many from there on; one at least."""
        if torch.compiler.is_compiling():  # a cut would hold for the sizes that are traced alone
            return 0, keys
        first = 0 if self.low is None else min(max(0, start + self.low), keys - 1)
        last = keys if self.high is None else max(min(keys, start + rows + self.high), first + 1)
        return first, last - first

    def every_row_sees(self, start: int, rows: int, keys: int) -> bool:
        """Whether each of these queries has a key within its band."""
        nearest = self.high is None or start + self.high >= 0
        if torch.compiler.is_compiling() and self.low is not None:  # as above
            return False
        farthest = self.low is None or start + rows - 1 + self.low < keys
        return nearest and farthest
