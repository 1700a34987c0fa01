"""The gallery: notebooks, lessons and scripts as cards, with a picture where there is one."""

from __future__ import annotations

import ast
import base64
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from site_builder.layout import NOTEBOOKS, ROOT, SCRIPTS, Tree, found, page_of, relative
from site_builder.links import relinked
from site_builder.scripts import picture_of, write_script

INDEX = "examples/index.md"
LESSONS = "examples/functions/"
_INTRODUCTION = """\
# Notebooks, lessons and examples

Run an example by `python examples/digits_hessian.py`, and the notebooks by `jupyter lab examples/notebooks`. See also
the [reproductions of papers](../papers/index.md).
"""


@dataclass(frozen=True)
class Card:
    """What the gallery shows of one page."""

    page: str
    title: str
    text: str
    picture: str | None = None


def write_gallery(tree: Tree) -> list[str]:
    """Write pages of scripts and notebooks, and the gallery; return the pages in its order."""
    notebooks = [_notebook(path, tree) for path in found(NOTEBOOKS)]
    for path in found(SCRIPTS):
        write_script(path, tree)
    scripts = [_script(path) for path in found(SCRIPTS)]
    lessons = [card for card in scripts if card.page.startswith(LESSONS)]
    others = [card for card in scripts if card not in lessons]
    parts = [_INTRODUCTION]
    for title, cards in (("Notebooks", notebooks), ("Lessons: writing a Function", lessons), ("Examples", others)):
        if cards:
            parts += [f"## {title}", _grid(cards)]
    tree.write(INDEX, "\n\n".join(parts) + "\n")
    return [card.page for card in (*notebooks, *others)]


def lesson_pages() -> list[str]:
    """The pages of lessons, in their order."""
    return [page_of(path) for path in found(SCRIPTS) if path.startswith(LESSONS)]


def _script(source: str) -> Card:
    docstring = ast.get_docstring(ast.parse((ROOT / source).read_text(encoding="utf-8"))) or source
    title = docstring.partition("\n")[0]
    picture = picture_of(source)
    if re.match(r"Lesson \d+", title):
        title, text = title.rstrip("."), ""
    else:
        title, text = PurePosixPath(source).stem.replace("_", " "), title
    return Card(page_of(source), title, text, page_of(picture) if picture else None)


def _notebook(source: str, tree: Tree) -> Card:
    """Copy a notebook, with the links of its text made those of the site; its first picture is the card's."""
    page = page_of(source)
    notebook = json.loads((ROOT / source).read_text(encoding="utf-8"))
    texts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            texts.append(relinked("".join(cell["source"]), source, page, tree))
            cell["source"] = texts[-1]
    tree.write(page, json.dumps(notebook))
    heading, _, rest = texts[0].partition("\n")
    picture = _first_picture(notebook)
    name = page.replace(".ipynb", ".thumbnail.png")
    if picture:
        tree.write_bytes(name, picture)
    first = rest.strip().split("\n\n")[0].replace("\n", " ")
    return Card(page, heading.lstrip("# "), re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first), name if picture else None)


def _first_picture(notebook: dict[str, list[dict[str, list[dict[str, dict[str, str]]]]]]) -> bytes | None:
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {}).get("image/png")
            if data:
                return base64.b64decode("".join(data))
    return None


def _grid(cards: list[Card]) -> str:
    lines = ["::::{grid} 1 2 3 3", ":gutter: 3", ""]
    for card in cards:
        lines += [
            f":::{{grid-item-card}} {card.title}",
            f":link: {relative(card.page, INDEX).rsplit('.', 1)[0]}",
            ":link-type: doc",
        ]
        lines += [f":img-top: {relative(card.picture, INDEX)}"] if card.picture else []
        lines += ["", card.text, ":::", ""]
    return "\n".join([*lines, "::::"])
