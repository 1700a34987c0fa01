"""The whole tree of Markdown, room by room."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from site_builder.api import FOLDER as API
from site_builder.api import write_api
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
LESSONS = "examples/functions/index.md"

_API_INDEX = """\
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
        text = relinked((ROOT / path).read_text(encoding="utf-8"), path, page, tree)
        if page == FILTER:
            text += f"\n{(STATIC / 'audit.html').read_text(encoding='utf-8')}"
        if page != FRONT:
            tree.write(page, text + (f"\n{contents(below.pop(page), page)}\n" if page in below else ""))
            continue
        front = text
    rooms = "\n".join(f"- [{page.removesuffix('.md').rpartition('/')[2]}]({page.removeprefix(f'{API}/')})" for page in api)
    tree.write(f"{API}/index.md", f"{_API_INDEX}\n{rooms}\n\n{contents(api, f'{API}/index.md')}\n")
    for page, pages in below.items():
        with (folder / page).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{contents(pages, page)}\n")
    tree.write(FRONT, f"{front}\n{side_bar({**tree.written, FRONT: None})}\n")
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
    package = importlib.util.find_spec("ziamath")
    assert package is not None and package.submodule_search_locations is not None
    (fonts,) = package.submodule_search_locations
    shutil.copy(Path(fonts) / "fonts" / "STIXTwoMath-Regular.ttf", tree.folder / "_static")
