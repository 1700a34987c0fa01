"""One rank of two, run by test_distributed.py: operators over split data equal operators over all data."""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import ravel
from operators.cases import close, problem

import hodiff
from hodiff.operators import EmpiricalFisherOperator, FisherOperator, GaussNewtonOperator, HessianOperator


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def assert_raises(pattern: str, **options: Any) -> None:
    p = problem("mlp")
    with pytest.raises(hodiff.InputError, match=pattern):
        HessianOperator(p.objective(), p.x, **options)


def compare(name: str, reduction: str, group: Any) -> None:
    p = problem(name)
    # One rank has four examples in two batches, the other has one example.
    mine = p.batches(1, 4)[:2] if dist.get_rank() == 0 else p.batches(4)[1:]
    loss, f = p.reduced(reduction), p.objective(reduction)
    shared = {"reduction": reduction, "process_group": group}
    pairs = {
        "hessian": (HessianOperator(f, p.x, data=mine, **shared), p.hessian(reduction)),
        "gauss-newton": (GaussNewtonOperator(p.model, loss, p.x, data=mine, **shared), p.gauss_newton(reduction)),
        "empirical": (
            EmpiricalFisherOperator(p.model, loss, p.x, data=mine, **shared),
            EmpiricalFisherOperator(p.model, loss, p.x, p.inputs, p.targets, reduction=reduction).to_dense(),
        ),
    }
    if reduction == "mean":
        weighted = partial(F.cross_entropy, weight=torch.tensor([0.5, 2.0, 3.0]).double())
        pairs["weighted empirical"] = (
            EmpiricalFisherOperator(p.model, weighted, p.x, data=mine, **shared),
            EmpiricalFisherOperator(p.model, weighted, p.x, p.inputs, p.targets).to_dense(),
        )
        pairs["fisher"] = (FisherOperator(p.model, F.cross_entropy, p.x, data=mine, **shared), p.gauss_newton())
    for A, expected in pairs.values():
        close(A.to_dense(), expected)
        close(ravel(A @ p.x), expected @ ravel(p.x))
        close(A.block("2").to_dense(), expected[12:, 12:])
        close(A.diagonal(exact=True).value, expected.diagonal())
        one, other = gathered(A.to_dense())
        assert torch.equal(one, other)


def drawn_targets(group: Any) -> None:
    """Ranks draw different targets, even for equal data."""
    p = problem("mlp")
    mine = p.batches()
    alone = FisherOperator(p.model, F.cross_entropy, p.x, data=mine, samples=1).to_dense()
    both = FisherOperator(p.model, F.cross_entropy, p.x, data=mine, samples=1, process_group=group).to_dense()
    assert (both - alone).abs().max() > 1e-3
    many = FisherOperator(p.model, F.cross_entropy, p.x, data=mine, samples=4000, process_group=group).to_dense()
    assert (many - p.gauss_newton()).norm() < 0.1 * p.gauss_newton().norm()


def one_rank_without_data(group: Any) -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, data=p.batches() if dist.get_rank() == 0 else [], process_group=group)
    close(A.to_dense(), p.hessian())
    close(ravel(A @ p.x), p.hessian() @ ravel(p.x))
    with pytest.raises(hodiff.InputError, match="data: expected at least one batch"):
        HessianOperator(p.objective(), p.x, data=[], process_group=group).to_dense()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2, timeout=timedelta(minutes=10))
    group = dist.group.WORLD
    for reduction in ("mean", "sum"):
        compare("mlp", reduction, group)
    drawn_targets(group)
    one_rank_without_data(group)
    assert_raises("data: expected batches", process_group=group)
    only_first = dist.new_group([0])
    if rank == 1:
        assert_raises(
            "process_group: expected a group that this process belongs to", data=[1], process_group=only_first
        )
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("both agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
