"""One rank, run by test_estimates.py: padded tokens count right over ranks, also in bfloat16."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, close, flat, like, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from hodiff import GaussNewtonOperator, HessianOperator

PADDING = -100
generator = torch.Generator().manual_seed(1)
TOKENS = torch.randint(9, (8, 6), generator=generator)
# The first lines are nearly full and the last ones nearly empty, so that ranks count differently.
LENGTHS = torch.tensor([6, 6, 5, 5, 2, 1, 1, 1])
LABELS = torch.where(torch.arange(6) < LENGTHS[:, None], TOKENS.roll(-1, 1), PADDING)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(9, 8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 9)
    return nn.Sequential(*layers).to(dtype)


def padded() -> None:
    count, rank = dist.get_world_size(), dist.get_rank()
    data = [tuple(each.chunk(count)[rank] for each in (TOKENS, LABELS))]
    for policy, dtype, tol in (
        (MixedPrecisionPolicy(), D, 1e-12),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.float32, 0.02),
    ):
        whole, sharded = model(dtype), model(dtype)
        for each in (sharded[1], sharded[3], sharded):
            fully_shard(each, mesh=init_device_mesh("cpu", (count,)), mp_policy=policy)
        p = {name: each.detach() for name, each in whole.double().named_parameters()}
        v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in p.items()}
        x = dict(sharded.named_parameters())
        w = like({name: each.to(dtype) for name, each in v.items()}, x)
        for kind in (hessian, gauss_newton):
            A = kind(sharded, x, data, dist.group.WORLD)
            found, truth = A @ w, kind(whole, p, [(TOKENS, LABELS)], None) @ v
            assert all(each.dtype == dtype for each in found.values())
            if dtype == D:
                close(found, truth)
                # Each rank's batches, weighted equally.
                even = kind(whole, p, list(zip(TOKENS.chunk(2), LABELS.chunk(2), strict=True)), None, lambda _: 1) @ v
                assert relative(even, truth) > 0.05
            assert relative({name: each.full_tensor() for name, each in found.items()}, truth) < tol


def relative(found: Any, truth: Any) -> float:
    """Relative difference of two trees."""
    return float((flat(found).double() - flat(truth)).norm() / flat(truth).norm())


def hessian(module: nn.Module, x: Any, data: Any, group: Any, size: Any = None) -> HessianOperator:
    def loss(p: Any, batch: Any) -> Tensor:
        scores = functional_call(module, p, (batch[0],)).transpose(1, 2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return F.cross_entropy(scores, batch[1], ignore_index=PADDING)

    def counted(batch: Any) -> int:
        return int((batch[1] != PADDING).sum())

    return HessianOperator(loss, x, data=data, batch_size=size or counted, process_group=group)


def gauss_newton(module: nn.Module, x: Any, data: Any, group: Any, size: Any = None) -> Any:
    def scores(p: Any, tokens: Tensor) -> Tensor:
        result: Tensor = functional_call(module, p, (tokens,)).transpose(1, 2)
        return result.to(torch.promote_types(result.dtype, torch.float32))

    if size is not None:
        halves = [GaussNewtonOperator(scores, F.cross_entropy, x, data=[each]) for each in data]
        return 0.5 * (halves[0] + halves[1])
    return GaussNewtonOperator(scores, F.cross_entropy, x, data=data, process_group=group)


if __name__ == "__main__":
    run(padded)
