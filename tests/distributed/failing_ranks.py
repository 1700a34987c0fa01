"""One rank of two, run by test_products.py: rank 1 raises in a function or a closure, and both end with an error."""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import hodiff


def model() -> tuple[nn.Sequential, Any]:
    """Return a fully sharded model, and its loss, which raises in the fourth call on rank 1."""
    mesh = init_device_mesh("cpu", (2,))
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    for each in (layers[0], layers[2], layers):
        fully_shard(each, mesh=mesh)
    calls = [0]

    def loss(p: Any, batch: Tensor) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 4:
            raise ValueError("this rank fails")
        return F.mse_loss(functional_call(layers, p, (batch,)), torch.zeros(2, 1, dtype=D))

    return layers, loss


def product() -> None:
    layers, loss = model()
    x, data = dict(layers.named_parameters()), [torch.ones(2, 3, dtype=D)]
    A = hodiff.HessianOperator(loss, x, data=data, process_group=dist.group.WORLD, cache=False)
    A @ x
    A @ x


def closure() -> None:
    layers, loss = model()
    optimizer = hodiff.optim.Shampoo(layers.parameters())
    for _ in range(4):
        optimizer.step(lambda: loss({}, torch.ones(2, 3, dtype=D)))


def fails() -> None:
    try:
        {"product": product, "closure": closure}[sys.argv[4]]()
    except hodiff.HodiffError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.exit(3)


if __name__ == "__main__":
    run(fails)
