"""Tests of operators of one module in several threads, against dense Jacobians of the same network."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threads import in_threads
from torch import nn
from torch.nn.functional import mse_loss

import hodiff
from hodiff.operators.compiled import product_graphs as graphs

D = torch.float64
INPUTS, TARGETS = torch.randn(4, 3, dtype=D), torch.randn(4, 2, dtype=D)


def ravel(tree):
    return torch.cat([each.reshape(-1) for each in tree.values()])


class Pause(nn.Module):
    """Let other threads run while the module holds this thread's parameters."""

    def forward(self, x):
        time.sleep(1e-4)
        return x


def test_operators_of_one_module_at_several_points_match():
    module = nn.Sequential(nn.Linear(3, 4, dtype=D), nn.Tanh(), Pause(), nn.Linear(4, 2, dtype=D))
    points = [{name: torch.randn_like(p) for name, p in module.named_parameters()} for _ in range(4)]
    vector = {name: torch.ones_like(p) for name, p in module.named_parameters()}

    def plain(p):
        return (torch.tanh(INPUTS @ p["0.weight"].mT + p["0.bias"]) @ p["3.weight"].mT + p["3.bias"]).reshape(-1)

    def truth(p):
        blocks = torch.func.jacrev(plain)(p)
        matrix = torch.cat([blocks[name].reshape(8, -1) for name in p], 1)
        return 2 / 8 * matrix.mT @ (matrix @ ravel(vector))

    expected = [truth(p) for p in points]
    found = in_threads(
        lambda p: ravel(hodiff.GaussNewtonOperator(module, mse_loss, p, INPUTS, TARGETS) @ vector), points, 40
    )
    for value, each in zip(found, expected * 10, strict=True):
        torch.testing.assert_close(value, each)


FACTORED = {
    "K-FAC": hodiff.KFACOperator,
    "K-FAC without checks": lambda *args: hodiff.KFACOperator(*args, check=False),
    "EK-FAC": hodiff.EKFACOperator,
    "KFOC": hodiff.operators.KFOCOperator,
}


@pytest.mark.parametrize("name", FACTORED)
def test_layers_of_one_module_are_recorded_for_one_thread_at_a_time(name):
    """Each block of one example is exact; operators that restore the module's attributes keep the hooks in use."""
    module = nn.Sequential(nn.Linear(3, 4, dtype=D), nn.Tanh(), Pause(), nn.Linear(4, 2, dtype=D))
    point = {key: p.detach() for key, p in module.named_parameters()}
    blocks = torch.func.jacrev(lambda p: torch.func.functional_call(module, p, (INPUTS[:1],)).reshape(-1))(point)
    jacobian = torch.cat([blocks[key].reshape(2, -1) for key in point], 1)
    gauss_newton = jacobian.mT @ jacobian
    layers = torch.block_diag(gauss_newton[:16, :16], gauss_newton[16:, 16:])
    problem = module, mse_loss, point, INPUTS[:1], TARGETS[:1]
    shared = FACTORED[name](*problem)
    first, *others = in_threads(lambda _: shared.blocks, range(4), 4)
    assert all(each is first for each in others)
    matrices = {
        "new": (lambda: FACTORED[name](*problem), layers),
        "shared": (lambda: shared, layers),
        "another kind": (lambda: hodiff.GaussNewtonOperator(*problem), gauss_newton),
    }
    jobs = ["shared"] * 4 + ["new", "another kind"] * 6
    for value, job in zip(in_threads(lambda job: matrices[job][0]().to_dense(), jobs, len(jobs)), jobs, strict=True):
        torch.testing.assert_close(value, matrices[job][1])
    assert not any(each._forward_hooks for each in module.modules())


def test_module_buffers_are_unchanged():
    """Runs in training mode update copies of the buffers, which other threads do not see."""
    module = nn.Sequential(nn.Linear(3, 4, dtype=D), nn.BatchNorm1d(4, dtype=D), nn.Linear(4, 2, dtype=D))
    point = {name: p.detach() for name, p in module.named_parameters()}
    vector = {name: torch.ones_like(p) for name, p in point.items()}
    before = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}

    def product(p):
        return ravel(hodiff.GaussNewtonOperator(module, mse_loss, p, INPUTS, TARGETS) @ vector)

    expected = product(point)
    for value in in_threads(product, [point], 40):
        torch.testing.assert_close(value, expected)
    for name, buffer in module.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_capture_in_one_thread_does_not_affect_eager_operators(monkeypatch):
    """During capture, closures hold placeholders, which eager operators of the same function must not see."""
    monkeypatch.setattr(graphs, "compile_graph", lambda graph, inputs, **_: graph)
    weights, captured = torch.randn(3, dtype=D), threading.Event()
    x = torch.tensor([1.0, 2.0, -1.0], dtype=D)

    def f(x):
        if type(weights) is not torch.Tensor:
            captured.set()
            time.sleep(0.3)
        return (weights * x**3).sum()

    def compiled():
        return hodiff.HessianOperator(f, x, compile=True) @ x

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(compiled)
        assert captured.wait(60)
        for route in ("auto", "forward-over-reverse"):
            torch.testing.assert_close(hodiff.HessianOperator(f, x, route=route) @ x, 6 * weights * x**2)
        torch.testing.assert_close(found.result(), 6 * weights * x**2)


def test_first_products_over_uncached_data_match():
    """A pass is compared with a finished pass, not with an unfinished pass of another thread."""
    x, one = torch.tensor([0.5, -1.0, 2.0], dtype=D), torch.ones(3, dtype=D)
    data = [torch.randn(count, 3, dtype=D) for count in (4, 4, 2)]

    def loss(x, batch):
        time.sleep(1e-4)  # lets other threads run
        return ((batch @ x).tanh() ** 2).mean()

    truth = hodiff.HessianOperator(loss, x, data=data).to_dense() @ one
    for _ in range(5):
        A = hodiff.HessianOperator(loss, x, data=data, cache=False)
        for found in in_threads(lambda _, A=A: A @ one, range(4), 4):
            torch.testing.assert_close(found, truth)
