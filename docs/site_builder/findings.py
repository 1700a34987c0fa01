"""A page for each finding, of its section in findings.md, with the words by which torch speaks of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from site_builder.layout import FINDINGS, ROOT, Tree, relative
from site_builder.links import finding_page, relinked

SOURCE = "docs/reference/findings.md"
ERRORS = "docs/reference/errors.md"
_RULE = "Each page shows a short function with the defect, and one without it."
_CODE = re.compile(r"HD\d{3}")


@dataclass(frozen=True)
class Section:
    """What findings.md says of one finding."""

    code: str
    title: str
    body: str

    @property
    def severity(self) -> str:
        """The first word: error, warning or note."""
        return re.match(r"\*(\w+)", self.body)[1].lower()  # type: ignore[index]  # each body begins so


def sections() -> tuple[str, list[Section]]:
    """The introduction, and what follows it."""
    introduction, *rest = re.split(r"^## ", (ROOT / SOURCE).read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for each in rest:
        heading, _, body = each.partition("\n")
        code, _, title = heading.partition(": ")
        found.append(Section(code, title, body.strip()))
    return introduction, found


def words_of_torch() -> dict[str, list[str]]:
    """By code of a finding, the headings of errors.md below which it is named."""
    _, *rest = re.split(r"^### ", (ROOT / ERRORS).read_text(encoding="utf-8"), flags=re.MULTILINE)
    words: dict[str, list[str]] = {}
    for each in rest:
        heading, _, body = each.partition("\n")
        for code in dict.fromkeys(_CODE.findall(body)):
            words.setdefault(code, []).append(heading)
    return words


def anchor(heading: str) -> str:
    """GitHub's name of a section."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def write_findings(tree: Tree) -> list[str]:
    """Write the pages, and the list of them in the place of findings.md."""
    introduction, found = sections()
    said = words_of_torch()
    for each in found:
        page = finding_page(each.code)
        tree.write(page, relinked(_page(each, introduction, said.get(each.code, []), page), SOURCE, page, tree))
    before = relinked(introduction.split("Each section below")[0].rstrip(), SOURCE, FINDINGS, tree)
    tree.write(FINDINGS, f"{before}\n\n{_RULE}\n\n{_list(found, said)}\n")
    return [finding_page(each.code) for each in found]


def _page(section: Section, introduction: str, said: list[str], page: str) -> str:
    common = re.search(r"^```python\n.*?^```$", introduction, re.MULTILINE | re.DOTALL)
    parts = [f"# {section.code}: {section.title}", section.body]
    if said:
        parts += ["## Error messages of torch", "\n".join(f"- [{each}](errors.md#{anchor(each)})" for each in said)]
    parts += ["## Common code of the examples", common[0] if common else ""]
    parts.append("[Checking derivatives](../guides/checking.md) explains the reports of `hodiff.check`.")
    return "\n\n".join(parts) + "\n"


def _list(found: list[Section], said: dict[str, list[str]]) -> str:
    rows = ["| code | finding | | error messages of torch |", "|---|---|---|---|"]
    for each in found:
        link = relative(finding_page(each.code), FINDINGS)
        words = "; ".join(word.replace("|", "\\|") for word in said.get(each.code, []))
        rows.append(f"| [{each.code}]({link}) | {each.title} | {each.severity} | {words} |")
    return "\n".join(rows)
