"""Tests of the built pages: links and anchors resolve, no page loads from other machines, formulas are MathML."""

import re
from functools import cache
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

import hodiff
from hodiff.checks.findings.codes import CODES

pytestmark = pytest.mark.slow


class Reader(HTMLParser):
    """Collect links, anchors, loaded files, and the text outside of code and formulas."""

    def __init__(self):
        super().__init__()
        self.links, self.anchors, self.loaded, self.formulas = [], set(), [], 0
        self.text, self.skipping = [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in {"img", "script", "iframe", "source"} and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loaded.append(found["href"])
        self.formulas += tag == "math"
        if tag in {"code", "pre", "math", "script", "style", "title"}:
            self.skipping.append(tag)

    def handle_endtag(self, tag):
        if self.skipping and self.skipping[-1] == tag:
            self.skipping.pop()

    def handle_data(self, data):
        if not self.skipping:
            self.text.append(data)


@cache
def parsed_page(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def pages(site):
    return {path: parsed_page(path) for path in sorted(site.rglob("*.html"))}


def test_links_and_anchors_resolve(pages, site):
    lost = []
    for path, reader in pages.items():
        for link in reader.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.exists()
            if there and parts.fragment and target.suffix == ".html":
                there = unquote(parts.fragment) in parsed_page(target).anchors
            if not there:
                lost.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 150
    assert not lost, lost[:20]


def test_pages_load_nothing_from_other_hosts(pages, site):
    for path, reader in pages.items():
        for source in reader.loaded:
            assert not urlsplit(source).netloc, f"{path.relative_to(site)}: {source}"
            assert source.startswith("data:") or (path.parent / urlsplit(source).path).exists(), source
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_formulas_are_mathml(pages, site):
    assert pages[site / "guides" / "operators.html"].formulas > 10
    assert pages[site / "reference" / "api" / "hodiff.estimators.html"].formulas > 20
    for path, reader in pages.items():
        assert "$$" not in "".join(reader.text), path.relative_to(site)


def test_every_finding_has_a_page_with_two_examples(pages, site):
    for code, defect in CODES.items():
        page = site / "reference" / "findings" / f"{code}.html"
        text = page.read_text(encoding="utf-8")
        assert code in text
        assert text.count('class="highlight-python') >= 3, f"{code}: {defect.title}"


def test_every_public_name_is_documented(pages, site):
    anchors = set().union(*(reader.anchors for path, reader in pages.items() if path.parent.name == "api"))
    rooms = ("estimators", "operators", "optimize", "optim", "meta", "implicit", "functions", "nn", "checks", "audit")
    for room in (*rooms, "plot"):
        module = getattr(hodiff, room)
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_") and getattr(value, "__doc__", None):
                home = value.__module__.split(".")[1]
                homes = {f"hodiff.{name}", f"hodiff.{room}.{name}", f"hodiff.{home}.{name}"}
                assert homes & anchors, f"hodiff.{room}.{name}"
