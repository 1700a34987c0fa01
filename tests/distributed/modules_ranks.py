"""One rank of two, run by test_products.py: modules under fully_shard, and what is refused."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, close, like, own, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hodiff

generator = torch.Generator().manual_seed(1)
X = torch.randn(8, 5, 3, generator=generator, dtype=D)
Y = torch.randn(8, generator=generator, dtype=D)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])[:, 0]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attention, self.out = nn.Linear(3, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).transpose(0, 1)
        return self.out(self.attention(h, h, h, need_weights=False)[0][0])[:, 0]


class Residual(nn.Module):
    def __init__(self, call: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 15)) for _ in range(2))
        self.out, self.call = nn.Linear(15, 1), call

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.out(x)[:, 0]


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().to(D)


def by_name(module: nn.Module) -> Any:
    return lambda p, x, y: F.mse_loss(functional_call(module, p, (x,)), y)


def by_call(module: nn.Module) -> Any:
    return lambda p, x, y: F.mse_loss(module(x), y)


def compare(make: Callable[[], nn.Module], shard: Callable[[Any], Any], tol: float = 1e-12) -> None:
    one, many = made(make), made(make)
    shard(many)
    p = {name: each.detach() for name, each in one.named_parameters()}
    v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in p.items()}
    x = dict(many.named_parameters())
    w, expected = like(v, x), hodiff.hvp(by_name(one), p, v, X, Y)
    # Some parameters outside of x.
    part = list(p)[1:]
    q, u = ({name: each[name] for name in part} for each in (p, v))
    expected_part = hodiff.hvp(by_name(one), q, u, X, Y)
    for route in hodiff.ROUTES[:2]:
        for f in (by_name(many), by_call(many)):
            close(hodiff.hvp(f, x, w, own(X), own(Y), route=route), expected, tol)
        y = {name: x[name] for name in part}
        close(hodiff.hvp(by_call(many), y, like(u, y), own(X), own(Y), route=route), expected_part, tol)


def modules() -> None:
    mesh = init_device_mesh("cpu", (2,))
    compare(Recurrent, lambda m: fully_shard(m, mesh=mesh))
    compare(Attending, lambda m: fully_shard(m, mesh=mesh))
    compare(Attending, lambda m: [fully_shard(each, mesh=mesh) for each in (m.attention, m)])
    compare(Residual, lambda m: [fully_shard(each, mesh=mesh) for each in m.blocks])
    compare(Residual, lambda m: [fully_shard(list(m.blocks), mesh=mesh), fully_shard(m, mesh=mesh)])
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=D)
    compare(Residual, lambda m: fully_shard(m, mesh=mesh, mp_policy=policy), 1e-5)


def weight_decay() -> None:
    """The function uses parameters outside of the modules, and torch.func inside."""
    mesh = init_device_mesh("cpu", (2,))
    one, many = made(Residual), made(Residual)
    for each in (*many.blocks, many):
        fully_shard(each, mesh=mesh)
    p, x = dict(one.named_parameters()), dict(many.named_parameters())
    p = {name: each.detach() for name, each in p.items()}

    def f(module: nn.Module) -> Any:
        def evaluate(q: Any, a: Tensor, b: Tensor) -> Tensor:
            decay = sum(each.square().sum() ** 2 for each in q.values())
            slope = torch.func.grad(lambda c: F.mse_loss(functional_call(module, q, (c,)), b))(a)
            return by_name(module)(q, a, b) + decay + slope.square().sum() * len(a)

        return evaluate

    v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in p.items()}
    halves = [hodiff.hvp(f(one), p, v, X.chunk(2)[i], Y.chunk(2)[i]) for i in range(2)]
    expected = {name: (halves[0][name] + halves[1][name]) / 2 for name in p}
    close(hodiff.hvp(f(many), x, like(v, x), own(X), own(Y)), expected, 1e-11)
    expected_full = {name: each.full_tensor() for name, each in x.items()}
    close(x, expected_full)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    many = made(Residual)
    for each in (*many.blocks, many):
        fully_shard(each, mesh=mesh)
    x, f, data = dict(many.named_parameters()), by_name(many), (own(X), own(Y))
    group = dist.group.WORLD
    with pytest.raises(hodiff.InputError, match="one pass for each number"):
        hodiff.hvp(f, x, x, *data, route="forward-over-forward")
    with pytest.raises(hodiff.InputError, match="without modules under fully_shard"):
        hodiff.hessian_matrix(f, x, *data)
    with pytest.raises(hodiff.InputError, match="without modules under fully_shard"):
        hodiff.hessian(f)(x, *data)
    with pytest.raises(hodiff.InputError, match="expected the group of the ranks of fully_shard"):
        hodiff.KFACOperator(many, F.mse_loss, x, *data)
    with pytest.raises(hodiff.InputError, match="got DTensors"):
        hodiff.JacobianOperator(lambda p: functional_call(many, p, (X,)), x)
    with pytest.raises(hodiff.InputError, match="compile: expected False"):
        hodiff.HessianOperator(f, x, *data, compile=True)
    with pytest.raises(hodiff.InputError, match="not under fully_shard"):
        hodiff.check(lambda inputs: many(inputs).sum(), X)
    with pytest.raises(hodiff.InputError, match=r"outside of the transform"):
        torch.func.vmap(lambda c: c * hodiff.hvp(f, x, x, *data)["out.bias"].to_local().sum())(torch.ones(2))
    with pytest.raises(hodiff.InputError, match="distribute the batch"):
        hodiff.hvp(by_name(made(Residual)), x, x, *data)
    with pytest.raises(hodiff.InputError, match="expected a DTensor"):
        hodiff.HessianOperator(f, x, *data) @ {name: each.to_local() for name, each in x.items()}

    def of_batch(p: Any, batch: Any) -> Tensor:
        return f(p, *batch)

    pieces = [data] * (1 + dist.get_rank())
    with pytest.raises(hodiff.InputError, match="same number of batches"):
        hodiff.HessianOperator(of_batch, x, data=pieces, process_group=group) @ x
    pieces = [data] * dist.get_rank()
    with pytest.raises(hodiff.InputError, match="same number of batches"):
        hodiff.HessianOperator(of_batch, x, data=pieces, process_group=group) @ x
    empty = [tuple(each[: len(each) * dist.get_rank()] for each in data)]
    with pytest.raises(hodiff.InputError, match=r"remove empty batches|an error on another rank"):
        hodiff.HessianOperator(of_batch, x, data=empty, process_group=group) @ x
    short = [tuple(each[: 3 + dist.get_rank()] for each in data)]
    with pytest.raises(hodiff.InputError, match="batches of one size"):
        hodiff.HessianOperator(of_batch, x, data=short) @ x
    drawn = [torch.zeros((), dtype=D)]

    def changing(p: Any, batch: Any) -> Tensor:
        # On one rank only.
        drawn[0] = drawn[0] + dist.get_rank()
        return of_batch(p, batch) + drawn[0]

    with pytest.raises(hodiff.InputError, match="same value"):
        hodiff.HessianOperator(changing, x, data=[data], process_group=group) @ x
    hidden = _Hidden(many)
    with pytest.raises(hodiff.InputError, match="closed over by f"):
        hodiff.hvp(lambda p, a, b: F.mse_loss(hidden()(a), b), x, x, *data)
    many(own(X))
    with pytest.raises(hodiff.InputError, match="left gathered"):
        hodiff.hvp(f, dict(many.named_parameters()), x, *data)
    unknown = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext()))
    checkpointed = made(lambda: Residual(unknown))
    fully_shard(checkpointed, mesh=mesh)
    y = dict(checkpointed.named_parameters())
    with pytest.raises(hodiff.InputError, match="context_fn"):
        hodiff.hvp(by_name(checkpointed), y, y, *data)
    offloaded = made(Residual)
    fully_shard(offloaded, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    y = dict(offloaded.named_parameters())
    with pytest.raises(hodiff.InputError, match="CPUOffloadPolicy"):
        hodiff.hvp(by_name(offloaded), y, y, *data)


class _Hidden:
    """Returns a module that is known by a number only."""

    def __init__(self, module: nn.Module) -> None:
        self.number = id(module)

    def __call__(self) -> Any:
        return next(each for each in gc.get_objects() if id(each) == self.number)


if __name__ == "__main__":
    run(modules, weight_decay, refusals)
