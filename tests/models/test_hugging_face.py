"""Hessian-vector products of Hugging Face models are correct, even if torch's are wrong or raise."""

import pytest
from models.hugging_face import Row, built, measured, page
from models.measures import Case
from models.specimen import Architecture

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attention", "by_torch"),
    [
        ("albert", "eager", ["right", "right", "wrong"]),
        ("bart", "sdpa", ["raises", "raises", "raises"]),
        ("convnext", "eager", ["right", "right", "wrong"]),
    ],
)
def test_products_are_right(kind, attention, by_torch):
    pytest.importorskip("transformers")
    with silence_torch_warnings():
        row = measured(kind, attention)
    assert {row.outcome(each) for each in row.hodiff.values()} == {"right"}, row
    assert [row.outcome(each) for each in row.torch.values()] == by_torch, row


@pytest.mark.slow
def test_backward_with_a_saved_factor_is_rejected():
    """YOSO's attention saves a power that depends on its arguments, and its backward ignores the dependence."""
    pytest.importorskip("transformers")
    case = Case(Architecture("yoso", lambda: built("yoso", "eager")))
    with (
        silence_torch_warnings(),
        pytest.raises(hodiff.RouteError, match=r"YosoCumulation\.backward .* a part of its"),
    ):
        hodiff.hvp(case.loss, case.parameters, case.direction)


def test_page_counts_right_wrong_and_raising_products():
    row = Row("bert", "eager", False, {"a": 1e-9, "b": 1e-5, "c": "no"}, {"by torch": 0.5}, "")
    text = page([row, row])
    assert "Of hodiff's 6 products, 2 are right, 2 are wrong, and 2 raise an error." in text
    assert "| bert | eager | 1 right, 1 wrong, 1 raises | 1e-05 | wrong |" in text
    assert "| right / wrong / raises | | | | 0 / 2 / 0 |" in text
