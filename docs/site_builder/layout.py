"""Where files of the repository stand on the site."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]

# Whole folders and single files that have pages of their own, in the order in which they are laid out.
PAGES = (
    "docs/**/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/functions/README.md",
    "papers/README.md",
    "papers/*/README.md",
    "benchmarks/results/*.md",
)
SCRIPTS = ("examples/*.py", "examples/functions/[0-9]*.py")
NOTEBOOKS = ("examples/notebooks/*.ipynb",)

# Pages that stand elsewhere than the rule of `page_of` says.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "examples": "examples/index.md",
    "examples/notebooks": "examples/index.md",
    "benchmarks": "benchmarks/index.md",
    "benchmarks/results": "benchmarks/index.md",
    "docs": "index.md",
}

# What browsers and readers take as it is.
ASSETS = {".png", ".svg", ".json"}

FINDINGS = "reference/findings.md"


class SiteError(Exception):
    """A link or a page that is not as the site needs it."""


@cache
def found(patterns: tuple[str, ...]) -> list[str]:
    """Files of the repository that match, each once, as paths from its root."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(ROOT).as_posix() for path in paths))


def page_of(path: str) -> str:
    """The page of a file or folder: docs/ is the root, README is the index of its folder, code has a page as well."""
    if path in MOVED:
        return MOVED[path]
    if path in found(PAGES + NOTEBOOKS):
        return path.removeprefix("docs/").replace("README.md", "index.md")
    if path in found(SCRIPTS):
        return f"{path.removesuffix('.py')}.md"
    if (ROOT / path).is_dir():
        if (ROOT / path / "README.md").exists():
            return page_of(f"{path}/README.md")
        return f"source/{path}/index.md"
    if PurePosixPath(path).suffix in ASSETS:
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def relative(target: str, page: str) -> str:
    """A path on the site as seen from a page."""
    return os.path.relpath(target, PurePosixPath(page).parent)


@dataclass
class Tree:
    """The tree of Markdown that is being laid out."""

    folder: Path
    written: dict[str, None] = field(default_factory=dict)
    # Files of the repository that some page links to and that have no page yet.
    wanted: dict[str, None] = field(default_factory=dict)

    def write(self, page: str, text: str) -> None:
        """A page; two that claim one place are an error."""
        self.write_bytes(page, text.encode())

    def append(self, page: str, text: str) -> None:
        """More of a page that is written."""
        with (self.folder / page).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{text}\n")

    def write_bytes(self, page: str, content: bytes) -> None:
        """A file of any kind."""
        if page in self.written:
            raise SiteError(f"{page} is written twice.")
        self.written[page] = None
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
