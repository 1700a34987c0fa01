"""Freeing of deep graphs: nodes stay as long as other code holds them, and are freed soon after."""

import gc
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hodiff
from hodiff import graphs
from hodiff.torch_internals.autograd import deep_graphs

CHAIN = """
import resource, torch, hodiff
resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))
def f(x):
    for _ in range({steps}):
        x = x + 1e-4 * torch.sin(x) * x
    return x.sum()
x = torch.ones(2, dtype=torch.float64)
print(hodiff.hvp(f, x, x)[0].item(), hodiff.hessian_matrix(f, x)[0, 0].item())
A = hodiff.HessianOperator(f, x)
print((A @ x)[0].item())
"""


class Held(torch.autograd.Function):
    """The identity; its context refers to an object whose life shows that of the node."""

    alive: weakref.ref

    @staticmethod
    def forward(ctx, x):
        ctx.marker = set()
        Held.alive = weakref.ref(ctx.marker)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def is_freed(seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gc.collect()
        if Held.alive() is None:
            return True
        time.sleep(0.02)
    return False


def test_nodes_live_as_long_as_they_are_held(monkeypatch):
    monkeypatch.setattr(graphs, "DEEP", 0)
    x = torch.ones(3, requires_grad=True)
    middle = Held.apply(x.sin()).exp()
    y = middle.square().sum()
    assert len(list(graphs.nodes_of(y))) == 6
    assert len(list(graphs.nodes_of(y, middle))) == 6  # known nodes are not kept twice
    del y
    time.sleep(3 * deep_graphs._PAUSE)
    assert Held.alive() is not None
    middle.sum().backward()
    torch.testing.assert_close(x.grad, x.sin().exp() * x.cos())
    del middle
    assert is_freed()


def test_nodes_that_a_walk_left_out_hold_others(monkeypatch):
    monkeypatch.setattr(graphs, "DEEP", 0)
    monkeypatch.setattr(deep_graphs, "_ATTEMPTS", 2)
    x = torch.ones(3, requires_grad=True)
    held = Held.apply(x).exp()
    gradient = torch.autograd.grad(held.sum(), x, create_graph=True)[0]
    list(graphs.nodes_of(held))
    list(graphs.nodes_of(gradient))
    del held, gradient
    assert is_freed()


def test_walks_that_stop_early(monkeypatch):
    monkeypatch.setattr(graphs, "DEEP", 0)
    x = torch.ones(3, requires_grad=True)
    y = Held.apply(x).exp().sum()
    assert next(iter(graphs.nodes_of(y))) is y.grad_fn
    assert graphs.lead_to([y.grad_fn], [x])
    del y
    assert is_freed()


def test_threads(monkeypatch):
    monkeypatch.setattr(graphs, "DEEP", 0)
    x = torch.ones(3, dtype=torch.float64)
    expected = torch.diag(-x.sin())

    def run(_):
        return all(torch.equal(hodiff.hessian_matrix(lambda x: x.sin().sum(), x), expected) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    end = time.monotonic() + 5
    while deep_graphs._kept.lists and time.monotonic() < end:
        time.sleep(0.02)
    assert not deep_graphs._kept.lists
    assert not deep_graphs._kept.members


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the stack is limited as on Linux")
def test_chains_deeper_than_the_stack():
    code = CHAIN.format(steps=8000)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    a, b, c = map(float, found.stdout.split())
    assert a == pytest.approx(b, rel=1e-12)
    assert c == pytest.approx(a, rel=1e-12)
