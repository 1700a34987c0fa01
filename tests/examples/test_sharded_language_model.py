"""The example prints the same curvature on one rank and on two, and the eigenvalues of the whole model's matrix."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import hodiff

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDTH = 4


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("sharded_language_model")


def printed(ranks: int) -> list[str]:
    """Run the example, and return the lines of its table."""
    options = "--ranks", str(ranks), "--width", str(WIDTH)
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", EXAMPLES / "sharded_language_model.py", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    check, shares, *lines = run.stdout.splitlines()
    assert ": ok" in check
    assert len(re.findall(r"[\d,]+ \(\d+\)", shares)) == ranks
    return lines


def joint_hessian(example: ModuleType) -> Tensor:
    """Return the dense Hessian over all lines as one batch, by torch's double backward of plain attention."""
    model = example.make_model(WIDTH)
    model.set_attn_implementation("eager")
    batches = example.load_batches(0, 1)
    assert len({example.predicted(batch) for batch in batches}) > 1
    inputs = {name: torch.cat([batch[0][name] for batch in batches]) for name in batches[0][0]}
    labels = torch.cat([batch[1] for batch in batches]).flatten()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    sizes = [each.numel() for each in parameters.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = zip(parameters.items(), flat.split(sizes), strict=True)
        logits = functional_call(
            model, {name: piece.view_as(each) for (name, each), piece in pieces}, (), inputs
        ).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels)

    flat = torch.cat([each.flatten() for each in parameters.values()])
    return torch.autograd.functional.hessian(loss, flat)


def dense_influences(example: ModuleType) -> Tensor:
    """Return the influences of all lines, by the dense matrix of one process and the gradient of each line alone."""
    model = example.Scores(WIDTH)
    x = example.multiplied(model)
    data = example.load_batches(0, 1)
    M = hodiff.EKFACOperator(model, F.cross_entropy, x, data=data, fisher="monte-carlo").to_dense()

    def gradient(line: str, reduction: str) -> Tensor:
        inputs, labels = example.batch_of([line])
        found = torch.autograd.grad(F.cross_entropy(model(inputs), labels, reduction=reduction), list(x.values()))
        return torch.cat([each.flatten() for each in found])

    damped = M + example.DAMPING * M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype)
    u = torch.linalg.solve(damped, gradient(example.QUERY, "mean"))
    characters = sum(len(line[: example.CONTEXT]) - 1 for line in example.training_lines())
    return torch.stack([gradient(line, "sum") @ u for line in example.training_lines()]) / characters


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_one_and_two_ranks_agree_with_dense_matrices(example: ModuleType) -> None:
    one, two = printed(1), printed(2)
    assert len(one) == 8
    assert one == two
    numbers = [float(line.split()[-1]) for line in one[:5]]
    expected = torch.linalg.eigvalsh(joint_hessian(example)).flip(0)[:2].tolist()
    assert numbers[:2] == pytest.approx(expected, rel=1e-5)
    found = [float(line.split()[-1]) for line in one[6:]]
    assert found == pytest.approx(dense_influences(example).topk(2).values.tolist(), rel=1e-5)
