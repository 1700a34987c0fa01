"""The number of Python calls of small computations: most of their time, and the same on every machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

# Most calls of each computation; of all Functions that are not named, and do not run a user's function, ALLOWED.
MOST = {
    "hvp": 144,
    "value_grad_hvp": 159,
    "HessianOperator @ v": 44,
    "corrected: without a rule": 4,
    "corrected: layer_norm": 47,
    "corrected: tanh": 17,
    "corrected: cross_entropy": 32,
    "attention": 86,
    "packed_attention": 203,
    "cross_entropy": 33,
    "cross_entropy-gradient": 75,
}
ALLOWED = 95
RUN_FUNCTIONS_OF_USERS = ("flex_attention", "checkpoint", "hvp_function", "straight_through", "numpy_function")


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


def counted() -> dict[str, int]:
    from functions.catalogue import CASES

    import hodiff

    def cubes(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum()

    x = torch.linspace(-1, 2, 10)
    operator = hodiff.HessianOperator(cubes, x)
    found = {
        "hvp": python_calls(lambda: hodiff.hvp(cubes, x, x)),
        "value_grad_hvp": python_calls(lambda: hodiff.value_grad_hvp(cubes, x, x)),
        "HessianOperator @ v": python_calls(lambda: operator @ x),
    }
    for case in CASES:
        if not case.name.startswith(RUN_FUNCTIONS_OF_USERS):
            inputs = case.inputs(torch.float32, torch.Generator().manual_seed(0))
            for each in inputs:
                if isinstance(each, torch.Tensor) and each.is_floating_point():
                    each.requires_grad_()
            found[case.name] = python_calls(lambda case=case, inputs=inputs: case.function(*inputs))
    leaf, target = x.clone().requires_grad_(), torch.tensor(0)
    with hodiff.corrected():
        found["corrected: without a rule"] = python_calls(leaf.sin)
        found["corrected: tanh"] = python_calls(leaf.tanh)
        found["corrected: layer_norm"] = python_calls(lambda: F.layer_norm(leaf, (10,)))
        found["corrected: cross_entropy"] = python_calls(lambda: F.cross_entropy(leaf, target))
    return found


# Torch's own Python code, which counts, differs between versions.
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the bounds are those of torch 2.13")
def test_small_computations_make_few_python_calls():
    # In a process of its own, because a loaded compiler adds calls.
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent)])
    run = [sys.executable, __file__]
    found = json.loads(
        subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True).stdout
    )
    assert set(MOST) <= set(found)
    assert not {name: count for name, count in found.items() if count > MOST.get(name, ALLOWED)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(counted()))
