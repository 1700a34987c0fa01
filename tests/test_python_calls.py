"""The number of Python calls of small computations: most of their time, and the same on every machine."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions.catalogue import CASES, FunctionCase

import hodiff


def python_calls(run: Callable[[], Any]) -> int:
    """Count the Python functions, generators and comprehensions that a later call of `run` enters."""
    for _ in range(5):  # first calls fill caches
        run()
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count - 1


@pytest.fixture
def point() -> torch.Tensor:
    return torch.linspace(-1, 2, 10)


def cubes(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


def test_products_make_few_python_calls(point):
    operator = hodiff.HessianOperator(cubes, point)
    assert python_calls(lambda: hodiff.hvp(cubes, point, point)) <= 190
    assert python_calls(lambda: hodiff.value_grad_hvp(cubes, point, point)) <= 212
    assert python_calls(lambda: operator @ point) <= 92


# Runs of a torch function within corrected().
CORRECTED = {
    "without a rule": (lambda x: x.sin(), 8),
    "layer_norm": (lambda x: F.layer_norm(x, (10,)), 60),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_calls_make_few_python_calls(point, name):
    function, most = CORRECTED[name]
    x = point.requires_grad_()
    with hodiff.corrected():
        assert python_calls(lambda: function(x)) <= most


# These run a user's function, which costs calls of its own, and what closes over it is found anew each time.
OF_FUNCTIONS = ("flex_attention", "checkpoint", "hvp_function", "straight_through", "numpy_function")
MORE = {"packed_attention": 240, "cross_entropy-gradient": 150}


@pytest.mark.parametrize(
    "case", [each for each in CASES if not each.name.startswith(OF_FUNCTIONS)], ids=lambda c: c.name
)
def test_functions_make_few_python_calls(case: FunctionCase):
    inputs = case.inputs(torch.float32, torch.Generator().manual_seed(0))
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            each.requires_grad_()
    assert python_calls(lambda: case.function(*inputs)) <= MORE.get(case.name, 125)
