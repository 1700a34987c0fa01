"""One rank of two, run by test_tensor_parallel.py: a parallel model has the second derivatives of the whole model."""

import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.func import functional_call

import hodiff

D = torch.float64


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).to(D)


generator = torch.Generator().manual_seed(1)
X = torch.randn(6, 3, generator=generator, dtype=D)
CLASSES = torch.tensor([0, 1, 2, 3, 0, 1])


def energy(module: nn.Module) -> Any:
    return lambda p: functional_call(module, p, (X,)).square().sum().sin()


def outputs(module: nn.Module) -> Any:
    return lambda p, x: functional_call(module, p, (x,))


def close(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, truth in expected.items():
        torch.testing.assert_close(found[name].full_tensor(), truth, rtol=1e-12, atol=1e-12)


def main() -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=int(sys.argv[1]),
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (2,))
    whole = model()
    x = {name: each.detach() for name, each in whole.named_parameters()}
    v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in x.items()}
    parallel = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    p = dict(parallel.named_parameters())
    w = {name: distribute_tensor(v[name], mesh, each.placements) for name, each in p.items()}

    product = hodiff.hvp(energy(whole), x, v)
    close(hodiff.hvp(energy(parallel), p, w), product)
    close(hodiff.HessianOperator(energy(parallel), p) @ w, product)
    targets = torch.zeros(6, 4, dtype=D)
    gauss_newton = hodiff.GaussNewtonOperator(outputs(whole), F.mse_loss, x, X, targets) @ v
    close(hodiff.GaussNewtonOperator(outputs(parallel), F.mse_loss, p, X, targets) @ w, gauss_newton)
    with hodiff.corrected():
        gradients = torch.autograd.grad(energy(parallel)(p), list(p.values()), create_graph=True)
    close(dict(zip(p, torch.autograd.grad(gradients, list(p.values()), list(w.values())), strict=True)), product)

    sharded = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    classifier = parallelize_module(model(), mesh, {"0": ColwiseParallel(output_layouts=Replicate()), "2": sharded})
    q = dict(classifier.named_parameters())
    with loss_parallel(), pytest.raises(hodiff.RouteError, match="loss_parallel has no second derivative"):
        hodiff.hvp(lambda q: F.cross_entropy(outputs(classifier)(q, X), CLASSES), q, q)

    dist.barrier()
    sys.stdout.write("both agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
