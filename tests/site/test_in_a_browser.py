"""Tests of the site in Chromium against the repository: search, formulas, audit filters, images, a narrow screen."""

import pytest

from hodiff.checks.torch_verdicts import audit_on_file, versions_on_file

pytestmark = pytest.mark.slow

FILTER = "reference/is_your_torch_wrong.html"
WITH_PICTURES = ("index", "tutorial", "guides/optimizers", "papers/cohen-2021/index", "examples/index")
NARROW = (
    "index",
    "tutorial",
    "howto/hessian_too_big",
    "coming_from/curvlinops",
    "guides/operators",
    "explanations/cost_of_a_product",
    "reference/is_your_torch_wrong",
    "reference/audit",
    "reference/findings",
    "reference/findings/HD104",
    "reference/api/hodiff.estimators",
    "examples/functions/01_square",
)


def search(page, address, words):
    page.goto(f"{address}/search.html?q={words.replace(' ', '+')}")
    page.wait_for_selector("#search-results ul.search li a")
    page.wait_for_function("document.querySelector('#search-results p')?.innerText.includes('found')")
    return page.eval_on_selector_all(
        "#search-results ul.search li > a", "links => links.map(a => a.getAttribute('href'))"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Trying to backward through the graph a second time", "reference/errors.html"),
        ("marked with once_differentiable", "reference/findings/HD107.html"),
        ("gradient penalty", "howto/gradient_penalty.html"),
        ("spectral_density", "reference/api/hodiff.estimators.html"),
    ],
)
def test_search_finds_the_page(page, address, words, expected):
    found = search(page, address, words)
    assert any(link.startswith(expected) for link in found[:12]), found


def test_formulas_are_visible(page, address):
    page.goto(f"{address}/guides/operators.html")
    sizes = page.eval_on_selector_all(
        "math", "all => all.map(m => [m.getBoundingClientRect().width, m.getBoundingClientRect().height])"
    )
    assert len(sizes) > 10
    assert all(width > 3 and height > 3 for width, height in sizes)
    # A fraction's numerator is above its denominator.
    above, below = page.eval_on_selector("mfrac", "f => [...f.children].map(c => c.getBoundingClientRect().top)")
    assert above < below


def rows(page):
    return page.eval_on_selector_all(
        "#audit tbody tr", "rows => rows.map(row => [...row.children].map(cell => cell.firstChild?.textContent ?? ''))"
    )


def fill_filters(page, **fields):
    for name, value in fields.items():
        box = page.locator(f"#audit-{name}")
        if name == "name":
            box.fill(value)
        else:
            box.select_option(value)


@pytest.mark.parametrize("version", versions_on_file())
@pytest.mark.parametrize(("run", "index"), [("torch", "0"), ("corrected", "1")])
def test_audit_filter_matches_the_saved_audit(page, address, version, run, index):
    table = audit_on_file(version)
    page.goto(f"{address}/{FILTER}")
    fill_filters(page, version=str(versions_on_file().index(version)), run=index, verdict="defect")
    shown = {name: verdicts for name, *verdicts in rows(page)}
    assert shown.keys() == table.defects(run).keys()
    for name, verdicts in shown.items():
        assert verdicts == [verdict.status for verdict in table.operators[name][run].values()], name


def test_filters_narrow_the_audit_table(page, address):
    page.goto(f"{address}/{FILTER}")
    fill_filters(page, name="LAYER_NORM", verdict="")
    assert {name for name, *_ in rows(page)} == {"native_layer_norm", "nn.functional.layer_norm"}
    fill_filters(page, route="2", verdict="w")
    assert ["nn.functional.layer_norm", "wrong"] in rows(page)
    fill_filters(page, run="1")
    assert rows(page) == []
    fill_filters(page, run="0", version=str(len(versions_on_file())))
    assert [len(row) for row in rows(page)] == [1 + len(versions_on_file())] * 2
    # The address includes the selection, so that it can be shared.
    again = page.url
    page.goto("about:blank")
    page.goto(again)
    assert page.locator("#audit-name").input_value() == "LAYER_NORM"
    assert len(rows(page)) == 2


def test_audit_filter_works_without_a_server(page, site):
    page.goto((site / FILTER).as_uri())
    assert len(rows(page)) > 30


@pytest.mark.parametrize("name", WITH_PICTURES)
def test_images_are_loaded(page, address, name):
    page.goto(f"{address}/{name}.html")
    for picture in page.locator("article img").all():
        picture.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    widths = page.eval_on_selector_all("article img", "all => all.map(img => img.naturalWidth)")
    assert widths
    assert all(width > 100 for width in widths)


@pytest.mark.parametrize("name", NARROW)
def test_no_page_scrolls_sideways(page, address, name):
    page.goto(f"{address}/{name}.html")
    for width in (360, 800, 1280, 1700):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_menu_opens_on_a_narrow_screen(page, address):
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{address}/index.html")
    entry = page.locator('.sidebar-tree a[href="guides/operators.html"]')
    assert not entry.is_visible() or entry.bounding_box()["x"] < 0
    page.locator("label.nav-overlay-icon").first.click()
    page.wait_for_function("document.querySelector('.sidebar-drawer').getBoundingClientRect().left >= 0")
    entry.click()
    page.wait_for_url("**/guides/operators.html")


def test_copied_code_has_no_prompts(page, address):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{address}/index.html")
    page.locator("div.highlight").first.hover()
    page.locator("button.copybtn").first.click()
    page.wait_for_selector("button.copybtn.success")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("import torch, hodiff\nx, v = ")
    assert ">>>" not in copied
