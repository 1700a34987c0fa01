"""Tests of torch's own operators in Taylor mode: the stored audit, a partial rerun, and verdicts on faulty rules."""

import argparse
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from custom_functions import custom
from taylor.routes import curves

from hodiff.audit.audit_command import add_audit
from hodiff.audit.jets.jet_audit import JetAudit, jet_audit, jets_on_file
from hodiff.audit.jets.jet_operator import judge_curves
from hodiff.audit.jets.jet_page import jet_page
from hodiff.audit.jets.verdict import STATUSES, JetVerdict, merged
from hodiff.audit.samples import database
from hodiff.errors import InputError
from hodiff.taylor import register
from hodiff.taylor.registry import RULES

ROOT = Path(__file__).resolve().parents[2]
D = torch.float64
X = torch.tensor([0.3, -0.4, 0.9], dtype=D)
# The slow test takes every n-th operator to the fifth order, and all to the third: rules are loops over the orders, and
# the tests of elementwise functions go to the tenth.
ONE_IN = 20


def test_page_matches_the_saved_table():
    found = jets_on_file()
    assert found.order == 5
    assert not found.defects
    assert found.counts["right"] > 500
    page = ROOT / "docs" / "reference" / "audit_jets.md"
    assert page.read_text(encoding="utf-8") == jet_page(found)
    assert JetAudit.from_json(found.to_json()) == found


@pytest.mark.slow
def test_audit_of_three_operators_is_right():
    found = jet_audit(["sin", "matmul", "nn.functional.softplus"], order=3, samples=1, jobs=1)
    assert set(found.operators) == {"sin", "matmul", "nn.functional.softplus"}
    for name, verdict in found.operators.items():
        assert verdict.status == "right", (name, verdict)
        assert set(verdict.nested) == {"0", "1", "2", "3"}
        assert max(verdict.nested.values()) < 1e-13
        assert max(verdict.values.values()) < 1e-7
        assert max(verdict.collapsed.values()) < 1e-13
        assert not verdict.without_rule


def verdict_with_rule(rule, f=torch.special.bessel_j1):
    """Return the verdict on a function of torch with the given rule."""
    kept = RULES.get(f)
    register(f)(rule)
    try:
        return judge_curves(curves(f, (X,), 3))
    finally:
        del RULES[f]
        if kept is not None:
            RULES[f] = kept


def test_wrong_rule_disagrees_with_both_oracles():
    verdict = verdict_with_rule(lambda x: torch.sin(x + math.pi / 2) + 1e-3 * (1 + x) ** 3, torch.cos)
    assert verdict.status == "off"
    assert verdict.detail == "values say otherwise at order 0, 1, 2, 3"
    assert min(verdict.nested.values()) > 1e-5
    assert min(verdict.values.values()) > 1e-5


def test_fault_shared_with_forward_mode_is_found_by_values():
    """Interpolation detects a wrong derivative that torch and nested forward mode share."""

    def slope(ctx, vector):
        return 1.01 * vector * ctx.saved_tensors[0].cos()

    Shared = custom("Shared", lambda x: x.sin(), slope, slope)

    verdict = judge_curves(curves(Shared.apply, (X,), 2))
    assert max(verdict.nested.values()) < 1e-12
    assert (verdict.status, verdict.detail) == ("off", "values say otherwise at order 1, 2")


def test_wrong_collapsed_coefficient_is_found():
    """A rule that is wrong only for the collapsed coefficient is detected."""

    def rule(x):
        found = x * 1
        frame = found.frame
        if frame.collapsed and found.coefficients[frame.order] is not None:
            found.write([*found.coefficients[:-1], 1.1 * found.coefficients[-1]])
        return found

    verdict = verdict_with_rule(rule, torch.clone)
    assert verdict.status == "off"
    assert "are not the sum of plain ones" in verdict.detail


def test_other_verdicts_match():
    assert judge_curves(curves(lambda x: x.relu(), (0 * X,), 2)).status == "right"
    assert judge_curves(curves(lambda x: x > 0, (X,), 2)).status == "not differentiable"
    refused = judge_curves(curves(lambda x: x * float(x[0]), (X,), 2))
    assert (refused.status, refused.is_defect) == ("refused", False)
    assert refused.detail.startswith("InputError: jet: float() would lose the derivatives")
    assert judge_curves(curves(lambda x: torch.normal(x, 1 + x * x), (X,), 1)).status == "random"
    dropped = judge_curves(curves(lambda x: torch.nn.functional.dropout(x * x), (X,), 2))
    assert (dropped.status, dropped.detail) == ("right", "")
    nested = judge_curves(curves(torch.special.i0, (X,), 2))
    assert (nested.status, nested.without_rule) == ("right", ("special.i0",))


def test_worst_sample_decides_the_verdict():
    one = JetVerdict("right", nested={"1": 1e-16}, without_rule=("a",))
    two = JetVerdict("off", "why", nested={"1": 1e-3, "2": 0.1}, without_rule=("b",))
    both = merged([one, two])
    assert (both.status, both.detail) == ("off", "why")
    assert (both.nested, both.without_rule) == ({"1": 1e-3, "2": 0.1}, ("a", "b"))
    assert {one.status, two.status} <= set(STATUSES)


def test_rejects_bad_options():
    for options, words in (
        ({"order": 6}, "jet_audit: order: expected 1 to 5"),
        ({"samples": 0}, "samples: expected an int"),
        ({"seed": -1}, "seed: expected an int"),
        ({"time_limit": 0.0}, "time_limit"),
    ):
        with pytest.raises(InputError, match=words):
            jet_audit("sin", **options)
    with pytest.raises(InputError, match=r"JetAudit.from_json: text: expected JSON of such an audit"):
        JetAudit.from_json("{}")


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_audit(parser.add_subparsers())
    return parser.parse_args(["audit", *arguments])


def test_command_passes_options_and_sets_the_exit_status(monkeypatch, tmp_path, capsys):
    asked = {}
    bad = JetAudit("2.13.0", 5, {"sin": JetVerdict("off", "values say otherwise at order 2")})

    def instead(operators, **options):
        asked.update(options, operators=operators)
        return bad

    monkeypatch.setattr("hodiff.audit.audit_command.jet_audit", instead)
    options = parsed("--jets", "--op", "sin", "--order", "4", "--json", str(tmp_path / "a.json"))
    assert options.run(options) == 1
    assert (asked["operators"], asked["order"], asked["samples"]) == (["sin"], 4, 2)
    assert "| `sin` | off | values say otherwise at order 2 |" in capsys.readouterr().out
    assert JetAudit.from_json((tmp_path / "a.json").read_text()) == bad
    assert str(bad).splitlines()[1] == "sin: off: values say otherwise at order 2"
    options = parsed("--jets", "--on-file")
    assert options.run(options) == 0
    assert capsys.readouterr().out == jet_page(jets_on_file())


@pytest.mark.slow
@pytest.mark.parametrize("order", [3, 5])
def test_no_operator_has_a_defect(order):
    names = list(database())[:: ONE_IN if order == 5 else 1]
    found = jet_audit(names, order=order)
    assert not found.defects, str(found)
    assert found.counts["right"] > (500 if order == 3 else 22)
    kept = jets_on_file().operators
    worse = [name for name, each in found.operators.items() if kept[name].status == "right" != each.status]
    assert not worse, [(name, dataclasses.asdict(found.operators[name])) for name in worse]
