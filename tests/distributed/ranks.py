"""What the scripts of ranks share: a process group, vectors distributed like parameters, and comparisons."""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

D = torch.float64


def run(*checks: Callable[[], None]) -> None:
    """Run checks on a rank; the arguments of the script are the rank, a rendezvous file and the number of ranks."""
    rank, rendezvous, count = sys.argv[1:4]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(rank),
        world_size=int(count),
        timeout=timedelta(seconds=120),
    )
    for check in checks:
        check()
    dist.barrier()
    sys.stdout.write("all agree")
    dist.destroy_process_group()


def own(tensor: Tensor, count: int | None = None, rank: int | None = None) -> Tensor:
    """Return this rank's part of a batch."""
    return tensor.chunk(count or dist.get_world_size())[dist.get_rank() if rank is None else rank]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(v: dict[str, Tensor], p: dict[str, Any]) -> dict[str, Any]:
    """Distribute tensors like parameters."""
    return {
        name: distribute_tensor(v[name], each.device_mesh, each.placements) if isinstance(each, DTensor) else v[name]
        for name, each in p.items()
    }


def flat(tree: dict[str, Any]) -> Tensor:
    """Return the parts of a tree that lie on this rank as one vector."""
    return torch.cat([(each.to_local() if isinstance(each, DTensor) else each).flatten() for each in tree.values()])


def close(found: dict[str, Any], expected: dict[str, Tensor], tol: float = 1e-12) -> None:
    """Compare a distributed tree with tensors of one process."""
    assert list(found) == list(expected)
    for name, truth in expected.items():
        torch.testing.assert_close(whole(found[name]), truth, rtol=tol, atol=tol)
