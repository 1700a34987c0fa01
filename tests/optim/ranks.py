"""One rank of two, run by test_distributed.py: optimizers on split batches make the steps of one process."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optim.table import TABLE, Case, Problem, cross_entropy

STEPS = 5


def labels_by_probabilities(probabilities: torch.Tensor, _: int, generator: Any = None) -> torch.Tensor:
    """Draw labels that depend on the probabilities alone, so that one process and two ranks draw the same."""
    noise = (probabilities * 1e4).frac().clamp_min(1e-6)
    return (probabilities / -noise.log()).argmax(-1, keepdim=True)


def half(batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [each.chunk(2)[dist.get_rank()] for each in batch]


def run(case: Case, wrap: Any, **options: Any) -> list[torch.Tensor]:
    """Train on this rank's half of each batch."""
    problem = Problem()
    optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD, **options)
    model = wrap(problem.model)
    for inputs, labels in map(half, problem.batches[:STEPS]):
        if case.pair:
            optimizer.step(lambda: (model(inputs), lambda outputs: cross_entropy(outputs, labels)))
        elif case.loop:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        else:
            optimizer.step(lambda: cross_entropy(model(inputs), labels))
    return problem.numbers()


def main() -> None:
    torch.multinomial = labels_by_probabilities
    wraps = {"plain": lambda model: model, "DDP": DistributedDataParallel}
    for name, case in TABLE.items():
        if name.startswith(("Shampoo", "SOAP")):
            continue
        one = Problem()
        expected = one.run(case, case(one.model.parameters(), process_group="local"), one.batches[:STEPS])
        for how, wrap in wraps.items():
            got = run(case, wrap)
            error = max(float((a - b).abs().max()) for a, b in zip(got, expected))
            print(f"{name:32} {how:6} {error:.1e}", flush=True)
    print("both agree")


if __name__ == "__main__":
    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    main()
    dist.destroy_process_group()
