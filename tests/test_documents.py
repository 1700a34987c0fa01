"""README, CONTRIBUTING and docs name only files, functions, codes of findings, links and verdicts that exist."""

import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from hodiff.checks.findings.codes import CODES
from hodiff.torch_internals.wording import OF_TORCH_ITSELF, Wording, says

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "hodiff|kernels|tests|examples|benchmarks|papers|docs"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def text_of(page):
    return page.read_text(encoding="utf-8")


def missing_paths(text):
    named = re.findall(rf"(?<![\w./-])(?<!\]\()((?:{FOLDERS})/[\w./-]*\w/?)", text)
    return [path for path in named if not (ROOT / path).exists()]


def missing_names(text):
    """Return dotted names of hodiff that are neither a module nor an attribute of a module."""
    return [name for name in re.findall(r"(?<![\w./])hodiff(?:\.[A-Za-z]\w*)+(?![\w/])", text) if not resolves(name)]


@cache
def resolves(name):
    parts = name.split(".")
    door = ROOT.joinpath(*parts[:3]).with_suffix(".py")
    doors = parts[1] == "doors" or parts[1:3] in (["atoms", "ase"], ["atoms", "phonopy"])
    if doors and len(parts) in {3, 4} and door.exists():
        # It imports a program that is not installed here.
        return len(parts) == 3 or re.search(rf"^(class|def) {parts[3]}\(", text_of(door), re.MULTILINE) is not None
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def missing_links(page, text):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [each for each in targets if "://" not in each and not (page.parent / each).exists()]


def missing_sections(page, text):
    """Return links to missing headings, by GitHub's rule for anchors."""
    return [
        f"{file}#{section}"
        for file, section in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", text)
        if section not in sections_of(page.parent / file if file else page)
    ]


@cache
def sections_of(page):
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_named_paths_exist(page):
    assert not missing_paths(text_of(page))


@by_page
def test_named_functions_exist(page):
    assert not missing_names(text_of(page))


@by_page
def test_links_resolve(page):
    assert not missing_links(page, text_of(page)) + missing_sections(page, text_of(page))


@by_page
def test_finding_codes_exist(page):
    assert set(re.findall(r"\bHD\d{3}\b", text_of(page))) <= set(CODES)


def test_missing_paths_names_and_links_are_detected():
    page = ROOT / "README.md"
    assert missing_paths("see `hodiff/nowhere.py`, hodiff/errors.py") == ["hodiff/nowhere.py"]
    assert missing_names("`hodiff.hvp`, `hodiff.nothing`, hodiff.meta.nothing") == [
        "hodiff.nothing",
        "hodiff.meta.nothing",
    ]
    assert missing_links(page, "[a](docs/nowhere.md), [b](docs/explanations/routes.md#routes)") == ["docs/nowhere.md"]
    links = "[a](docs/explanations/routes.md#routes), [b](docs/explanations/routes.md#detours)"
    assert missing_sections(page, links) == ["docs/explanations/routes.md#detours"]


def test_architecture_names_existing_files_and_functions():
    """The walks through the code use short file names, and names in backquotes that the code defines."""
    walks = "".join(text_of(ROOT / "docs" / "project" / "architecture.md").split("\n## The path of one ")[1:])
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "hodiff").rglob("*.py")}
    code = "".join(files.values())
    for name in re.findall(r"`([\w/]+\.py)`", walks):
        assert any(f"/{path.relative_to(ROOT)}".endswith(f"/{name}") for path in files), name
    identifiers = re.findall(r"`([A-Z]\w+|[a-z_]+_[a-z_]+|bind|climb|follow|diagnose)(?:\.(?!py\b)(\w+))?`", walks)
    assert len(identifiers) > 15
    for name in {part for pair in identifiers for part in pair if part}:
        assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", code, re.MULTILINE), name


def test_every_error_section_names_its_finding():
    sections = re.split(r"^### ", text_of(ROOT / "docs" / "reference" / "errors.md"), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        heading, _, body = section.partition("\n")
        assert re.search(r"\bHD\d{3}\b|No\s+finding|InputError", body), heading


def test_errors_page_has_every_recognised_message():
    """Messages about devices and torch's internals do not concern derivatives and need no entry."""
    others = {Wording.OTHER_DEVICE, Wording.NO_NUMBERS_TO_COPY, Wording.OUTPUT_RESIZED, *OF_TORCH_ITSELF}
    page = text_of(ROOT / "docs" / "reference" / "errors.md")
    for wording in Wording:
        assert wording in others or says(page, wording), wording


def test_readme_table_matches_the_audit():
    """Rows of the README's table repeat the audit's verdicts for torch alone, by the four routes."""
    pattern = re.compile(r"^\| `([\w.]+)` \| (.+) \|$", re.MULTILINE)
    page = text_of(ROOT / "docs" / "reference" / "audit.md")
    audit = dict(pattern.findall(page.split("## Not right everywhere")[1].split("\n## ")[0]))
    rows = pattern.findall(text_of(ROOT / "README.md").split("## Where torch is wrong")[1].split("## Speed")[0])
    assert rows
    for operator, verdicts in rows:
        cells = [cell.split(" → ") for cell in audit[operator].split(" | ")[:4]]
        assert verdicts.split(" | ") == [cell[0].split()[0] for cell in cells], operator
        assert {cell[-1] for cell in cells} == {"right"}, operator
