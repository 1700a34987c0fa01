"""The audit: verdicts on functions with a known defect, worker processes, the table and its page."""

import datetime
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from audit.chosen import ruled_and_some
from torch.utils._pytree import tree_flatten

import hodiff
from hodiff.audit import AuditTable, Verdict, audit
from hodiff.audit.audit_sample import audit_function, audit_sample
from hodiff.audit.mutated.mutated_audit import mutated_on_file
from hodiff.audit.page import markdown_page
from hodiff.audit.pool import DiedError, Worker, select_operators, serve
from hodiff.audit.samples import database
from hodiff.checks import torch_verdicts
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.torch_verdicts import (
    AUDITED_ROUTES,
    STATUSES,
    THIRD,
    audit_on_file,
    everywhere,
    versions_on_file,
    worst,
)
from hodiff.errors import HodiffError, InputError
from hodiff.routes import ROUTES

ROOT = Path(__file__).parents[2]
# Each part is a test, so that two workers share them; a part starts a process, which takes seconds.
PARTS = 2


def point(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def sample(call, *args) -> Sample:
    leaves, structure = tree_flatten(args)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    return Sample(call, tuple(leaves), structure, places)


def statuses(verdicts) -> set[str]:
    return {verdict.status for verdict in verdicts.values()}


def all_right_except(verdicts, *routes: str) -> bool:
    return all((verdicts[route].status == "right") == (route not in routes) for route in AUDITED_ROUTES)


# One operator at one point


@pytest.mark.parametrize(
    "f",
    [torch.sin, torch.linalg.inv, lambda x: torch.fft.fft(x), lambda x: x.float(), lambda x: 2 * x],
    ids=["sin", "inv", "complex output", "float32 output", "linear"],
)
def test_right_functions_are_right_by_every_route(f):
    verdicts = audit_function(lambda x: (f(x),), (point(3, 3),))
    assert statuses(verdicts) == {"right"}
    assert max(verdict.error for verdict in verdicts.values()) < (
        1e-3 if f(point(3, 3)).dtype == torch.float32 else 1e-6
    )


def test_layer_norm_is_wrong_in_torch_and_right_when_corrected():
    layer_norm = sample(lambda x, w, b: F.layer_norm(x, (3,), w, b), point(2, 3), 1 + point(3), point(3))
    assert all_right_except(audit_sample(layer_norm, correct=False, seed=0), *ROUTES[2:], THIRD)
    assert all_right_except(audit_sample(layer_norm, correct=True, seed=0))
    assert layer_norm.is_corrected()
    assert not sample(torch.sin, point(3)).is_corrected()


def function_of(value, slope_of):
    """Return x -> value(x), whose backward rule multiplies by slope_of(x)."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return value(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return slope_of(ctx.saved_tensors[0]) * g

    return lambda x: (Function.apply(x),)


def test_wrong_second_derivative_is_found():
    verdicts = audit_function(function_of(torch.sin, lambda x: x.detach().cos()), (point(3),))
    assert verdicts["reverse-over-reverse"].status == "wrong"
    assert verdicts["reverse-over-reverse"].error > 0.1
    assert verdicts["reverse-over-forward"].status == "raises"
    assert "jvp" in verdicts["reverse-over-forward"].detail


def test_wrong_third_derivative_is_found():
    curvature = function_of(torch.cos, lambda x: -x.detach().sin())
    verdicts = audit_function(function_of(torch.sin, lambda x: curvature(x)[0]), (point(3),))
    assert verdicts["reverse-over-reverse"].status == "right"
    assert verdicts[THIRD].status == "wrong"


def test_only_rounding_is_allowed_where_a_derivative_vanishes():
    def straight(jerk):
        flat = function_of(torch.zeros_like, lambda x: torch.full_like(x, jerk))
        level = function_of(torch.ones_like, lambda x: flat(x)[0])
        return function_of(torch.clone, lambda x: level(x)[0])

    assert audit_function(straight(1e-15), (point(3),))[THIRD].status == "right"
    assert audit_function(straight(1e-9), (point(3),))[THIRD].status == "wrong"


def test_magnified_rounding_of_a_constant_is_not_wrong():
    """Along a dimension of size 1, x / |x| is a constant, but its third derivative has terms of size 1 / x³."""
    x = torch.tensor([[-0.9551, -0.0582, -0.3613, 0.7608, 0.0085, 0.0679]], dtype=torch.float64)
    with hodiff.corrected():
        verdicts = audit_function(lambda x: (F.normalize(x, 0.5, 0),), (x,))
    assert verdicts[THIRD].status == "right"


def test_non_finite_derivative_is_found():
    curvature = function_of(torch.cos, lambda x: x * math.nan)
    verdicts = audit_function(function_of(torch.sin, lambda x: curvature(x)[0]), (point(3),))
    assert verdicts["reverse-over-reverse"].status == "non-finite"


def test_wrong_gradient_is_named():
    verdicts = audit_function(lambda x: (x + x.detach().sin(),), (point(3),))
    assert statuses(verdicts) == {"wrong"}
    assert "gradient" in verdicts[THIRD].detail


@pytest.mark.parametrize("f", [torch.relu, torch.abs, lambda x: x.sqrt(), lambda x: x.sign()])
def test_kinks_are_not_smooth(f):
    assert statuses(audit_function(lambda x: (f(x),), (torch.zeros(2, dtype=torch.float64),))) == {"not smooth"}


def test_random_functions_have_status_random():
    assert statuses(audit_sample(sample(F.dropout, point(4)), correct=False, seed=0)) == {"random"}
    assert statuses(audit_sample(sample(torch.rand_like, point(4)), correct=False, seed=0)) == {"random"}
    calls = []

    def coin_that_shows_its_other_side_late(x):
        calls.append(1)
        return x if len(calls) <= 6 else x + torch.rand_like(x)

    assert statuses(audit_sample(sample(coin_that_shows_its_other_side_late, point(4)), correct=False, seed=0)) == {
        "random"
    }
    noisy = sample(lambda x: F.layer_norm(F.dropout(x), (6,)), point(2, 6))
    found = audit_sample(noisy, correct=False, seed=0)
    assert found["reverse-over-forward"].status == "wrong"
    assert "seed held" in found["reverse-over-forward"].detail
    assert found["reverse-over-reverse"].status == "random"


@pytest.mark.parametrize(
    ("f", "reason"),
    [(torch.Tensor.half, "16 bits"), (torch.argmax, "no floating-point output"), (torch.ones_like, "constant")],
)
def test_missing_derivative_states_its_reason(f, reason):
    verdicts = audit_sample(sample(f, point(3)), correct=False, seed=0)
    assert statuses(verdicts) == {"not differentiable"}
    assert reason in verdicts[THIRD].detail


def test_correction_that_changes_the_value_is_wrong():
    @hodiff.corrections.register(torch.lerp, reason="for the test")
    def lerp(input, end, weight):
        return input + weight * (end - input) + 1e-3

    try:
        verdicts = audit_sample(sample(torch.lerp, point(3), 1 + point(3), 0.5), correct=True, seed=0)
    finally:
        hodiff.corrections.unregister(torch.lerp)
    assert verdicts[THIRD] == Verdict("wrong", None, "the value is not torch's")


def test_operators_may_write_into_their_arguments():
    x = point(3)
    assert statuses(audit_sample(sample(lambda x: x.mul_(2).sin(), x), correct=False, seed=0)) == {"right"}
    assert torch.equal(x, point(3))


# Many samples, many operators


def test_worst_sample_decides_the_verdict():
    good, bad, kink = (everywhere(v) for v in (Verdict("right", 1e-9), Verdict("wrong", 1.0), Verdict("not smooth")))
    empty = everywhere(Verdict("not differentiable"))
    assert worst([good, bad, empty])[THIRD] == Verdict("wrong", 1.0, "1 of 2 samples")
    assert worst([kink, good])[THIRD].status == "right"
    assert worst([empty])[THIRD].status == "not differentiable"


@pytest.fixture(scope="module")
def table() -> AuditTable:
    names = ["sin", "nn.functional.relu", "bernoulli", "linalg.eigh", "linalg.cholesky", "bfloat16"]
    return audit([*names, "nn.functional.instance_norm"], correct="both", samples=2, jobs=1)


@pytest.mark.slow
def test_audit_of_the_database_has_known_verdicts(table):
    assert table.torch == torch.__version__.split("+")[0]
    for name in ("sin", "nn.functional.relu", "linalg.cholesky"):  # symmetric probing makes cholesky well-posed
        assert all_right_except(table.operators[name]["torch"])
        assert all_right_except(table.operators[name]["corrected"])
    assert statuses(table.operators["bernoulli"]["torch"]) == {"random"}
    assert statuses(table.operators["bfloat16"]["torch"]) == {"not differentiable"}
    eigh = table.operators["linalg.eigh"]["torch"]
    assert {eigh[route].status for route in (*ROUTES[:2], ROUTES[3], THIRD)} == {"right"}
    norm = table.operators["nn.functional.instance_norm"]
    assert norm["torch"]["reverse-over-forward"].status == "wrong"
    assert all_right_except(norm["corrected"])


@pytest.mark.slow
def test_select_operators_matches_parts_of_names():
    worker = Worker()
    found = []
    try:
        assert select_operators("layer_norm", worker.operators) == ["nn.functional.layer_norm"]
        assert select_operators(["std.unbiased", "sin"], worker.operators) == ["std.unbiased", "sin"]
        with pytest.raises(InputError, match=r"no 'lin\.eigh'.*linalg\.eigh"):
            select_operators("lin.eigh", worker.operators)
        # An operator that crashes is retried last, and does not affect the others.
        common = {"correct": False, "count": 1, "seed": 0}
        requests = [{"operator": name, **common} for name in ("no such operator", "sin")]
        serve(worker, requests, jobs=1, limit=100.0, done=lambda request, reply: found.append(reply) or [])
    finally:
        worker.close()
    right, died = found
    assert isinstance(died, DiedError)
    assert right["verdicts"][THIRD]["status"] == "right"


@pytest.mark.slow
def test_time_limit_ends_an_operator():
    found = audit("sin", time_limit=1e-3, jobs=1)
    assert found.operators["sin"]["torch"] == everywhere(Verdict("timed out", None, "took more than 0.001 s"))


def test_missing_operator_database_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal", None)
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_methods_invocations", None)
    with pytest.raises(HodiffError, match="no operator database"):
        database()


@pytest.mark.parametrize("wrong", [{"correct": "maybe"}, {"samples": 0}, {"jobs": -1}, {"time_limit": 0}])
def test_rejects_bad_arguments(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        audit("sin", **wrong)


# Output

MIXED = AuditTable(
    "2.13.0",
    {
        "sin": {"torch": everywhere(Verdict("right", 1.23456e-12))},
        "det": {
            "torch": everywhere(Verdict("right", 1e-9))
            | {THIRD: Verdict("wrong", 0.5), ROUTES[3]: Verdict("raises", None, "no | rule")},
            "corrected": everywhere(Verdict("right", 1e-9)) | {ROUTES[3]: Verdict("raises", None, "no | rule")},
        },
    },
)


def test_json_has_an_entry_per_operator_run_and_route():
    data = json.loads(MIXED.to_json())
    assert data["torch"] == "2.13.0"
    assert data["operators"]["sin"]["torch"]["forward-over-forward"] == {
        "status": "right",
        "error": 1.23e-12,
        "detail": "",
    }
    assert set(data["operators"]["det"]["corrected"]) == {*ROUTES, "third-order reverse"}
    assert AuditTable.from_json(MIXED.to_json()).to_json() == MIXED.to_json()
    for text in ("[", "[]", '{"torch": "2.13.0"}'):
        with pytest.raises(InputError, match="audit's JSON"):
            AuditTable.from_json(text)


def test_markdown_shows_both_runs_side_by_side():
    page = markdown_page(MIXED)
    assert "| `det` | right | right | right | raises | wrong 5e-01 → right |" in page
    assert "| `det` | forward-over-forward | raises: no \\| rule |" in page
    assert "`sin`" not in page
    assert "| forward-over-forward | 0 | 1 | 1 |" in page  # wrong, raises, right


def test_text_lists_defects_of_each_run():
    lines = str(MIXED).splitlines()
    assert lines[1:] == ["torch alone: 1 with a defect: det", "inside hodiff.corrected(): 1 with a defect: det"]


def test_worsened_lists_regressions_only():
    better = AuditTable("2.13.0", {**MIXED.operators, "det": {"torch": everywhere(Verdict("right", 1e-9))}})
    assert better.worsened(MIXED) == []
    worse = MIXED.worsened(better)
    assert len(worse) == 2
    assert "det, torch, third-order reverse: was right, is wrong" in worse


# Committed tables


@pytest.fixture(scope="module")
def saved_audit() -> AuditTable:
    return audit_on_file("2.13")


@pytest.mark.parametrize("version", versions_on_file())
def test_saved_tables_have_both_runs_of_every_operator(version):
    committed = audit_on_file(version)
    assert committed.torch.startswith(f"{version}.")
    assert len(committed.operators) > 600
    for entry in committed.operators.values():
        assert set(entry) == {"torch", "corrected"}
        for verdicts in entry.values():
            assert tuple(verdicts) == AUDITED_ROUTES
            assert all(v.status in STATUSES and not math.isnan(v.error or 0.0) for v in verdicts.values())
    assert committed.operators["nn.functional.layer_norm"]["torch"]["reverse-over-forward"].status == "wrong"


def test_page_matches_the_saved_tables(saved_audit):
    versions = [audit_on_file(version) for version in versions_on_file()]
    assert (ROOT / "docs" / "reference" / "audit.md").read_text(encoding="utf-8") == markdown_page(
        saved_audit, versions, mutated_on_file()
    )


def test_saved_invented_calls_are_not_silently_wrong_when_corrected():
    found = mutated_on_file()
    assert set(found.counts["torch"]) == set(found.counts["corrected"]) >= {"sin", "nn.functional.layer_norm"}
    assert found.total("torch").silent > 50
    assert found.total("corrected").judged > 2000
    assert not found.total("corrected").silent


def test_unaudited_torch_version_uses_the_nearest_older_table(monkeypatch):
    monkeypatch.setattr(torch_verdicts, "versions_on_file", lambda: ["2.9", "2.11", "2.13"])
    monkeypatch.setattr(torch_verdicts, "_read", lambda version: version)
    asked = ["2.8.0", "2.9.1", "2.10.0", "2.11.0+cpu", "2.12.0a0", "2.13.0", "2.20.0", "3.0.0"]
    assert [audit_on_file(each) for each in asked] == ["2.9", "2.9", "2.9", "2.11", "2.11", "2.13", "2.13", "2.13"]


def test_page_lists_defects_by_torch_version():
    wrong = everywhere(Verdict("right", 1e-9)) | {ROUTES[2]: Verdict("wrong", 1.0), ROUTES[3]: Verdict("raises")}
    right = everywhere(Verdict("right", 1e-9))
    tables = [
        AuditTable("2.13.0", {"det": {"torch": wrong}, "old": {"torch": wrong}, "sin": {"torch": right}}),
        AuditTable("2.15.0", {"det": {"torch": right}, "sin": {"torch": right}}),
    ]
    page = markdown_page(tables[0], tables)
    assert "| operator | torch 2.13.0 | torch 2.15.0 |" in page
    assert "| `det` | wrong: rf; raises: ff | right |" in page
    assert "| `old` | wrong: rf; raises: ff | not there |" in page
    assert "| `sin` | right" not in page


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_operator_is_worse_than_saved(saved_audit, part):
    if saved_audit.torch != torch.__version__.split("+")[0]:
        pytest.skip(f"the table is of torch {saved_audit.torch}")
    names = ruled_and_some()
    assert len(names) > 200
    found = audit(names[part::PARTS], correct=True, jobs=1)
    worse = found.worsened(saved_audit)
    assert not worse, "worse than the saved table:\n" + "\n".join(worse)


def test_names_of_the_audits_stay_in_checks():
    assert hodiff.checks.audit is audit
    assert hodiff.checks.mutated_audit is hodiff.audit.mutated_audit
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hodiff.checks.nothing


def test_page_has_the_date_and_no_relative_errors_of_vanishing_derivatives():
    entry = {"torch": everywhere(Verdict("wrong", 3e6)) | {ROUTES[0]: Verdict("wrong", 0.2)}}
    table = AuditTable("2.13.0", {"det": entry}, "2026-11-30")
    assert AuditTable.from_json(table.to_json()) == table
    text = markdown_page(table, [table])
    assert "Date of the data: 2026-11-30." in text
    assert "torch 2.13.0 (2026-11-30)" in text
    assert "| `det` | wrong 2e-01 | wrong (true value ≈ 0) |" in text
    assert "3e+06" not in text


def test_stored_audits_have_dates():
    dates = [audit_on_file(version).date for version in versions_on_file()]
    assert dates == [str(datetime.date.fromisoformat(each)) for each in dates]


def test_only_similar_names_are_suggested():
    with pytest.raises(InputError, match=r"no 'nosuch'. Names are like nn.functional.layer_norm"):
        select_operators("nosuch", ["cosh", "sin"])
    with pytest.raises(InputError, match=r"Did you mean softplus\?"):
        select_operators("sotfplus", ["cosh", "softplus"])
