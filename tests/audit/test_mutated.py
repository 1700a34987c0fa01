"""The audit of invented samples, on operators with a known fault at special arguments and on torch's operators."""

import contextlib
import io
import math
import random
from types import SimpleNamespace

import pytest
import torch
from audit.chosen import ruled_and_some
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hodiff.__main__ import main
from hodiff.audit import MutatedAudit, audit_command, mutated_audit
from hodiff.audit.mutated.case import judge_case
from hodiff.audit.mutated.mutated_audit import Count
from hodiff.audit.mutated.mutated_operator import audit_changed, script_of
from hodiff.audit.page import markdown_page
from hodiff.audit.samples import samples
from hodiff.audit.shrinking import shrink
from hodiff.checks.mutations.changes import CHANGES, changed
from hodiff.checks.mutations.sample import Layout, Sample
from hodiff.checks.torch_verdicts import AuditTable
from hodiff.errors import InputError


def matrix(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.5


def sample(call, *args, **kwargs) -> Sample:
    leaves, structure = tree_flatten((args[0], args[1:], kwargs))
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return Sample(lambda first, rest, named: call(first, *rest, **named), tuple(leaves), structure, places)


def operator(call, *args, **kwargs):
    """Return an entry like those of torch's operator database, with one sample."""
    inputs = SimpleNamespace(
        input=args[0].requires_grad_(), args=args[1:], kwargs=kwargs, output_process_fn_grad=lambda x: x
    )
    return SimpleNamespace(
        op=call,
        name="example",
        aten_name="example",
        variant_test_name="",
        gradcheck_wrapper=lambda op, *args, **kwargs: op(*args, **kwargs),
        sample_inputs=lambda *_, **__: [inputs],
    )


def cubic_with_a_hole(x: Tensor) -> Tensor:
    """x^3, whose derivative by autograd is 1 at x = 0."""
    return torch.where(x == 0, x, x**3)


# Changes of a sample

MATRIX, INDEX = matrix(4, 4), torch.tensor([0, 1, 2, 3])
BASE = sample(torch.add, MATRIX, matrix(4, 4), alpha=2.5)

# Condition that the changed first argument meets
HOLDS = {
    "batched": lambda x: x.shape == (2, 4, 4) and not torch.equal(x[0], x[1]),
    "size 1": lambda x: sorted(x.shape) == [1, 4],
    "size 1 everywhere": lambda x: x.shape == (1, 1),
    "empty": lambda x: sorted(x.shape) == [0, 4],
    "empty everywhere": lambda x: x.shape == (0, 0),
    "a zero": lambda x: int((x == 0).sum()) == 1,
    "zeros": lambda x: not x.any(),
    "a slice of zeros": lambda x: int((x == 0).sum()) == 4,
    "a tie": lambda x: len(x.unique()) == 15,
    "equal slices": lambda x: len(x.unique()) == 12,
    "constant": lambda x: len(x.unique()) == 1,
    "integers": lambda x: torch.equal(x, x.round()),
    "negative": lambda x: bool((x < 0).all()),
    "large": lambda x: float(x.min()) > 1e3,
    "small": lambda x: float(x.max()) < 1e-3,
    "one huge": lambda x: int((x > 1e5).sum()) == 1,
    "subnormal": lambda x: bool((x < 1e-308).all() and x.all()),
    "near singular": lambda x: abs(float(torch.linalg.cond(x)) - 1e3) < 1.0,
    "close eigenvalues": lambda x: float(torch.linalg.eigvalsh(x).diff().min()) < 0.1,
}


@pytest.mark.parametrize("name", HOLDS)
def test_change_of_the_first_argument_holds(name):
    found = CHANGES[name](BASE, 0, random.Random(0))
    assert HOLDS[name](found.leaves[0])
    assert torch.equal(BASE.leaves[0], MATRIX)  # the base is unchanged
    if "everywhere" not in name:
        assert torch.equal(found.leaves[1], BASE.leaves[1])


@pytest.mark.parametrize("name", ["transposed", "sliced", "channels last", "expanded"])
def test_layout_changes_keep_the_values(name):
    image = sample(lambda x: seen.append(x) or x * 2, matrix(2, 3, 4, 4))
    seen: list[Tensor] = []
    found = CHANGES[name](image, 0, random.Random(0))
    (value,) = found.function(correct=False)(*found.point)
    (argument,) = seen
    assert argument.shape == (2, 3, 4, 4)
    assert not argument.is_contiguous()
    assert torch.equal(value, 2 * argument)
    if name != "expanded":
        assert torch.equal(argument, image.leaves[0])


def test_changes_of_indices_options_keywords_and_dtype_hold():
    draw = random.Random(0)
    index = sample(torch.index_select, MATRIX, 0, INDEX)
    assert len(CHANGES["a repeated index"](index, 2, draw).leaves[2].unique()) == 3
    assert CHANGES["a repeated index"](index, 0, draw) is None
    assert CHANGES["another option"](BASE, 2, draw).leaves[2] != 2.5
    named = CHANGES["keywords"](Sample(**{**vars(index), "parameters": ("input", "dim", "index")}), 0, draw)
    assert torch.equal(named.function(correct=False)(*named.point)[0], MATRIX)
    assert [leaf.dtype for leaf in CHANGES["float32"](BASE, 0, draw).leaves[:2]] == [torch.float32] * 2


def test_seed_determines_the_changes():
    first, again, other = ([name for name, _ in changed(BASE, seed)] for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert set(first) <= set(CHANGES)


# Judging a case


def test_right_operator_has_no_defect():
    assert judge_case(sample(torch.sin, matrix(2)), correct=True, seed=0) == []
    assert judge_case(CHANGES["float32"](sample(torch.sin, matrix(2)), 0, random.Random(0)), correct=True, seed=0) == []


def test_fault_at_zero_is_found():
    hole = sample(cubic_with_a_hole, torch.tensor([0.0, 1.0], dtype=torch.float64))
    defects = judge_case(hole, correct=False, seed=0)
    assert {(each.order, each.status) for each in defects} == {(1, "wrong")}
    assert all(each.is_silent for each in defects)
    assert judge_case(sample(cubic_with_a_hole, matrix(2)), correct=False, seed=0) == []


@pytest.mark.parametrize("f", [torch.abs, torch.sqrt, lambda x: x.abs() ** 1.3], ids=["abs", "sqrt", "power 1.3"])
def test_unsettled_differences_are_not_judged(f):
    assert not judge_case(sample(f, torch.zeros(2, dtype=torch.float64)), correct=False, seed=0)


# Differences converge at these points, but not to a linear map: a median, a jump and a pole.
NOWHERE = {
    "middle": lambda x: x.sort().values[1],
    "jump": lambda x: torch.where(x == 0, 0.0, x * x / (x * x).sum()),
    "pole": lambda x: 1 / x**2,
}


@pytest.mark.parametrize("name", NOWHERE)
def test_missing_derivatives_are_not_judged(name):
    assert not judge_case(sample(NOWHERE[name], torch.zeros(3, dtype=torch.float64)), correct=False, seed=0)


def test_expanded_arguments_are_judged_as_separate_elements():
    """The nuclear norm is smooth as a function of one expanded number, but not of nine numbers."""
    one = sample(torch.linalg.matrix_norm, torch.tensor([[2.0]], dtype=torch.float64), "nuc")
    spread = Sample(**{**vars(one), "layouts": {0: Layout(lambda x: x.expand(3, 3), "{0}.expand(3, 3)")}})
    assert not judge_case(spread, correct=False, seed=0)


def test_random_draws_are_constants():
    def drawn(x: Tensor) -> Tensor:
        return torch.normal(x, 1.0)

    assert not judge_case(sample(drawn, matrix(3)), correct=False, seed=0)
    masked = sample(lambda x: torch.nn.functional.dropout(x), matrix(3))
    assert judge_case(masked, correct=False, seed=0) == []
    assert judge_case(CHANGES["float32"](masked, 0, random.Random(0)), correct=False, seed=0) is None


def test_calls_that_torch_rejects_are_not_judged():
    assert judge_case(sample(torch.mm, MATRIX, matrix(3, 2)), correct=True, seed=0) is None
    assert judge_case(sample(torch.argmax, MATRIX), correct=True, seed=0) is None


def test_rounding_of_vanishing_derivatives_is_no_defect():
    def vanishing(x: Tensor, slope: float) -> Tensor:
        return (x - x.detach()) * slope

    assert judge_case(sample(vanishing, matrix(2), 1e-11), correct=False, seed=0) == []
    assert judge_case(sample(vanishing, matrix(2), 1e-3), correct=False, seed=0)


# Audit of one operator


def test_findings_are_shrunk():
    x = torch.tensor([[0.0, 0.7], [0.8, 1.0]], dtype=torch.float64)
    reply = audit_changed("example", operator(cubic_with_a_hole, x), correct=False, cases=3, seed=0)
    assert reply["judged"] == 3
    assert reply["silent"] > 0
    assert not reply["raising"]
    assert all(each["defect"]["order"] == 1 for each in reply["findings"])
    assert any("torch.tensor([[0.0]], dtype=torch.float64)" in each["script"] for each in reply["findings"])


@pytest.mark.slow
def test_script_reproduces_the_finding():
    layer_norm = operator(torch.nn.functional.layer_norm, matrix(2, 3), (3,))
    (base,) = samples("nn.functional.layer_norm", layer_norm, 1)
    script = script_of("nn.functional.layer_norm", layer_norm, base, correct=False)
    assert "    return torch.nn.functional.layer_norm(x0, (3,))" in script
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "script", "exec"), {})
    assert "HD406" in printed.getvalue()


