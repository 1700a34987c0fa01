"""Tests of the site's layout before Sphinx: links against links by hand, findings and audit against their files."""

import base64
import json
import re

import pytest

from hodiff.checks.findings.codes import CODES
from hodiff.checks.torch_verdicts import audit_on_file, versions_on_file

pytest.importorskip("griffe")
from site_builder import api, findings, gallery, layout, links, navigation, scripts
from site_builder.audit import LETTERS, audit_script
from site_builder.layout import SiteError, Tree, page_of


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("docs/guides/meta.md", "guides/meta.md"),
        ("README.md", "index.md"),
        ("CHANGELOG.md", "project/changelog.md"),
        ("papers/cohen-2021/README.md", "papers/cohen-2021/index.md"),
        ("papers", "papers/index.md"),
        ("examples/laplace.py", "examples/laplace.md"),
        ("examples/functions", "examples/functions/index.md"),
        ("hodiff/errors.py", "source/hodiff/errors.py.md"),
        ("tests/models", "source/tests/models/index.md"),
        ("docs/images/newton.png", "images/newton.png"),
    ],
)
def test_files_map_to_pages(path, page):
    assert (layout.ROOT / path).exists()
    assert page_of(path) == page


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[a](../reference/audit.md)", "[a](../reference/audit.md)"),
        ("[a](operators.md#data)", "[a](operators.md#data)"),
        ("[`a` b](../../examples/laplace.py)", "[`a` b](../examples/laplace.md)"),
        ("![a](../images/newton.png)", "![a](../images/newton.png)"),
        ("[a](../../README.md)", "[a](../index.md)"),
        ("[a](../reference/findings.md#hd104-the-graph-is-cut)", "[a](../reference/findings/HD104.md)"),
        ("[a](https://example.org)", "[a](https://example.org)"),
        ("[a](#data)", "[a](#data)"),
        ("```python\nx = [f](y)\n```", "```python\nx = [f](y)\n```"),
        ("```python\n>>> 1\n1\n\n```\n\nText", "```python\n>>> 1\n1\n```\n\nText"),
    ],
)
def test_repository_links_become_site_links(tree, written, expected):
    assert links.relinked(written, "docs/guides/meta.md", "guides/meta.md", tree) == expected


def test_images_with_a_width_are_copied(tree):
    written = '[<img src="pictures/01_square.png" alt="a square" width="120">](pictures/01_square.png)'
    page = links.relinked(written, "examples/functions/README.md", "examples/functions/index.md", tree)
    assert page == "[![a square](pictures/01_square.png){width=120px}](pictures/01_square.png)"


@pytest.mark.parametrize("target", ["nowhere.md", "../../../outside.md"])
def test_broken_link_stops_the_build(tree, target):
    with pytest.raises(SiteError, match=re.escape(f"{target} leads nowhere")):
        links.relinked(f"[a]({target})", "docs/guides/meta.md", "guides/meta.md", tree)


def test_linked_code_gets_a_page(tree):
    links.relinked(
        "[a](../../hodiff/errors.py), [b](../../tests/models)", "docs/guides/meta.md", "guides/meta.md", tree
    )
    scripts.write_sources(tree)
    code = (tree.folder / "source/hodiff/errors.py.md").read_text()
    assert (layout.ROOT / "hodiff/errors.py").read_text().strip() in code
    assert "`table.py`" in (tree.folder / "source/tests/models/index.md").read_text()


def test_page_written_twice_stops_the_build(tree):
    tree.write("a.md", "one")
    with pytest.raises(SiteError, match=r"a\.md is written twice"):
        tree.write("a.md", "two")


def test_finding_pages_have_title_example_and_torch_message(tree):
    pages = findings.write_findings(tree)
    assert [page[-8:-3] for page in pages] == sorted(CODES)
    for page in pages:
        text = (tree.folder / page).read_text()
        code = page[-8:-3]
        assert text.startswith(f"# {code}: {CODES[code].title}\n")
        assert text.count("```python") == 3
    said = (tree.folder / "reference/findings/HD107.md").read_text()
    assert "(../errors.md#trying-to-differentiate-twice-a-function-that-was-marked-with-once_differentiable)" in said
    assert "[HD107](findings/HD107.md)" in (tree.folder / "reference/findings.md").read_text()


