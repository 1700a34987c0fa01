"""Notebook displays: they show each result's numbers, escape text, and load nothing from outside."""

import pickle
from html.parser import HTMLParser

import pytest
import scipy
import torch

import hodiff
from hodiff import estimators, meta, optim
from hodiff.corrections.mechanism.correction_table import CorrectionTable, Row
from hodiff.displays import Cell, Html, curve, element, facts, folded, numbers, page, table

A = torch.diag(torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64))
TAGS = {"div", "p", "b", "span", "table", "tr", "td", "th", "details", "summary", "code", "small", "svg", "polyline"}
ATTRIBUTES = {"style", "open", "width", "height", "viewbox", "points", "fill", "stroke"}
ASKED = "<script>alert(1)</script> & b"


class Shown(HTMLParser):
    """Text and cells of a fragment; asserts that all elements end and that none loads anything from outside."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS
        assert {name for name, _ in attributes} <= ATTRIBUTES
        assert not any("url(" in (value or "") or "://" in (value or "") for _, value in attributes)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def parsed(value) -> Shown:
    return Shown(value._repr_html_())


def cells_by_label(value) -> dict[str, str]:
    return {row[0]: row[1] for row in parsed(value).rows if len(row) == 2}


def test_text_is_escaped():
    whole = page(
        element("p", ASKED), table([ASKED], [[Cell(ASKED, "error")]]), facts([(ASKED, ASKED)]), folded(ASKED, ASKED)
    )
    assert "<script" not in whole
    assert Shown(whole).text.count(ASKED) == 7
    assert element("b", Html("<i>")) == "<b><i></b>", "HTML passes"


def test_long_tables_state_the_omitted_rows():
    rows = Shown(table(["n"], [[i] for i in range(1234)], most=3)).rows
    assert [row[0] for row in rows] == ["n", "0", "1", "2", "and 1,231 more"]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor(2.0), "2"),
        (torch.tensor([1.0, -2.5]), "[1, -2.5]"),
        (torch.linspace(-1, 3, 10), "(10,) float32, from -1 to 3"),
        (torch.tensor([[torch.nan] * 5]), "(1, 5) float32, with nan or inf among its numbers"),
        (torch.zeros(0), "[]"),
        (torch.zeros(5, dtype=torch.complex64), "(5,) complex64"),
        (torch.arange(6), "(6,) int64, from 0 to 5"),
    ],
)
def test_tensors_are_shortened(tensor, text):
    assert numbers(tensor) == text


def test_curve_is_scaled_to_its_range():
    points = curve([0.0, 2.0, -9.0], 4.0).split('points="')[1].split('"')[0].split()
    x, y = zip(*(map(float, each.split(",")) for each in points), strict=True)
    assert x == (0.0, 180.0, 360.0)
    assert y[1] < y[0] < y[2]
    assert max(y) < 70


def test_operator_display():
    def loss(x):
        return x["weight <b>"].pow(3).sum() * x["bias"]

    x = {"weight <b>": torch.ones(2, 3), "bias": torch.tensor(1.0)}
    rows = parsed(hodiff.HessianOperator(loss, x)).rows
    assert ["shape", "7 × 7"] in rows
    assert ["numbers", "float32 on cpu"] in rows
    assert ["of", "loss"] in rows
    assert ["weight <b>", "(2, 3)", "6"] in rows
    over_data = hodiff.HessianOperator(lambda x, batch: (x * batch).sum() ** 2, torch.ones(2), data=[torch.ones(2)] * 3)
    assert ["batches", "3"] in parsed(over_data).rows
    jacobian = hodiff.JacobianOperator(lambda x: x[:2] ** 2, torch.ones(5))
    assert ["shape", "2 × 5"] in parsed(jacobian).rows
    assert ["shape", "5 × 5"] in parsed(jacobian.T @ jacobian).rows
    assert repr(jacobian) == "JacobianOperator(2, 5, float32, cpu)"


def test_eigenpairs_display_lists_the_largest_first():
    pairs = estimators.eigsh(A, 2, which="LA")
    rows = parsed(pairs).rows
    assert [row[0] for row in rows[:3]] == ["eigenvalue", "3", "2"]
    assert "2 of 4 eigenvalues" in parsed(pairs).text
    assert "converged" in parsed(pairs).text
    assert cells_by_label(pairs)["products"] == str(pairs.products)


def test_estimate_display():
    exact = estimators.trace(A)
    assert cells_by_label(exact) == {"method": "exact", "products": "4"}
    assert parsed(exact).text.startswith("4.5")
    large = torch.diag(torch.linspace(1, 2, 500, dtype=torch.float64))
    drawn = estimators.trace(large, method="hutchinson", products=20, probes="gaussian")
    assert f"{drawn.value:.6g} ± {drawn.standard_error:.2g}" in parsed(drawn).text
    assert "diagonal of 4 entries" in parsed(estimators.diagonal(A)).text
    density = estimators.spectral_density(A, method="exact")
    assert cells_by_label(density)["range"] == "-1 to 3"
    assert cells_by_label(density)["mean"] == "1.125"
    assert "<polyline" in density._repr_html_()
    assert "largest eigenvalue 3" in parsed(estimators.sharpness(A)).text
    assert cells_by_label(estimators.condition_number(A))["smallest"] == "0.5"
    solution = estimators.solve(A @ A, torch.ones(4, dtype=torch.float64))
    assert "solution of a linear system converged" in parsed(solution).text


def test_unconverged_results_say_so():
    large = torch.diag(torch.linspace(1, 2, 500, dtype=torch.float64))
    with pytest.warns(hodiff.HodiffWarning):
        pairs = estimators.eigsh(large, 2, method="lanczos", max_iterations=3, throw=False)
    assert "not converged" in parsed(pairs).text


def test_preflight_display():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    found = hodiff.preflight(model, torch.randn(2, 3), correct=False)
    rows = {row[0]: row[1:] for row in parsed(found).rows}
    (norm,) = [each for each in found.operators if "layer_norm" in each.name]
    assert rows[norm.name] == ["1", *(norm.routes[route] for route in hodiff.ROUTES)]
    assert rows["all together"][1:] == [found.routes[route] for route in hodiff.ROUTES]
    assert found.verdict in parsed(found).text
    assert norm.remedy in parsed(found).text


def test_corrections_table_display():
    found = hodiff.corrections.table()
    assert isinstance(found, list)
    assert repr(found) == repr(list(found))
    rows = {row[0]: row[1:] for row in parsed(found).rows}
    assert rows["torch.nn.functional.layer_norm"][0] == "wrong"
    assert len(rows) == len({row.name for row in found}) + 1
    row = Row("f", "missing", hodiff.ROUTES, ASKED, "")
    assert ["f", "missing", "all routes", ASKED, ""] in parsed(CorrectionTable([row])).rows


def test_hypergradient_display():
    found = meta.hypergradient(
        lambda w, _: w.sum(),
        lambda w, p: ((w - 1) ** 2 + p["a <b>"] * w**2).sum(),
        torch.tensor([0.5]),
        {"a <b>": torch.tensor(1.0)},
    )
    assert cells_by_label(found)["a <b>"] == "-0.25"
    assert cells_by_label(found)["products"] == str(found.products)


def test_minimize_result_display():
    found = optim.minimize(lambda x: ((x["a <b>"] - 1) ** 2).sum(), {"a <b>": torch.zeros(2)})
    assert cells_by_label(found)["a <b>"] == "[1, 1]"
    assert cells_by_label(found)["iterations"] == str(found.nit)
    assert "success" in parsed(found).text
    assert found.message in parsed(found).text
    # In all other respects the result behaves like SciPy's.
    assert isinstance(found, scipy.optimize.OptimizeResult)
    assert repr(found) == repr(scipy.optimize.OptimizeResult(found))
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), again.fun, again["nit"]) == (type(found), found.fun, found.nit)


def test_failed_and_batched_result_displays():
    stopped = optim.minimize(lambda x: x.cosh(), torch.tensor(3.0), options={"maxiter": 1})
    assert parsed(stopped).text.startswith("no success")
    many = optim.minimize(lambda x, p: (x * x - p) ** 2, torch.ones(2), torch.tensor([2.0, 9.0]), batched=True)
    assert "2 of 2 problems ended with success" in parsed(many).text
    some = optim.minimize(
        lambda x, p: (x * x - p) ** 2, torch.ones(2), torch.tensor([1.0, 9.0]), batched=True, options={"maxiter": 1}
    )
    assert "1 of 2 problems ended with success" in parsed(some).text
    assert some.message[1] in parsed(some).text
    t = torch.linspace(0, 1, 8, dtype=torch.float64)
    fit = optim.least_squares(lambda p: torch.exp(-p * t) - torch.exp(-2 * t), torch.tensor(1.0, dtype=torch.float64))
    assert cells_by_label(fit)["x"] == "2"
    assert float(cells_by_label(fit)["cost"]) < 1e-12
    fits = optim.least_squares(lambda x, a: x * x - a, torch.ones(2, 1), torch.tensor([4.0, 9.0]), batched=True)
    assert "2 of 2 problems" in parsed(fits).text
