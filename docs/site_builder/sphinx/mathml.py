"""Formulas as MathML, made when the site is built, so that no script renders them; what is no LaTeX stops the build."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

_CONVERTER = LatexToMathML()


def _mathml(writer: Any, node: nodes.math | nodes.math_block, display: bool) -> str:
    latex = node.astext()
    try:
        return str(_CONVERTER.convert_with_local_state(latex, displaystyle=display))
    except LatexError as error:
        raise SphinxError(f"{writer.builder.current_docname}: {latex!r} is no LaTeX that is known: {error}") from error


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(
        f'<span class="math" title="{escape(node.astext())}">{_mathml(writer, node, display=False)}</span>'
    )
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_mathml(writer, node, display=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Enter the renderer; conf.py chooses it by name."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
