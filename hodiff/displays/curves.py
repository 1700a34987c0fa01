"""A small curve, drawn as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

from hodiff.displays.elements import Html, element

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
