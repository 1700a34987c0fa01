"""Pages of scripts and of other code: what the docstring says, then the code."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import PurePosixPath

from site_builder.layout import ROOT, Tree, page_of
from site_builder.links import relinked

# Where a script's picture stands, if it has one.
PICTURES = (
    "docs/images/{name}.png",
    "examples/functions/pictures/{name}.png",
    "examples/functions/pictures/{name}.svg",
)

_LANGUAGES = {".py": "python", ".cpp": "cpp", ".toml": "toml", ".md": "markdown", ".ini": "ini", "": "none"}


def write_script(source: str, tree: Tree) -> None:
    """A page of a Python file whose docstring is a page in itself."""
    page = page_of(source)
    text = (ROOT / source).read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, rest = docstring.partition("\n")
    parts = [f"# {title.rstrip('.')}", rest.strip("\n"), _fenced(_without(text), "python")]
    if picture := picture_of(source):
        tree.wanted[picture] = None
        parts.insert(2, f"![Picture drawn by the script]({posixpath.relpath(picture, PurePosixPath(source).parent)})")
    body = "\n\n".join(parts)
    tree.write(page, relinked(f"{body}\n", source, page, tree))


def picture_of(source: str) -> str | None:
    """The picture of a script, if there is one."""
    name = PurePosixPath(source).stem
    candidates = [pattern.format(name=each) for pattern in PICTURES for each in (name, name.replace("_", "-"))]
    return next((path for path in candidates if (ROOT / path).exists()), None)


def write_sources(tree: Tree) -> None:
    """A page for each file and folder that others link to and that has none."""
    while waiting := [path for path in tree.wanted if page_of(path) not in tree.written]:
        for source in waiting:
            page, path = page_of(source), ROOT / source
            if path.is_dir():
                tree.write(page, _folder(source, tree))
            elif PurePosixPath(page).suffix == ".md":
                language = _LANGUAGES.get(PurePosixPath(source).suffix, "none")
                code = _fenced(path.read_text(encoding="utf-8"), language)
                tree.write(page, f"---\norphan: true\n---\n\n# `{source}`\n\n{code}\n")
            else:
                tree.write_bytes(page, path.read_bytes())


def _folder(source: str, tree: Tree) -> str:
    names = sorted(each.name for each in (ROOT / source).iterdir() if not each.name.startswith(("_", ".")))
    rows = "\n".join(f"- `{name}`" for name in names)
    return f"---\norphan: true\n---\n\n# `{source}/`\n\n{rows}\n"


def _without(text: str) -> str:
    """The code below the docstring."""
    first, *_ = ast.parse(text).body
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return "\n".join(text.splitlines()[first.end_lineno :]).strip("\n")
    return text


def _fenced(code: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`{3,}", code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
