"""Tests of per-sample gradients against `torch.func.vmap` of the gradient of one example's own loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import close
from operators.test_exact_diagonal import HARD, hard_problem
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff import per_sample
from hodiff.operators.per_example import separate_gradients

# Models of `test_exact_diagonal` whose examples are independent.
APART = sorted(HARD.keys() - {"batch-norm", "centered", "averaged", "hidden-coupling"})


def one_by_one(model: Any, loss: Any, x: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Compute the gradient of each example's own loss by plain reverse mode."""
    rows = []
    for n in range(len(inputs)):
        moved = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
        value = loss(functional_call(model, moved, (inputs[n : n + 1],)), targets[n : n + 1])
        found = torch.autograd.grad(value, list(moved.values()), allow_unused=True)
        rows.append([torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, moved.values(), strict=True)])
    return {name: torch.stack(each) for name, each in zip(x, zip(*rows, strict=True), strict=True)}


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([leaf.flatten(1) for leaf in tree.values()], 1)


@pytest.mark.parametrize("name", APART)
def test_every_function_matches_gradients_one_by_one(name: str) -> None:
    problem = hard_problem(name)
    rows = one_by_one(*problem)
    found = per_sample.gradients(*problem)
    assert list(found) == list(rows)
    close(flat(found), flat(rows))
    close(per_sample.norms(*problem), flat(rows).norm(dim=1))
    moments = per_sample.moments(*problem)
    for key, row in rows.items():
        close(moments.mean[key], row.mean(0))
        close(moments.second_moment[key], row.square().mean(0))
        close(moments.variance[key], row.var(0))
    noise = per_sample.noise_scale(*problem)
    trace = float(flat(rows).var(0).sum())
    assert noise.trace == pytest.approx(trace, rel=1e-10)
    assert noise.squared_norm == pytest.approx(float(flat(rows).mean(0).square().sum()) - trace / len(flat(rows)))
    assert noise.examples == moments.examples == len(flat(rows))
    expected = noise.trace / noise.squared_norm if noise.squared_norm > 0 else float("inf")
    assert float(noise) == expected


def test_noise_scale_of_independent_estimates() -> None:
    """The estimates of McCandlish et al., appendix A.1, from batches of one example and of all examples."""
    torch.manual_seed(0)
    inputs, targets, w = torch.randn(50, 3).double() + 2, torch.randn(50).double(), torch.ones(3).double()
    found = per_sample.noise_scale(lambda w, inputs: inputs @ w, F.mse_loss, w, inputs, targets)
    each = 2 * (inputs @ w - targets)[:, None] * inputs
    small, big, B = each.square().sum(1).mean(), each.mean(0).square().sum(), 50
    squared_norm, trace = (B * big - small) / (B - 1), (small - big) / (1 - 1 / B)
    assert found.value == pytest.approx(float(trace / squared_norm), rel=1e-12)


@pytest.mark.parametrize("shape", [(6, 20, 30), (6, 40, 2)])
def test_norms_of_shared_weights_by_both_formulas(shape: tuple[int, int, int]) -> None:
    """Few places take inner products of places, many places the gradients."""
    torch.manual_seed(0)
    width = shape[2]
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Flatten(), nn.Linear(shape[1] * width, 2)).double()
    problem = model, F.cross_entropy, dict(model.named_parameters()), torch.randn(shape).double(), torch.arange(6) % 2
    close(per_sample.norms(*problem), flat(one_by_one(*problem)).norm(dim=1).detach())


WEIGHTED = partial(F.cross_entropy, weight=torch.tensor([0.5, 2.0, 1.0, 1.0, 0.0]).double(), ignore_index=3)


