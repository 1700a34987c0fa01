"""All operators at a point share their options: in every signature, with the same defaults, documented once."""

import inspect
import pydoc
import typing
from typing import Any

import numpy as np
import pytest
import torch

import hodiff
from hodiff.operators import EmpiricalFisherOperator, FisherOperator, GaussNewtonOperator, HessianOperator

CLASSES = [HessianOperator, GaussNewtonOperator, FisherOperator, EmpiricalFisherOperator]


def defaults_of(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


SHARED = defaults_of(HessianOperator).keys() & defaults_of(EmpiricalFisherOperator).keys()


def mse(z: Any, y: Any) -> Any:
    return (z - y).square().mean()


def make(cls: Any, **options: Any) -> Any:
    w, x, y = torch.ones(2), torch.ones(3, 2), torch.ones(3)
    if cls is HessianOperator:
        return cls(lambda w, x, y: mse(x @ w, y), w, x, y, **options)
    return cls(lambda w, x: x @ w, torch.nn.functional.mse_loss, w, x, y, **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_signatures_have_the_same_defaults(cls: Any) -> None:
    assert {name: defaults_of(cls)[name] for name in SHARED} == {name: defaults_of(CLASSES[0])[name] for name in SHARED}
    assert "check_deterministic: 'bool' = True" in pydoc.render_doc(cls)


@pytest.mark.parametrize("cls", CLASSES)
def test_docstrings_explain_every_option(cls: Any) -> None:
    text = inspect.getdoc(cls) or ""
    named = defaults_of(cls)
    assert {name: text.count(f"\n    {name}: ") for name in named} == dict.fromkeys(named, 1)
    assert "**options" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "\n    memory_budget: Memory for kept linearizations in bytes, 1 GiB by default; " in text


@pytest.mark.parametrize("cls", CLASSES)
def test_documented_defaults_apply(cls: Any) -> None:
    A = make(cls)
    assert (A.cache, A.memory_budget, A.chunk_size, A.correct) == ("auto", 2**30, "auto", True)
    assert (A.batches.data, A.batches.reduction, A.process_group) == (None, "mean", None)
    assert make(cls, memory_budget=7).memory_budget == 7


@pytest.mark.parametrize("cls", CLASSES)
def test_rejects_unknown_options(cls: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bach_size'"):
        make(cls, bach_size=len)
    with pytest.raises(hodiff.InputError, match="cache: expected one of True, False, 'auto'"):
        make(cls, cache="no")


NO_SUCH: dict[str, list[Any]] = {
    "data": [3, iter([]), torch.ones(3, 2), np.ones((3, 2)), (torch.ones(3, 2), torch.ones(3)), {"x": torch.ones(3)}],
    "reduction": ["max", 1],
    "batch_size": [3, "all"],
    "compile": ["yes", 1],
    "process_group": ["world"],
    "cache": ["no", None],
    "memory_budget": ["1G", -1, 1.5, True],
    "chunk_size": [0, 2.0, "all", True],
    "check_deterministic": ["no", 0],
    "randomness": ["same", 1],
    "progress": ["yes", None],
    "correct": ["no", torch.tensor(False)],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_SUCH.items() for value in values])
@pytest.mark.parametrize("cls", CLASSES)
def test_operator_rejects_bad_options(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(hodiff.InputError, match=rf"^{cls.__name__}: {name}\b.*(expected|must)"):
        make(cls, **{name: value})


def test_every_option_is_tested_with_a_bad_value() -> None:
    assert set(NO_SUCH) == SHARED


@pytest.mark.parametrize("cls", CLASSES)
def test_numpy_numbers_and_booleans_are_accepted(cls: Any) -> None:
    plain, v = make(cls), torch.eye(2)
    numpy = {"memory_budget": np.int64(2**20), "chunk_size": np.int32(1), "progress": np.bool_(False)}
    A = make(cls, **numpy, correct=np.True_, cache=np.True_, check_deterministic=np.False_)
    torch.testing.assert_close(A @ v, plain @ v)


# Switches of other functions are in `tests/test_wrong_arguments.py`.
@pytest.mark.parametrize("name", ["vmap", "compile", "scipy", "approximate"])
def test_check_rejects_bad_switches(name: str) -> None:
    with pytest.raises(hodiff.InputError, match=rf"^check: {name}: expected True or False, got 3"):
        hodiff.check(torch.exp, torch.ones(2), **{name: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "owner", [hodiff.HessianOperator, hodiff.GaussNewtonOperator, hodiff.FisherOperator, hodiff.meta.MAML]
)
def test_type_hints_can_be_evaluated(owner):
    shown = {name for name in inspect.signature(owner).parameters if name != "args"}
    assert shown <= set(typing.get_type_hints(owner.__init__))
