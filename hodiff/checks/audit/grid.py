"""A table of Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def grid(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The titles, and the rows below."""
    lines = [list(titles), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
