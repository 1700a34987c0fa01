"""One rank of two, run by test_products.py: rank 1 raises in a function or a closure, and both end with an error."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import D, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hodiff

INPUTS = torch.ones(2, 3, dtype=D)


class Part(nn.Linear):
    """A layer that raises in one of its calls on rank 1, after it has gathered its parameters."""

    calls, last = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        Part.calls += 1
        if dist.get_rank() == 1 and Part.calls == Part.last:
            raise ValueError("this rank fails")
        return x.tanh()


class Model(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.first, self.second, self.call = Part(3, 3), Part(3, 1), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.second, self.call(self.first, x))


def made(last: int, call: Any = lambda f, x: f(x)) -> tuple[nn.Module, Any]:
    """Return a fully sharded model, one of whose layers raises in a call, and its loss."""
    Part.last, mesh = last, init_device_mesh("cpu", (2,))
    model = Model(call).to(D)
    for each in (model.first, model.second, model):
        fully_shard(each, mesh=mesh)
    return model, lambda p, batch: functional_call(model, p, (batch,)).square().mean()


def of_torch(f: Any, x: Tensor) -> Any:
    return checkpoint(f, x, use_reentrant=False)


def product() -> None:
    model, loss = made(7)
    x = dict(model.named_parameters())
    # An error that all ranks handle is no longer quoted.
    with pytest.raises(hodiff.InputError, match="expected a function that returns one real number"):
        hodiff.hvp(lambda p: functional_call(model, p, (INPUTS,)), x, x)
    A = hodiff.HessianOperator(loss, x, data=[INPUTS], process_group=dist.group.WORLD, cache=False)
    A @ x
    A @ x


def closure() -> None:
    model, loss = made(7)
    optimizer = hodiff.optim.Shampoo(model.parameters())
    for _ in range(4):
        optimizer.step(lambda: loss({}, INPUTS))


def again(call: Any, last: int) -> None:
    model, loss = made(last, call)
    x = dict(model.named_parameters())
    hodiff.hvp(loss, x, x, INPUTS)


def backward() -> None:
    """A checkpoint runs again in a backward pass of training."""
    model, _ = made(3, of_torch)
    hodiff.optim.Shampoo(model.parameters()).step(lambda: model(INPUTS).square().mean())


PLACES = {
    "product": product,
    "closure": closure,
    "derivative of a checkpoint": lambda: again(of_torch, 9),
    # After two calls, and two more in the backward pass, the function runs in a comparison that ignores errors.
    "comparison": lambda: again(hodiff.functions.checkpoint, 5),
    "checkpoint in a closure": backward,
}


def fails() -> None:
    try:
        PLACES[sys.argv[4]]()
    except (hodiff.HodiffError, ValueError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.exit(3)


if __name__ == "__main__":
    run(fails)
