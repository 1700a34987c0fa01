"""Training on Hessian-vector products: derivatives against closed forms, and better Hessians for the same steps."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "hessian_training.py"))


def test_products_of_a_batch() -> None:
    x = EXAMPLE["sample"](3, torch.Generator().manual_seed(0)).double()
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    _, slope, product = EXAMPLE["derivatives"](EXAMPLE["lennard_jones"], x, v)
    for one, along, found_slope, found in zip(x, v, slope, product, strict=True):

        def energy(x: torch.Tensor) -> torch.Tensor:
            return EXAMPLE["lennard_jones"](x[None]).sum()

        torch.testing.assert_close(found_slope, torch.func.grad(energy)(one))
        H = torch.func.hessian(energy)(one)
        torch.testing.assert_close(found, torch.einsum("iajb,jb->ia", H, along))


def test_loss_of_products_reaches_the_weights() -> None:
    torch.manual_seed(0)
    model = EXAMPLE["Potential"](8).double()
    x = EXAMPLE["sample"](2, torch.Generator().manual_seed(0)).double()
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    weight = model.atom[2].weight

    def loss() -> torch.Tensor:
        return EXAMPLE["derivatives"](model, x, v)[2].square().mean()

    (slope,) = torch.autograd.grad(loss(), weight)
    step, ends = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            weight[3, 5] += sign * step
        ends.append(loss().item())
        with torch.no_grad():
            weight[3, 5] -= sign * step
    assert slope[3, 5].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.mark.slow
def test_whole_example(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"](["--quick"])
    output = capsys.readouterr().out
    curve = [[float(each) for each in row.split()] for row in re.findall(r"^\d+ .*$", output, re.MULTILINE)]
    assert [row[0] for row in curve] == [66, 132, 198, 264, 330, 396]
    _, _, plain, slow, _, curved, fast = curve[-1]
    assert curved < 0.85 * plain
    assert fast < 0.9 * slow
    # Both learn, and those on products learn Hessians faster from early on.
    assert curve[-1][2] < 0.9 * curve[0][2]
    assert curve[2][5] < curve[2][2]
    assert len(re.findall(r"ms a step, [\d.]+ gradients$", output, re.MULTILINE)) == 2