@pytest.mark.parametrize("loss", [F.cross_entropy, WEIGHTED, partial(F.cross_entropy, label_smoothing=0.1)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_and_sums_over_batches(loss: Any, reduction: str) -> None:
    """The mean of the gradients is the gradient of the mean, however the data are cut."""
    model, _, x, tokens, targets = hard_problem("tied")
    targets[0] = 3
    loss = partial(loss, reduction=reduction)
    whole = per_sample.gradients(model, loss, x, tokens, targets, reduction=reduction)
    moved = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    value = loss(functional_call(model, moved, (tokens,)), targets)
    for (_name, row), true in zip(whole.items(), torch.autograd.grad(value, list(moved.values())), strict=True):
        close(row.mean(0) if reduction == "mean" else row.sum(0), true)
    if loss.func is F.cross_entropy and reduction == "mean" and "ignore_index" in loss.keywords:
        assert not flat(whole)[0].any()
        assert flat(whole)[1].any()
    # The first batch has no target that counts.
    cut = {"data": [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])], "reduction": reduction}
    close(flat(per_sample.gradients(model, loss, x, **cut)), flat(whole))
    close(per_sample.norms(model, loss, x, **cut), flat(whole).norm(dim=1))
    close(per_sample.moments(model, loss, x, **cut).variance["norm.bias"], whole["norm.bias"].var(0))
    one = per_sample.noise_scale(model, loss, x, tokens, targets, reduction=reduction)
    assert per_sample.noise_scale(model, loss, x, **cut).trace == pytest.approx(one.trace)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sum(1) - targets).abs().mean()


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - outputs[:, 0].roll(1)).relu().mean()


def test_losses_that_are_not_torchs() -> None:
    model, _, x, inputs, targets = hard_problem("attention")
    problem = model, own_loss, x, inputs, targets.double()
    close(flat(per_sample.gradients(*problem)), flat(one_by_one(*problem)))
    # Cut into batches, the mean needs to know its divisor only if it is not the number of examples.
    batches = [(inputs[:1], targets[:1].double()), (inputs[1:], targets[1:].double())]
    close(flat(per_sample.gradients(model, own_loss, x, data=batches)), flat(one_by_one(*problem)))


@pytest.mark.parametrize("loss", [hinge, lambda z, y: z.square().mean().sqrt()])
@pytest.mark.parametrize("function", [per_sample.gradients, per_sample.norms, per_sample.moments])
def test_losses_that_couple_examples_raise(loss: Any, function: Callable[..., Any]) -> None:
    model, _, x, inputs, targets = hard_problem("attention")
    with pytest.raises(hodiff.InputError, match="per_sample: loss: expected a mean or sum over independent examples"):
        function(model, loss, x, inputs, targets)


@pytest.mark.parametrize(
    "function", [per_sample.gradients, per_sample.norms, per_sample.moments, per_sample.noise_scale]
)
@pytest.mark.parametrize("name", ["batch-norm", "centered", "averaged", "hidden-coupling"])
def test_models_that_couple_examples_raise(name: str, function: Callable[..., Any]) -> None:
    named = "'2', BatchNorm2d" if name == "batch-norm" else "got gradients of '"
    with pytest.raises(hodiff.InputError, match=f"per_sample: model: expected independent examples.*{named}"):
        function(*hard_problem(name))
    if name == "batch-norm":
        problem = hard_problem(name)
        problem[0].eval()
        function(*problem)


def test_fixed_dropout_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2)).double()
    problem = model, F.cross_entropy, dict(model.named_parameters()), torch.randn(5, 4).double(), torch.arange(5) % 2
    with pytest.raises(hodiff.InputError, match="Dropout"):
        per_sample.norms(*problem)
    rows = per_sample.gradients(*problem, randomness="fixed")
    # The bias of the last layer has the gradient of the outputs; half of the hidden units are dropped.
    dropped = (rows["2.weight"] == 0).all(1).double().mean()
    assert 0.3 < dropped < 0.7