def test_shrinking_keeps_the_failure():
    start = sample(torch.add, matrix(5, 6), matrix(5, 6))
    smallest = shrink(start, lambda each: float(each.leaves[0].sum()) > 0.4)
    assert [tuple(leaf.shape) for leaf in smallest.leaves[:2]] == [(1, 1), (1, 1)]
    assert len(smallest.places) == 1
    assert shrink(start, lambda each: False) is start


# Audit of all operators

AUDIT = MutatedAudit(
    "2.13.0",
    7,
    {"torch": {"sin": Count(3), "bad": Count(2, 1)}, "corrected": {"sin": Count(), "bad": Count(lost="took long")}},
    (),
)


def test_json_round_trips_and_text_lists_findings():
    assert MutatedAudit.from_json(AUDIT.to_json()) == AUDIT
    assert str(AUDIT).splitlines() == [
        "invented calls of operators of torch 2.13.0, seed 7",
        "torch alone: 5 calls, 1 silently wrong, 0 raise: bad",
        "inside hodiff.corrected(): 0 calls, 0 silently wrong, 0 raise; 1 operator given up",
    ]
    with pytest.raises(InputError, match="JSON"):
        MutatedAudit.from_json("[]")


def test_page_counts_invented_calls():
    page = markdown_page(AuditTable("2.13.0", {}), (), AUDIT)
    assert "torch 2.13.0, seed 7:" in page
    assert "| torch alone | 5 | 1 | 0 | none given up |" in page
    assert "| inside hodiff.corrected() | 0 | 0 | 0 | 1 operator given up |" in page
    assert "| `bad` | 1 of 2 | took long |" in page
    assert "| `sin` |" not in page


