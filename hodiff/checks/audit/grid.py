"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def grid(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table with a header of titles."""
    lines = [list(titles), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
