"""A character GPT's Hessian against attention in primitives, and a short run."""

import re
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from plain_attention import plain_attention
from torch import Tensor

from hodiff.estimators import eigsh


@pytest.fixture
def problem(example: ModuleType) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    model = example.GPT(24, 8).double()
    return model, example.draw_text(example.load_text(), 2, 24, torch.Generator().manual_seed(0))


def test_gradient_and_product_match_primitives(
    example: ModuleType, problem: tuple[torch.nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, excerpts = problem
    parameters = list(model.parameters())
    v = [torch.randn_like(each) for each in parameters]
    A = example.hessian(model, excerpts)
    found = A @ torch.cat([each.flatten() for each in v])
    slopes = torch.autograd.grad(example.loss(model, dict(model.named_parameters()), excerpts), parameters)
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    value = example.loss(model, dict(model.named_parameters()), excerpts)
    right = torch.autograd.grad(value, parameters, create_graph=True)
    product = torch.autograd.grad(right, parameters, v)
    torch.testing.assert_close(slopes, right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, torch.cat([each.flatten() for each in product]), rtol=1e-10, atol=1e-10)


def test_math_attention_gives_the_same_hessian(example: ModuleType, problem: tuple[torch.nn.Module, Tensor]) -> None:
    A, other = (example.hessian(*problem, way) for way in ("hodiff", "math path"))
    v = torch.randn(A.shape[1], dtype=torch.float64)
    torch.testing.assert_close(A @ v, other @ v, rtol=1e-10, atol=1e-10)


def test_attention_is_causal(example: ModuleType, problem: tuple[torch.nn.Module, Tensor]) -> None:
    model, excerpts = problem
    changed = excerpts.clone()
    changed[:, 12:] = 1
    same = (model(excerpts[:, :-1]) == model(changed[:, :-1])).all(-1)
    assert same[:, :12].all()
    assert not same[:, 12:].any()


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
@pytest.mark.slow
def test_quick_run_prints_and_saves_results(example: ModuleType, run: Callable[..., str]) -> None:
    text = run(example.main, "--quick")
    rows = {
        moment: [float(each) for each in numbers.split()]
        for moment, numbers in re.findall(r"^(before|after) training +(.*)$", text, re.MULTILINE)
    }
    for values in rows.values():
        assert values[1] < 0 < values[2] <= values[3] <= values[4]
    assert rows["after"][0] < rows["before"][0] - 0.3
    costs = [[float(each) for each in line.split()] for line in re.findall(r"^ +\d+ .*$", text, re.MULTILINE)]
    assert [row[0] for row in costs] == [64, 256]
    assert costs[-1][1] < costs[-1][2]


@pytest.mark.slow
def test_eigenvalues_match_the_dense_hessian(example: ModuleType) -> None:
    torch.manual_seed(1)
    model = example.GPT(8, 4, heads=2, layers=1).double()
    A = example.hessian(model, example.draw_text(example.load_text(), 1, 8, torch.Generator().manual_seed(0)))
    dense = torch.linalg.eigvalsh(A.to_dense())
    found = eigsh(A, 3, which="LA", method="lanczos", tol=1e-6).eigenvalues
    torch.testing.assert_close(found, dense[-3:], rtol=1e-5, atol=1e-6)
