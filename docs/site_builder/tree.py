"""The whole tree of Markdown, room by room."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from site_builder.api import FOLDER, ROOMS, write_api
from site_builder.audit import audit_script
from site_builder.findings import SOURCE as FINDINGS_SOURCE
from site_builder.findings import write_findings
from site_builder.gallery import INDEX as GALLERY
from site_builder.gallery import lesson_pages, write_gallery
from site_builder.layout import FINDINGS, PAGES, ROOT, Tree, found, page_of
from site_builder.links import relinked
from site_builder.navigation import FRONT, contents, side_bar
from site_builder.scripts import write_sources

STATIC, CONFIGURATION = (Path(__file__).resolve().parent / name for name in ("static", "sphinx"))
FILTER = "reference/is_your_torch_wrong.md"
API_INDEX = f"{FOLDER}/index.md"
LESSONS = "examples/functions/index.md"

_API_INTRODUCTION = """\
# Reference of the interface

What each room exports, from its docstrings. `hodiff.hvp` and its relatives stand in the first.

"""


def lay_out(folder: Path) -> Tree:
    """Write the tree into a folder that is empty or not there."""
    tree = Tree(folder)
    below: dict[str, list[str]] = {FINDINGS: write_findings(tree)}
    api = write_api(tree)
    below[GALLERY] = [LESSONS, *write_gallery(tree)]
    below[LESSONS] = lesson_pages()
    texts = {page_of(path): path for path in found(PAGES) if path != FINDINGS_SOURCE}
    for index in ("howto/index.md", "coming_from/index.md", "papers/index.md", "benchmarks/index.md"):
        room = index.removesuffix("index.md")
        below[index] = [page for page in texts if page.startswith(room) and page != index]
    for page, path in texts.items():
        tree.write(page, relinked((ROOT / path).read_text(encoding="utf-8"), path, page, tree))
    tree.append(FILTER, (STATIC / "audit.html").read_text(encoding="utf-8"))
    tree.write(API_INDEX, _API_INTRODUCTION + "".join(f"- [{room}]({room}.md)\n" for room in ROOMS))
    below[API_INDEX] = api
    for page, pages in below.items():
        tree.append(page, contents(pages, page))
    tree.append(FRONT, side_bar(tree.written))
    write_sources(tree)
    _static(tree)
    return tree


def _static(tree: Tree) -> None:
    """Sphinx's configuration, style, scripts, the audits as data, and a font of mathematics, for machines without."""
    for path in sorted(CONFIGURATION.glob("*.py")):
        tree.write_bytes(path.name, path.read_bytes())
    for path in sorted(STATIC.glob("*.[cj]s*")):
        tree.write_bytes(f"_static/{path.name}", path.read_bytes())
    tree.write("_static/audit_data.js", audit_script())
    font = resources.files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"
    tree.write_bytes("_static/STIXTwoMath-Regular.ttf", font.read_bytes())
