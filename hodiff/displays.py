"""HTML displays of results for notebooks, without scripts, style sheets or external resources; all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import SupportsFloat

import torch
from torch import Tensor

DIGITS = 6
LISTED = 4  # most numbers of a tensor that are shown individually


def number(value: SupportsFloat, digits: int = DIGITS) -> str:
    """Format a number with so many digits."""
    return f"{float(value):.{digits}g}"


def numbers(value: Tensor, digits: int = DIGITS) -> str:
    """Format a tensor: its numbers if they are few, else its shape and the range of its numbers."""
    flat = value.detach().reshape(-1)
    if flat.is_complex():
        return _shape(value)
    flat = flat.to("cpu", torch.float64)
    if value.dim() == 0:
        return number(flat[0], digits)
    if len(flat) <= LISTED:
        return f"[{', '.join(number(each, digits) for each in flat)}]"
    if not bool(torch.isfinite(flat).all()):
        return f"{_shape(value)}, with nan or inf among its numbers"
    return f"{_shape(value)}, from {number(flat.min(), digits)} to {number(flat.max(), digits)}"


def _shape(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


# Text keeps the notebook's colour, and tints let the background through: both work in light and in dark themes.
TINTS = {"error": "220, 50, 47", "warning": "203, 145, 0", "note": "38, 139, 210", "ok": "70, 150, 40"}
SHOWN = 20  # rows of a table that may be long

_MONO = "font-family: monospace; font-size: 0.9em"
_CELL = "padding: 0.1em 0.7em; text-align: left"


class Html(str):
    """Text that is HTML already; any other text is escaped when it becomes part of an element."""

    __slots__ = ()


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        content: Text or HTML.
        tint: The background, a key of `TINTS`, or "" for none.
    """

    content: object
    tint: str = ""


def element(name: str, *content: object, style: str = "", attributes: str = "") -> Html:
    """Return an element with its content in order; style and attributes are not escaped."""
    given = (f' style="{style}"' if style else "") + (f" {attributes}" if attributes else "")
    return Html(f"<{name}{given}>{''.join(map(_html, content))}</{name}>")


def page(*parts: object) -> str:
    """Return the display of one object."""
    return element("div", *parts, style="color: inherit; line-height: 1.4")


def badge(text: str, tint: str) -> Html:
    """Return a short text on a tinted background."""
    return element("span", text, style=f"background: rgba({TINTS[tint]}, 0.25); padding: 0.1em 0.5em")


def code(text: str) -> Html:
    """Return names or numbers in a fixed-width font."""
    return element("span", text, style=_MONO)


def folded(summary: str, *content: object, opened: bool = False) -> Html:
    """Return content that unfolds by a click on its summary."""
    return element("details", element("summary", summary), *content, attributes="open" if opened else "")


def table(header: Sequence[object], rows: Iterable[Sequence[object]], most: int | None = None) -> Html:
    """Return a table of rows with a header, limited to the first `most` rows if given."""
    kept, left = list(rows), 0
    if most is not None and len(kept) > most:
        kept, left = kept[:most], len(kept) - most
    lines = [_row("th", header), *(_row("td", row) for row in kept)]
    if left:
        lines.append(_row("td", [f"and {left:,} more"]))
    return element("table", *lines, style=f"{_MONO}; border-collapse: collapse")


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Return a table of labels and contents, without a header."""
    label = f"{_CELL}; white-space: nowrap; vertical-align: top; opacity: 0.7"
    rows = [
        element("tr", element("td", name, style=label), element("td", content, style=_CELL), style="background: none")
        for name, content in pairs
    ]
    return element("table", *rows)


def _row(kind: str, cells: Sequence[object]) -> Html:
    return element("tr", *(_cell(kind, cell) for cell in cells), style="background: none")


def _cell(kind: str, cell: object) -> Html:
    content, tint = (cell.content, cell.tint) if isinstance(cell, Cell) else (cell, "")
    ground = f"; background: rgba({TINTS[tint]}, 0.25)" if tint else ""
    return element(kind, content, style=f"{_CELL}; white-space: nowrap{ground}")


def _html(content: object) -> str:
    return content if isinstance(content, Html) else escape(str(content))


WIDTH, HEIGHT = 360, 70  # of the picture, in pixels


def curve(heights: Sequence[float], depth: float) -> Html:
    """Draw heights at equal distances, from the highest down to `depth` below it."""
    top, last = max(heights), max(len(heights) - 1, 1)
    points = [
        f"{i * WIDTH / last:.1f},{min((top - each) / depth, 1) * (HEIGHT - 2) + 1:.1f}"
        for i, each in enumerate(heights)
    ]
    line = element("polyline", attributes=f'points="{" ".join(points)}" fill="none" stroke="currentColor"')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return element("div", element("svg", line, attributes=size))
