"""One rank of a sharded GPT: bytes of collectives, peak memory and time of its products.

python -m benchmarks.sharded_ranks RANK RENDEZVOUS RANKS LAYERS WIDTH BATCH      rank 0 prints JSON
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from benchmarks.language_model import LanguageModel
from benchmarks.memory import peak_bytes

VOCABULARY, CONTEXT, HEADS = 64, 16, 4
ROUNDS = 3
# Operators of collectives, and the argument that holds the whole tensor; None for the result.
WHOLE = {
    "_c10d_functional::all_gather_into_tensor": ("gathered", None),
    "c10d::_allgather_base_": ("gathered", 0),
    "_c10d_functional::reduce_scatter_tensor": ("scattered", 0),
    "c10d::_reduce_scatter_base_": ("scattered", 1),
    "_c10d_functional::all_reduce": ("reduced", 0),
    "c10d::allreduce_": ("reduced", 0),
}


class Bytes(TorchDispatchMode):
    """Sums of the sizes of whole tensors that collectives gather, scatter or reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and add its bytes if it is a collective."""
        result = func(*args, **(kwargs or {}))
        kind, place = WHOLE.get(func.name().split(".")[0], (None, None))
        if kind is not None:
            whole = result if place is None else args[place]
            for each in whole if isinstance(whole, (list, tuple)) else [whole]:
                self.sums[kind] += each.numel() * each.element_size()
        return result


def model_of(layers: int, width: int) -> LanguageModel:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    return LanguageModel(VOCABULARY, CONTEXT, width, HEADS, layers)


def ways_of(model: nn.Module, x: dict[str, Any], v: dict[str, Any], batch: int) -> dict[str, Callable[[], Any]]:
    """Return all products, and the gradient, on this rank's batch."""
    tokens = torch.randint(VOCABULARY, (batch, CONTEXT), generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    data = tokens, tokens.roll(-1, 1).flatten()
    group = dist.group.WORLD

    def scores(p: Any, tokens: Tensor) -> Tensor:
        result: Tensor = functional_call(model, p, (tokens,))
        return result

    def loss(p: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(scores(p, data[0]), data[1])

    H = hodiff.HessianOperator(loss, x, data=[data], process_group=group)
    G = hodiff.GaussNewtonOperator(scores, F.cross_entropy, x, data=[data], process_group=group)

    def gradient() -> None:
        F.cross_entropy(model(data[0]), data[1]).backward()
        model.zero_grad()

    products: dict[str, Callable[[], Any]] = {
        "`hvp`": lambda: hodiff.hvp(loss, x, v, data),
        '`hvp`, `"forward-over-reverse"`': lambda: hodiff.hvp(loss, x, v, data, route="forward-over-reverse"),
        "`HessianOperator`, later": lambda: H @ v,
        "`GaussNewtonOperator`, later": lambda: G @ v,
    }
    # Products of parameters that require gradients are themselves differentiable, unless gradients are off.
    return {"gradient": gradient, **{name: torch.no_grad()(way) for name, way in products.items()}}


def least_peak(run: Callable[[], Any]) -> int:
    """Return the least of several peaks: threads of gloo free their buffers sooner or later."""
    return min(peak_bytes(run) for _ in range(ROUNDS))


def measure(layers: int, width: int, batch: int) -> dict[str, Any]:
    """Measure all products of this rank."""
    model = model_of(layers, width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x: dict[str, Any] = dict(model.named_parameters())
    v = {name: torch.randn_like(each.detach()) for name, each in x.items()}
    found = {}
    for name, run in ways_of(model, x, v, batch).items():
        run()
        with Bytes() as count:
            run()
        seconds = []
        for _ in range(ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        found[name] = {**count.sums, "peak": least_peak(run), "seconds": statistics.median(seconds)}
    # Activations and recorded graphs grow with the batch, and nothing else does.
    for name, run in ways_of(model, x, v, 2 * batch).items():
        found[name]["activations"] = max(0, least_peak(run) - found[name]["peak"])
    numbers = sum(each.numel() for each in model_of(layers, width).parameters())
    kinds = (nn.Linear, nn.LayerNorm)
    weights = sum(each.weight.numel() for each in model_of(layers, width).modules() if isinstance(each, kinds))
    return {"parameters": numbers, "weights": weights, "ways": found}


def main(rank: str, rendezvous: str, ranks: str, *sizes: str) -> None:
    """Join the ranks, measure, and print."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(ranks), timeout=timedelta(minutes=5)
    )
    found = measure(*map(int, sizes))
    if rank == "0":
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
