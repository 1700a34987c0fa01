"""Tests of the memory of products, in bytes of live tensors."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory_use import LiveMemory
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.objectives import mlp
from hodiff.operators import GaussNewtonOperator, HessianOperator

MODULE = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))
X = {name: parameter.detach() for name, parameter in MODULE.named_parameters()}
# Activations are larger than the parameters, as in a benchmark's network and batch.
INPUTS, TARGETS = torch.randn(512, 64), torch.randint(10, (512,))


def loss(x: Any, batch: Any) -> Tensor:
    return F.cross_entropy(functional_call(MODULE, x, (batch[0],)), batch[1])


def gradient() -> None:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in X.items()}
    torch.autograd.grad(loss(leaves, (INPUTS, TARGETS)), list(leaves.values()))


def peak_bytes(run: Callable[[], Any]) -> int:
    run()
    gc.collect()
    with LiveMemory() as living:
        run()
    return living.peak


OPERATORS = {
    "hessian": lambda **options: HessianOperator(loss, X, **options),
    "gauss-newton": lambda **options: GaussNewtonOperator(MODULE, F.cross_entropy, X, **options),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "first", "later"), [("hessian", 3.0, 2.2), ("gauss-newton", 2.3, 2.2)])
def test_products_take_memory_of_few_gradients(name: str, first: float, later: float) -> None:
    """The first product of a new operator includes the linearization, which later products reuse."""
    floor = peak_bytes(gradient)
    A = OPERATORS[name](data=[(INPUTS, TARGETS)])
    assert 1.0 < peak_bytes(lambda: OPERATORS[name](data=[(INPUTS, TARGETS)]) @ X) / floor < first
    assert 0.5 < peak_bytes(lambda: A @ X) / floor < later


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [HessianOperator, GaussNewtonOperator])
def test_products_of_the_benchmark_network_take_memory_of_few_gradients(make: Any) -> None:
    objective = mlp()
    x = objective.parameters()

    def gradient() -> None:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
        torch.autograd.grad(objective(leaves), list(leaves.values()))

    if make is HessianOperator:
        A = HessianOperator(objective, x)
    else:
        A = GaussNewtonOperator(objective.module, F.cross_entropy, x, objective.inputs, objective.targets)
    floor = peak_bytes(gradient)
    assert peak_bytes(lambda: A.at(x) @ x) < 2.2 * floor
    assert peak_bytes(lambda: A @ x) < 2.2 * floor


@pytest.mark.slow
def test_cache_false_holds_one_batch_at_a_time() -> None:
    quarters = list(zip(INPUTS.chunk(8), TARGETS.chunk(8), strict=True))
    one = peak_bytes(lambda: OPERATORS["hessian"](data=quarters[:1], cache=False) @ X)
    all_of_them = peak_bytes(lambda: OPERATORS["hessian"](data=quarters, cache=False) @ X)
    kept = peak_bytes(lambda: OPERATORS["hessian"](data=quarters, cache=True) @ X)
    assert all_of_them < 1.5 * one
    assert kept > 2 * one


def test_memory_budget_is_respected() -> None:
    eighths = list(zip(INPUTS.chunk(8), TARGETS.chunk(8), strict=True))
    for budget in (2**20, 4 * 2**20):
        A = OPERATORS["hessian"](data=eighths, memory_budget=budget)
        A @ X
        held = A._kept.nbytes
        assert 0 < held <= budget


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_fifty_products_leave_no_tensors(name: str) -> None:
    A = OPERATORS[name](data=[(INPUTS[:64], TARGETS[:64])])
    block = torch.randn(A.shape[0], 2)
    A @ X
    A @ block
    gc.collect()
    gc.disable()
    try:
        with LiveMemory() as living:
            A @ block
            after = []
            for _ in range(50):
                A @ X
                A @ block
                after.append(living.bytes)
    finally:
        gc.enable()
    assert after[-1] == after[0]


@pytest.mark.slow
def test_chunks_bound_the_memory_of_blocks() -> None:
    A = OPERATORS["hessian"](data=[(INPUTS, TARGETS)], chunk_size=1)
    B = OPERATORS["hessian"](data=[(INPUTS, TARGETS)], chunk_size=None)
    block = torch.randn(A.shape[0], 8)
    assert peak_bytes(lambda: A @ block) < 0.7 * peak_bytes(lambda: B @ block)
