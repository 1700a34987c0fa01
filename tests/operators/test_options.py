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
    assert "check_deterministic: 'bool' = True" in pydoc.render_doc(cls)


@pytest.mark.parametrize("cls", CLASSES)
def test_docstrings_explain_every_option(cls: Any) -> None:
    text = inspect.getdoc(cls) or ""
    named = [name for name, each in inspect.signature(cls).parameters.items() if each.kind is each.KEYWORD_ONLY]
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
    "data": [3, iter([])],
    "reduction": ["max", 1],
    "batch_size": [3, "all"],
    "compile": ["yes", 1],
    "process_group": ["world"],
    "cache": ["no", None],
    "memory_budget": ["1G", -1, 1.5, True],
    "chunk_size": [0, 2.0, "all", True],
    "check_deterministic": ["no", 0],
    "progress": ["yes", None],
    "correct": ["no", torch.tensor(False)],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_SUCH.items() for value in values])
@pytest.mark.parametrize("cls", CLASSES)
def test_operator_rejects_bad_options(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(hodiff.InputError, match=rf"^{cls.__name__}: {name}\b.*(expected|must)"):
        make(cls, **{name: value})


def test_every_option_is_tested_with_a_bad_value() -> None:
    assert set(NO_SUCH) == set(DEFAULTS)


@pytest.mark.parametrize("cls", CLASSES)
def test_numpy_numbers_and_booleans_are_accepted(cls: Any) -> None:
    plain, v = make(cls), torch.eye(2)
    numpy = {"memory_budget": np.int64(2**20), "chunk_size": np.int32(1), "progress": np.bool_(False)}
    A = make(cls, **numpy, correct=np.True_, cache=np.True_, check_deterministic=np.False_)
    torch.testing.assert_close(A @ v, plain @ v)


SWITCHES = {
    "hvp": lambda **given: hodiff.hvp(torch.sum, torch.ones(2), torch.ones(2), **given),
    "hessian": lambda **given: hodiff.hessian(torch.sum, **given)(torch.ones(2)),
    "jacobian": lambda **given: hodiff.jacobian(torch.exp, **given)(torch.ones(2)),
    "hessian_diagonal": lambda **given: hodiff.hessian_diagonal(torch.sum, **given)(torch.ones(2)),
    "directional_derivatives": lambda **given: hodiff.directional_derivatives(
        torch.sum, torch.ones(2), torch.ones(2), order=1, **given
    ),
    "check": lambda **given: hodiff.check(torch.exp, torch.ones(2), **given),
}
NAMED = {
    "hvp": ["correct", "has_aux"],
    "hessian": ["correct", "has_aux", "progress"],
    "jacobian": ["correct", "has_aux", "progress"],
    "hessian_diagonal": ["correct", "has_aux", "progress"],
    "directional_derivatives": ["correct"],
    "check": ["vmap", "compile", "scipy", "approximate"],
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function in NAMED for name in NAMED[function]])
def test_functions_reject_bad_switches(function: str, name: str) -> None:
    with pytest.raises(hodiff.InputError, match=rf"^{function}: {name}: expected True or False, got 3"):
        SWITCHES[function](**{name: 3})


@pytest.mark.parametrize(
    "owner", [hodiff.HessianOperator, hodiff.GaussNewtonOperator, hodiff.FisherOperator, hodiff.meta.MAML]
)
def test_type_hints_can_be_evaluated(owner):
    shown = {name for name in inspect.signature(owner).parameters if name != "args"}
    assert shown <= set(typing.get_type_hints(owner.__init__))
