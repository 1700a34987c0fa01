"""Links that are written for the repository, made those of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath

from site_builder.layout import ASSETS, FINDINGS, ROOT, SiteError, Tree, page_of, relative

_FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)
_LAST_LINE = re.compile(r"\n(?=\n *```$)")
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
# Of a size that Markdown has no word for; Sphinx copies no picture of HTML.
_SIZED_PICTURE = re.compile(r'<img src="([^"]+)" alt="([^"]*)" width="(\d+)">')
_FINDING = re.compile(r"hd\d{3}")


def relinked(text: str, source: str, page: str, tree: Tree) -> str:
    """The text as it is to stand on a page; of blocks of code only the empty line that ends a doctest goes."""
    parts = _FENCE.split(text)
    parts[1::2] = [_LAST_LINE.sub("", part) for part in parts[1::2]]
    parts[::2] = [_SIZED_PICTURE.sub(r"![\2](\1){width=\3px}", part) for part in parts[::2]]
    parts[::2] = [_LINK.sub(lambda match: _link(match, source, page, tree), part) for part in parts[::2]]
    return "".join(parts)


def _link(match: re.Match[str], source: str, page: str, tree: Tree) -> str:
    picture, words, target = match.groups()
    path, _, section = target.partition("#")
    if "://" in target:
        return match[0]
    here = posixpath.normpath(posixpath.join(PurePosixPath(source).parent, path)) if path else source
    if here.startswith("..") or not (ROOT / here).exists():
        raise SiteError(f"{source}: {target} leads nowhere.")
    if page_of(here) == FINDINGS and _FINDING.match(section):
        return f"{words}({relative(finding_page(section), page)})"
    if not path:
        return match[0]
    place = page_of(here)
    tree.wanted[here] = None
    if picture or PurePosixPath(here).suffix in ASSETS:
        return f"{picture}{words}({relative(place, page)})"
    return f"{words}({relative(place, page)}{'#' + section if section else ''})"


def finding_page(section: str) -> str:
    """The page of a finding, of its code or of the anchor of its section."""
    return f"{FINDINGS.removesuffix('.md')}/{section[:5].upper()}.md"
