"""The example on one rank and on two ranks prints the same eigenvalues."""

import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from example_process import example_process
from sklearn.datasets import load_digits

ALONE = (sys.executable,)
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def eigenvalues(launcher: tuple[str, ...], ranks: str) -> list[str]:
    options = ("--images", "41", "--hidden", "3", "--batch", "10")
    run = example_process("distributed_hessian", *options, launcher=launcher)
    assert run.returncode == 0, run.stderr
    assert f"41 images on {ranks}, 235 parameters" in run.stdout
    return re.findall(r"\d+\.\d{9}", run.stdout)


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_one_and_two_ranks_agree_with_the_dense_hessian() -> None:
    one, two = eigenvalues(ALONE, "1 rank"), eigenvalues(TWO, "2 ranks")
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert abs(float(a) - float(b)) < 1e-8
    for value, expected in zip(one, reference(), strict=True):
        assert abs(float(value) - expected) < 1e-7


def reference() -> list[float]:
    """Leading eigenvalues of the network's dense Hessian, by torch.autograd.functional."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 3), torch.nn.Tanh(), torch.nn.Linear(3, 10)).double()
    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(pixels[:41] / 16), torch.from_numpy(labels[:41])
    shapes = [p.shape for p in network.parameters()]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        W, b, V, c = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        return F.cross_entropy(torch.tanh(images @ W.T + b) @ V.T + c, labels)

    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat)).flip(0)[:3].tolist()
