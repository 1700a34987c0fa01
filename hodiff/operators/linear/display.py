"""The HTML display of an operator in a notebook, which needs no product."""

from __future__ import annotations

from collections.abc import Iterable

from hodiff.displays import element, facts, page, table
from hodiff.operators.linear.spaces import Space

BLOCKS = 12  # parameters that are listed


def operator_html(
    name: str, domain: Space, codomain: Space, symmetric: bool, told: Iterable[tuple[str, object]]
) -> str:
    """Return kind, size, dtype, further facts, and a table of the parameters."""
    m, n = codomain.size, domain.size
    known = [
        ("shape", f"{m:,} × {n:,}"),
        ("numbers", f"{str(domain.dtype).removeprefix('torch.')} on {domain.device}"),
        ("symmetric", "yes" if symmetric else "not known to be"),
        *told,
    ]
    parts = [element("b", name), facts(known)]
    if domain.names != ("",):
        leaves = zip(domain.labels, domain.shapes, domain.sizes, strict=True)
        rows = [(label, str(tuple(shape)), f"{size:,}") for label, shape, size in leaves]
        parts.append(table(("parameter", "shape", "columns"), rows, most=BLOCKS))
    return page(*parts)
