"""The page of torch's faults: reports, examples and measured versions, against torch and the table of corrections."""

import pytest
import torch
from corrections.public_reports import REPORTS, TAILS, is_wrong, nested, routes_of
from upstream.faults import audited_operators, faults, row_names
from upstream.measure import apart, call_name, chosen_calls, defects_of
from upstream.reports import COLLECTION, THREADS
from upstream.witnesses import WITNESSES
from upstream.write_page import PAGE, SUMMARY, measured, page, short, summary

import hodiff
from hodiff.checks.torch_verdicts import AUDITED_ROUTES, versions_on_file

CORRECTED = {name for _, functions in faults() for name in functions}
VERSION = ".".join(torch.__version__.split(".")[:2])


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="the page has a row for torch.cholesky, which 2.14 removes")
def test_pages_are_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page()
    assert SUMMARY.read_text(encoding="utf-8") == summary()


def test_every_thread_names_corrected_functions():
    for thread in THREADS:
        assert set(thread.functions) <= CORRECTED, thread.number
        assert thread.link in PAGE.read_text(encoding="utf-8")
    numbers = [each.number for each in THREADS]
    assert len(numbers) == len(set(numbers))
    assert COLLECTION not in numbers


def test_every_fault_has_a_row():
    text = PAGE.read_text(encoding="utf-8")
    assert len(list(faults())) > 150
    for row, functions in faults():
        assert f"| `{functions[0]}`" in text, row.name


def test_versions_are_those_of_the_audits():
    assert list(measured()) == versions_on_file()
    names = REPORTS.keys() | TAILS.keys() | WITNESSES.keys()
    for data in measured().values():
        assert data["reports"].keys() == names
        assert len(data["calls"]) > 100
        for defects in data["calls"].values():
            assert set(defects) <= {*AUDITED_ROUTES, "call"}


def test_names_of_operators_match_rows():
    assert "torch.scatter_reduce" in row_names("scatter_reduce.prod")
    assert "torch.functional.cdist" in row_names("cdist")
    assert audited_operators(("torch.linalg.det",)) == ["linalg.det"]


def test_routes_are_abbreviated_in_order():
    statuses = {AUDITED_ROUTES[3]: {"wrong"}, AUDITED_ROUTES[2]: {"non-finite", "raises"}}
    assert short(statuses, AUDITED_ROUTES) == "rf ff; raises rf"
    assert short({route: {"raises"} for route in AUDITED_ROUTES}, AUDITED_ROUTES) == "raises all"


@pytest.mark.parametrize("name", WITNESSES)
def test_witness_is_right_within_corrected(name):
    assert name in CORRECTED
    report = WITNESSES[name]
    at = torch.tensor(report.at, dtype=report.dtype)
    for routes in routes_of(report.order):
        with hodiff.corrected():
            got = nested(report.f, routes)(at).item()
        assert got == pytest.approx(report.truth, rel=1e-9, abs=0), "".join(routes)


def test_reports_are_wrong_until_their_fixed_version():
    for version, data in measured().items():
        for name, report in REPORTS.items():
            is_fixed = report.mended != "never" and version >= report.mended
            assert data["reports"][name] == (not report.elsewhere and not is_fixed), (version, name)


@pytest.mark.parametrize("name", [*TAILS, *WITNESSES])
def test_examples_are_as_measured(name):
    if VERSION not in measured():
        pytest.skip(f"torch {VERSION} was not measured")
    assert is_wrong((TAILS | WITNESSES)[name], 0.0) == measured()[VERSION]["reports"][name]


@pytest.mark.slow
def test_calls_are_as_measured():
    if VERSION not in measured():
        pytest.skip(f"torch {VERSION} was not measured")
    stored = measured()[VERSION]["calls"]
    some = [call for call in chosen_calls() if stored.get(call_name(call[0]))][::4]
    assert len(some) > 5
    for f, args, kwargs in some:
        found = apart(defects_of, f, args, kwargs)
        assert found.items() <= stored[call_name(f)].items(), call_name(f)
