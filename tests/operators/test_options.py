"""The options that all operators at a point share: in every signature with their defaults, explained once."""

import inspect
import pydoc
from typing import Any

import pytest
import torch

import hodiff
from hodiff.operators import EmpiricalFisherOperator, FisherOperator, GaussNewtonOperator, HessianOperator

CLASSES = [HessianOperator, GaussNewtonOperator, FisherOperator, EmpiricalFisherOperator]
DEFAULTS: dict[str, Any] = {
    "data": None,
    "reduction": "mean",
    "batch_size": None,
    "compile": False,
    "process_group": None,
    "cache": "auto",
    "memory_budget": 2**30,
    "chunk_size": "auto",
    "check_deterministic": True,
    "progress": False,
    "correct": True,
}


def mse(z: Any, y: Any) -> Any:
    return (z - y).square().mean()


def make(cls: Any, **options: Any) -> Any:
    w, x, y = torch.ones(2), torch.ones(3, 2), torch.ones(3)
    if cls is HessianOperator:
        return cls(lambda w, x, y: mse(x @ w, y), w, x, y, **options)
    return cls(lambda w, x: x @ w, torch.nn.functional.mse_loss, w, x, y, **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_signatures_name_every_option_with_its_default(cls: Any) -> None:
    named = {each.name: each for each in inspect.signature(cls).parameters.values() if each.kind is each.KEYWORD_ONLY}
    assert {name: named[name].default for name in DEFAULTS} == DEFAULTS
    assert all(named[name].annotation is not inspect.Parameter.empty for name in DEFAULTS)
    assert not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(cls).parameters.values())
    assert "check_deterministic: bool = True" in pydoc.render_doc(cls)


def test_every_option_is_explained_once() -> None:
    assert [name for name in DEFAULTS if f"\n    {name}: " not in (inspect.getdoc(HessianOperator) or "")] == []


@pytest.mark.parametrize("cls", CLASSES)
def test_the_defaults_shown_are_those_that_apply(cls: Any) -> None:
    A = make(cls)
    assert (A.cache, A.memory_budget, A.chunk_size, A.correct) == ("auto", 2**30, "auto", True)
    assert (A.batches.data, A.batches.reduction, A.process_group) == (None, "mean", None)
    assert make(cls, memory_budget=7).memory_budget == 7


@pytest.mark.parametrize("cls", CLASSES)
def test_an_unknown_option_is_refused_with_the_nearest(cls: Any) -> None:
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(\) got an unexpected .* 'bach_size'; .* 'batch_size'"):
        make(cls, bach_size=len)
    with pytest.raises(TypeError, match=r"'zzz'; it takes .*chunk_size"):
        make(cls, zzz=1)
    with pytest.raises(hodiff.InputError, match="cache: expected one of True, False, 'auto'"):
        make(cls, cache="no")
