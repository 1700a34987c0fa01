"""The keys that queries see by position."""

from __future__ import annotations

from typing import Literal, NamedTuple

Corner = Literal["upper-left", "lower-right"]


class Band(NamedTuple):
    """The keys that a query sees by position, as users specify them."""

    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    corner: Corner = "upper-left"

    def bounds(self, length: int, keys: int) -> tuple[int | None, int | None]:
        """Return the least and the greatest j - i of a query i and a key j that it sees; None is no bound."""
        offset = keys - length if self.corner == "lower-right" else 0
        left, right = (None, None) if self.window is None else self.window
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return None if left is None else offset - left, None if right is None else offset + right
