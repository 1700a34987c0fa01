"""One rank of four, run by test_products.py: models on a device mesh of two dimensions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed.ranks import D, close, flat, like, own, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

import hodiff


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4)
    return nn.Sequential(*layers).to(D)


generator = torch.Generator().manual_seed(1)
X = torch.randn(8, 6, generator=generator, dtype=D)
Y = torch.randint(4, (8,), generator=generator)
P = {name: each.detach() for name, each in model().named_parameters()}
V = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in P.items()}


def outputs(module: nn.Module) -> Any:
    return lambda p, inputs: functional_call(module, p, (inputs,))


def loss(module: nn.Module) -> Any:
    return lambda p, batch: F.cross_entropy(outputs(module)(p, batch[0]), batch[1])


def compare(module: nn.Module, data: Any, process_group: Any) -> None:
    x = dict(module.named_parameters())
    w, batches = like(V, x), {"data": [data], "process_group": process_group}
    A, B = hodiff.HessianOperator(loss(module), x, **batches), hodiff.HessianOperator(loss(model()), P, data=[(X, Y)])
    close(A @ w, B @ V)
    columns = A.to_tree(A @ torch.stack([flat(w), flat(x)], 1).detach())
    close(columns[0], B @ V)
    close(columns[1], B @ P)
    A = hodiff.GaussNewtonOperator(outputs(module), F.cross_entropy, x, **batches)
    B = hodiff.GaussNewtonOperator(outputs(model()), F.cross_entropy, P, data=[(X, Y)])
    close(A @ w, B @ V)
    close(A.to_tree(A @ torch.stack([flat(w), flat(x)], 1).detach())[1], B @ P)
    expected = torch.linalg.eigvalsh(B.to_dense())[-2:]
    torch.testing.assert_close(A.eigsh(2, which="LA").eigenvalues, expected, rtol=1e-9, atol=1e-9)
    traces = [each.trace(method="hutchinson", products=6).value for each in (A, B)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-12)


def parallel(mesh: Any) -> nn.Sequential:
    last = ColwiseParallel(output_layouts=Replicate())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last}
    return parallelize_module(model(), mesh["tp"], plan)


def meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    part = own(X, 2, rank), own(Y, 2, rank)
    # Tensor parallel, with the same data everywhere and with data that differ along the other dimension.
    compare(parallel(mesh), (X, Y), None)
    compare(parallel(mesh), part, group)
    # Fully sharded along one dimension, tensor parallel along the other.
    both = parallel(mesh)
    for each in (both[0], both[2], both[4], both):
        fully_shard(each, mesh=mesh["dp"])
    compare(both, part, group)
    x = dict(both.named_parameters())
    truth = hodiff.hvp(loss(model()), P, V, (X, Y))
    close(hodiff.hvp(loss(both), x, like(V, x), part), truth)
    with pytest.raises(hodiff.InputError, match="reverse-over-reverse"):
        hodiff.hvp(loss(both), x, like(V, x), part, route="forward-over-reverse")
    for refused, where in ((both, group), (parallel(mesh), None)):
        with pytest.raises(hodiff.InputError, match="got other DTensors or tensor parallelism; use GaussNewton"):
            hodiff.KFACOperator(
                refused, F.cross_entropy, dict(refused.named_parameters()), data=[part], process_group=where
            ).trace()
    # Sharded along one dimension and replicated along the other.
    hybrid = model()
    for each in (hybrid[0], hybrid):
        fully_shard(each, mesh=mesh)
    compare(hybrid, (own(X), own(Y)), torch.distributed.group.WORLD)
    with pytest.raises(hodiff.InputError, match="expected the ranks of the mesh of fully_shard"):
        compare(hybrid, part, group)


if __name__ == "__main__":
    run(meshes)