class _Scaled(nn.Module):
    """A layer, and a parameter outside of layers that multiplies a function of an example."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale, self.function = (
            nn.Linear(4, 3).double(),
            nn.Parameter(torch.randn(3).double()),
            function,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x) * self.scale)


@pytest.mark.parametrize(
    ("function", "one_by_one_too"),
    [(torch.tanh, False), (lambda h: h.tanh() if h.sum().item() > -1e9 else h, True)],
    ids=["vmap", "values-decide"],
)
def test_parameters_outside_of_layers_by_vmap_if_it_supports_the_model(
    function: Any, one_by_one_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, evaluated = _Scaled(function), []
    example = separate_gradients.SeparateGradients._example
    monkeypatch.setattr(
        separate_gradients.SeparateGradients, "_example", lambda self, n: evaluated.append(n) or example(self, n)
    )
    problem = model, F.mse_loss, dict(model.named_parameters()), torch.randn(5, 4).double(), torch.randn(5, 3).double()
    rows = one_by_one(*problem)
    close(flat(per_sample.gradients(*problem)), flat(rows))
    close(per_sample.norms(*problem), flat(rows).norm(dim=1))
    close(per_sample.moments(*problem).second_moment["scale"], rows["scale"].square().mean(0))
    assert bool(evaluated) == one_by_one_too


class _Forces(nn.Module):
    """The gradients of an energy in its inputs, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.energy(row)[0]))(x)


def test_layers_within_torch_func() -> None:
    torch.manual_seed(0)
    model = _Forces()
    problem = model, F.mse_loss, dict(model.named_parameters()), torch.randn(5, 4).double(), torch.randn(5, 4).double()
    rows = flat(one_by_one(*problem))
    close(flat(per_sample.gradients(*problem)), rows)
    close(per_sample.norms(*problem), rows.norm(dim=1))
    G = hodiff.GaussNewtonOperator(*problem)
    close(G.diagonal(exact=True).value, G.to_dense().diagonal())


class _Autocast(nn.Module):
    """A layer, and a parameter outside of layers, in bfloat16 within float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).float() * self.scale


def test_autocast_rounds_but_does_not_couple() -> None:
    torch.manual_seed(0)
    model = _Autocast()
    problem = model, F.mse_loss, dict(model.named_parameters()), torch.randn(6, 4), torch.randn(6, 3)
    expected = flat(one_by_one(*problem)).norm(dim=1)
    torch.testing.assert_close(per_sample.norms(*problem), expected, rtol=0.02, atol=0)


def test_refusals() -> None:
    problem = hard_problem("folded")
    with pytest.raises(hodiff.InputError, match="per_sample: data: expected two examples"):
        per_sample.moments(*problem[:3], problem[3][:1], problem[4][:1])
    with pytest.raises(hodiff.InputError, match="per_sample: reduction: expected 'sum'"):
        per_sample.norms(problem[0], partial(F.cross_entropy, reduction="sum"), *problem[2:])
    with pytest.raises(hodiff.InputError, match="per_sample: data: expected an iterable"):
        per_sample.norms(*problem[:3], data=3)


def test_ignored_targets_and_empty_batches_have_zero_gradients() -> None:
    model, inputs = torch.nn.Linear(3, 3).double(), torch.randn(4, 3).double()
    x = {name: p.detach() for name, p in model.named_parameters()}
    ignored = torch.full((4,), -100)
    norms = hodiff.per_sample.norms(model, F.cross_entropy, x, inputs, ignored)
    assert torch.equal(norms, torch.zeros(4).double())
    assert hodiff.per_sample.gradients(model, F.cross_entropy, x, inputs[:0], ignored[:0])["weight"].shape == (0, 3, 3)
    summed = partial(F.cross_entropy, reduction="sum")
    data = [(inputs, torch.tensor([0, 1, 2, 0])), (inputs[:0], ignored[:0])]
    G = hodiff.GaussNewtonOperator(model, summed, x, data=data, reduction="sum")
    torch.testing.assert_close(G.diagonal(exact=True).value, G.to_dense().diagonal())
    A = hodiff.EmpiricalFisherOperator(model, summed, x, data=data, reduction="sum")
    torch.testing.assert_close(A.diagonal(exact=True).value, A.to_dense().diagonal())


def test_outputs_that_are_not_finite_are_named() -> None:
    model, inputs = torch.nn.Linear(3, 3), torch.ones(4, 3)
    inputs[1, 0] = torch.nan
    x = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(hodiff.InputError, match="model: expected finite outputs"):
        hodiff.per_sample.norms(model, F.cross_entropy, x, inputs, torch.zeros(4, dtype=torch.long))