@pytest.mark.parametrize(
    "wrong", [{"correct": "maybe"}, {"cases": 0}, {"jobs": 0}, {"seed": -1}, {"time_limit": math.nan}]
)
def test_rejects_bad_arguments(wrong):
    with pytest.raises(InputError, match=f"mutated_audit: {next(iter(wrong))}"):
        mutated_audit("sin", **wrong)


def test_command_passes_options(monkeypatch, capsys, tmp_path):
    asked = {}
    monkeypatch.setattr(audit_command, "mutated_audit", lambda names, **options: asked.update(options) or AUDIT)
    written = tmp_path / "found.json"
    assert main(["audit", "--mutate", "--cases", "9", "--seed", "3", "--corrected", "--json", str(written)]) == 0
    assert (asked["cases"], asked["seed"], asked["correct"]) == (9, 3, True)
    assert "5 calls, 1 silently wrong" in capsys.readouterr().out
    assert MutatedAudit.from_json(written.read_text()) == AUDIT


@pytest.mark.slow
def test_several_processes_match_one():
    found = mutated_audit(["sin", "nn.functional.layer_norm"], correct="both", cases=4, jobs=2)
    assert found.total("torch").judged == found.total("corrected").judged == 8
    assert found.counts["torch"]["nn.functional.layer_norm"].silent
    assert not found.silent


@pytest.mark.slow
def test_corrected_operators_are_not_silently_wrong():
    """The invented calls are the same in every run."""
    found = mutated_audit(ruled_and_some(), cases=2)
    assert found.total("corrected").judged > 270
    assert not found.silent, str(found)
