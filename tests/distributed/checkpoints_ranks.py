"""One rank, run by test_checkpoints.py: interrupted computations resume on another number of ranks."""

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, own, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

from hodiff import HessianOperator, InputError
from hodiff.estimators import Checkpoint, eigsh, solve, spectral_density

TRIALS = 5
# Of the run: beside the folder of the rendezvous file.
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else ".").absolute().parent.parent
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(8, 6, generator=generator, dtype=D), torch.randint(4, (8,), generator=generator)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 4)).to(D)


def operator(module: nn.Module, data: Any, group: Any) -> HessianOperator:
    def loss(p: Any, batch: Any) -> Tensor:
        return F.cross_entropy(functional_call(module, p, (batch[0],)), batch[1])

    return HessianOperator(loss, dict(module.named_parameters()), data=[data], process_group=group)


def compute(name: str, A: Any, ones: Any, **options: Any) -> dict[str, Tensor]:
    """Run one computation, and return its numbers."""
    if name == "eigsh":
        found = eigsh(A, 3, which="LA", method="lanczos", restart=8, tol=1e-8, max_iterations=500, **options)
        return {"eigenvalues": found.eigenvalues}
    if name == "solve":
        solution = solve(A, ones, damping=30.0, tol=1e-10, **options).value
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in solution.values()]
        return {"solution": torch.cat([each.flatten() for each in whole])}
    density = spectral_density(A, samples=3, steps=9, **options)
    return {"ritz_values": density.ritz_values, "weights": density.weights}


LAST = {"eigsh": 20, "solve": 8, "spectral_density": 16}  # number of products before the interruption


def ones_like(A: Any) -> Any:
    return {name: torch.ones_like(each) for name, each in A.to_tree(torch.ones(A.shape[1], dtype=D)).items()}


def interrupt(A: Any, name: str, last: int) -> None:
    """Let an operator raise after some products."""
    multiply, done = A.multiply, [0]

    def counting(block: Tensor) -> Tensor:
        done[0] += block.shape[1]
        if done[0] > last:
            raise KeyboardInterrupt(name)
        return multiply(block)

    A.multiply = counting


def checkpoints() -> None:
    sharded, count = model(), dist.get_world_size()
    for each in (sharded[0], sharded):
        fully_shard(each, mesh=init_device_mesh("cpu", (count,)))
    data, group = (own(X), own(Y)), dist.group.WORLD
    started = (FOLDER / "states").exists()
    dist.barrier()
    for name, last in LAST.items():
        A = operator(sharded, data, group)
        if not started:
            interrupt(A, name, last)
            with pytest.raises(KeyboardInterrupt, match=name):
                compute(name, A, ones_like(A), checkpoint=Checkpoint(FOLDER / "states" / name, every=5))
            continue
        folder = FOLDER / str(count) / name
        if dist.get_rank() == 0:
            shutil.copytree(FOLDER / "states" / name, folder)
        dist.barrier()
        B = operator(model(), (X, Y), None)
        found, truth = compute(name, A, ones_like(A), checkpoint=folder), compute(name, B, ones_like(B))
        for key, numbers in truth.items():
            torch.testing.assert_close(found[key], numbers, rtol=1e-8, atol=1e-8)
        with pytest.raises(InputError, match="expected the operator whose state is in"):
            compute(name, 1.01 * A, ones_like(A), checkpoint=folder)
    if started:
        with pytest.raises(InputError, match="another k"):
            eigsh(A, 2, which="LA", method="lanczos", restart=8, tol=1e-8, checkpoint=FOLDER / str(count) / "eigsh")
    if started and count > 1:
        with pytest.raises(InputError, match="expected one process or sharded parameters"):
            eigsh(B, 2, method="lanczos", checkpoint=FOLDER / "other")


def damage() -> None:
    """Flipped bytes and truncations of every file end in an error on all ranks, or in the right numbers."""
    count, folder, draw = dist.get_world_size(), FOLDER / "damaged", random.Random(0)
    if count == 1 or not (FOLDER / "states").exists() or folder.exists():
        return
    dist.barrier()
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (count,)))
    A = operator(sharded, (own(X), own(Y)), dist.group.WORLD)
    truth = compute("solve", A, ones_like(A), checkpoint=Checkpoint(folder, every=5))["solution"]
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    assert len(files) == 2 + count
    for file in files:
        whole, refused = file.read_bytes(), 0
        for _ in range(TRIALS):
            dist.barrier()
            place, change, cut = draw.randrange(len(whole)), draw.randrange(1, 256), draw.random() < 0.5
            if dist.get_rank() == 0:
                file.write_bytes(whole[:place] + (b"" if cut else bytes([whole[place] ^ change]) + whole[place + 1 :]))
            dist.barrier()
            try:
                found = compute("solve", A, ones_like(A), checkpoint=folder)["solution"]
            except InputError as error:
                assert file.name in str(error) or "another rank" in str(error)  # noqa: PT017 - the right numbers are allowed, too
                refused += 1
            else:
                assert torch.equal(found, truth)
        assert refused > TRIALS / 2
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole)


if __name__ == "__main__":
    run(checkpoints, damage)
