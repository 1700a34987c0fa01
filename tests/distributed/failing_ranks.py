"""One rank of two, run by test_products.py: rank 1 raises in the function, and both ranks end with an error."""

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


def fails() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    x, calls = dict(model.named_parameters()), [0]

    def f(p: Any, batch: Tensor) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 4:
            raise ValueError("this rank fails")
        return F.mse_loss(functional_call(model, p, (batch,)), torch.zeros(2, 1, dtype=D))

    A = hodiff.HessianOperator(f, x, data=[torch.ones(2, 3, dtype=D)], process_group=dist.group.WORLD, cache=False)
    A @ x
    try:
        A @ x
    except hodiff.HodiffError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.exit(3)


if __name__ == "__main__":
    run(fails)