def test_audit_script_contains_all_tables():
    data = json.loads(audit_script().removeprefix("const AUDIT = ").removesuffix(";\n"))
    tables = [audit_on_file(version) for version in versions_on_file()]
    assert data["versions"] == [table.torch for table in tables]
    assert data["verdicts"] == {letter: verdict for verdict, letter in LETTERS.items()}
    for index, table in enumerate(tables):
        for name, entry in table.operators.items():
            words = data["operators"][name][index]
            for word, run in zip(words[:2], ("torch", "corrected"), strict=True):
                assert [data["verdicts"][letter] for letter in word] == [v.status for v in entry[run].values()], name
    assert sum(map(len, data["operators"].values())) == len(tables) * len(data["operators"])


def test_missing_page_in_the_sidebar_stops_the_build():
    with pytest.raises(SiteError, match=r"guides/meta\.md"):
        navigation.side_bar({})


@pytest.mark.parametrize("new", ["guides/new", "new", "explanations/new"])
def test_new_page_is_added_to_the_sidebar(new):
    written = {page: None for pages in navigation.SIDE_BAR.values() for page in pages}
    assert new not in navigation.side_bar(written).splitlines()
    assert new in navigation.side_bar({**written, f"{new}.md": None}).splitlines()


def test_notebook_page_has_site_links_and_its_first_image(tree, tmp_path, monkeypatch):
    source = "examples/notebooks/new.ipynb"
    picture = base64.b64encode(b"a picture").decode()
    cells = [
        {
            "cell_type": "markdown",
            "source": ["# New\n", "\n", "On [meta](../../docs/guides/meta.md).\n", "\n", "More."],
        },
        {"cell_type": "code", "source": ["1"], "outputs": [{"data": {"text/plain": "1"}}]},
        {"cell_type": "code", "source": ["2"], "outputs": [{"data": {"image/png": picture}}]},
    ]
    (tmp_path / source).parent.mkdir(parents=True)
    (tmp_path / source).write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    monkeypatch.setattr(gallery, "page_of", lambda path: path)
    tree.folder = tmp_path / "site"
    card = gallery._notebook(source, tree)
    assert card == gallery.Card(source, "New", "On meta.", "examples/notebooks/new.thumbnail.png")
    assert (tree.folder / card.picture).read_bytes() == b"a picture"
    shown = json.loads((tree.folder / source).read_text())["cells"]
    assert "On [meta](../../guides/meta.md)." in shown[0]["source"]
    assert shown[1:] == cells[1:]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the reference pages by room."""
    tree = Tree(tmp_path_factory.mktemp("reference"))
    return {
        page.rpartition("/")[2].removesuffix(".md"): (tree.folder / page).read_text() for page in api.write_api(tree)
    }


@pytest.mark.slow
def test_reference_has_signatures_and_sections(reference):
    text = reference["hodiff"]
    hvp = text.split(":::{py:function} hvp(")[1].split("\n:::")[0]
    assert hvp.startswith("f: Callable[..., Any], x: PyTree, v: PyTree, *args: Any, route: str = 'auto', ")
    assert "$$ H v = \\nabla^2 f(x)\\, v" in hvp
    assert ":param route: One of `hodiff.ROUTES`" in hvp
    assert ":raises RouteError: If torch does not implement the route" in hvp
    assert "```python\n>>> import torch, hodiff\n" in hvp
    assert hvp.rstrip().endswith("eq. 2.4.")


def test_name_exported_twice_is_documented_once(reference):
    assert "{py:obj}`HessianOperator <hodiff.operators.HessianOperator>`" in reference["hodiff"]
    assert "{py:class} HessianOperator(" not in reference["hodiff"]
    assert "{py:class} HessianOperator(f: " in reference["hodiff.operators"]
    # `check` is the name of a module and of its function.
    assert "{py:function} check(f: " in reference["hodiff.checks"]
