"""One rank of two, run by test_sharded_attention.py: attention of DTensors against the formula on whole tensors."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from plain_attention import plain_attention

import hodiff
from hodiff.functions import attention

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=D)


def second(f: Any, leaves: list[Any], directions: list[Any]) -> list[Tensor]:
    """Return value, gradient and Hessian-vector product."""
    y = f(*leaves)
    gradients = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
    slope = sum((a * b).sum() for a, b in zip(gradients, directions, strict=True))
    return [y, *gradients, *torch.autograd.grad(slope, leaves)]


def whole(each: Any) -> Tensor:
    return (each.full_tensor() if isinstance(each, DTensor) else each).detach()


def compare(mesh: Any, placements: Any, f: Any, reference: Any, tensors: list[Tensor]) -> list[Any]:
    directions = [drawn(*each.shape) for each in tensors]
    expected = second(reference, [each.clone().requires_grad_() for each in tensors], directions)
    leaves = [distribute_tensor(each, mesh, placements).requires_grad_() for each in tensors]
    with hodiff.corrected():
        found = second(f, leaves, [distribute_tensor(each, mesh, placements) for each in directions])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(ours), theirs.detach(), rtol=1e-12, atol=1e-13)
    return found


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2, timeout=timedelta(minutes=10))
    mesh = init_device_mesh("cpu", (2,))
    tensors = [drawn(3, 4, 6, 3) for _ in range(3)]
    for causal in (False, True):
        for function in (attention, F.scaled_dot_product_attention):

            def f(q: Any, k: Any, v: Any, function: Any = function, causal: bool = causal) -> Any:
                return function(q, k, v, is_causal=causal)

            def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
                return plain_attention(q, k, v, causal)

            # A batch of 3 is split unevenly, and a sequence is gathered.
            for placement in (Shard(1), Shard(0), Shard(2), Shard(3), Replicate()):
                y, *rest = compare(mesh, [placement], f, reference, tensors)
                kept = placement if placement in (Shard(0), Shard(1)) else Replicate()
                assert y.placements == (kept,)
                assert all(each.placements == (placement,) for each in rest)

    # Heads that share keys: sharded if both counts divide evenly, gathered otherwise.
    for heads, shared, kept in ((4, 2, Shard(1)), (6, 3, Replicate())):
        grouped = [drawn(1, heads, 5, 3), drawn(1, shared, 5, 3), drawn(1, shared, 5, 3)]

        def of_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

        y, *_ = compare(mesh, [Shard(1)], lambda *x: attention(*x, enable_gqa=True), of_groups, grouped)
        assert y.placements == (kept,)

    # Masks with one value per head, or one for all heads.
    for heads in (4, 1):
        seen = torch.rand(heads, 6, 6, generator=GENERATOR) < 0.7
        seen |= torch.eye(6, dtype=torch.bool)
        mask = distribute_tensor(seen, mesh, [Replicate()])

        def of_seen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            return torch.softmax((q @ k.mT / 3**0.5).masked_fill(~seen, -torch.inf), -1) @ v

        compare(mesh, [Shard(1)], lambda q, k, v, m=mask: attention(q, k, v, m), of_seen, tensors)

    def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / 3**0.5 + mask, -1) @ v

    compare(mesh, [Shard(1)], attention, with_mask, [*tensors, drawn(1, 4, 6, 6)])

    q, k, v = (distribute_tensor(each, mesh, [Shard(1)]).requires_grad_() for each in tensors)
    with pytest.raises(hodiff.InputError, match="expected DTensors of one device mesh, got DTensor, DTensor, Tensor"):
        attention(q, k, tensors[2])
    with pytest.raises(hodiff.InputError, match="dropout_p: expected 0 for DTensors"):
        attention(q, k, v, dropout_p=0.5, generator=torch.Generator())
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("both agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
