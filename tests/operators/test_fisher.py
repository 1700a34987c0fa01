"""Tests of Fisher matrices: exact, Monte Carlo, and empirical."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import MODELS, close, problem, unravel
from torch import Tensor, nn

import hodiff
from hodiff.operators import EmpiricalFisherOperator, FisherOperator, Likelihood

ALL = pytest.mark.parametrize("name", MODELS)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])
MODULES = {
    "mlp": nn.CrossEntropyLoss,
    "regression": nn.MSELoss,
    "soft-labels": nn.BCEWithLogitsLoss,
    "counts": nn.PoissonNLLLoss,
}


def distance(A: Any, expected: Tensor) -> float:
    return float((A.to_dense() - expected).norm() / expected.norm())


@ALL
@REDUCTIONS
def test_exact_fisher_matches_gauss_newton(name: str, reduction: str) -> None:
    p = problem(name)
    loss = partial(p.loss.function, reduction=reduction)
    A = FisherOperator(p.model, loss, p.x, data=p.batches(2), reduction=reduction)
    close(A.to_dense(), p.gauss_newton(reduction))


@pytest.mark.one_in(9)
@ALL
@REDUCTIONS
def test_monte_carlo_fisher_converges_to_exact(name: str, reduction: str) -> None:
    """The error falls like one over the square root of the number of samples, for every likelihood and layout."""
    p = problem(name)
    loss = partial(p.loss.function, reduction=reduction)
    exact = p.gauss_newton(reduction)
    errors = {}
    for samples in (40, 4000):
        few = [
            FisherOperator(
                *(p.model, loss, p.x, p.inputs, p.targets),
                samples=samples,
                reduction=reduction,
                generator=torch.Generator().manual_seed(seed),
            )
            for seed in range(3)
        ]
        errors[samples] = sum(distance(A, exact) ** 2 for A in few) ** 0.5
    # Theory gives one tenth. A deviation by a factor of three is far outside of chance.
    assert 0.03 < errors[4000] / errors[40] < 0.3
    assert errors[4000] < 0.2


@pytest.mark.parametrize("name", MODULES)
@REDUCTIONS
def test_loss_modules_match_loss_functions(name: str, reduction: str) -> None:
    p = problem(name)
    make = MODULES[name]
    A = FisherOperator(p.model, make(reduction=reduction), p.x, data=p.batches(2), reduction=reduction, samples=3)
    B = FisherOperator(
        p.model,
        partial(p.loss.function, reduction=reduction),
        p.x,
        data=p.batches(2),
        reduction=reduction,
        samples=3,
    )
    close(A.to_dense(), B.to_dense(), 1e-14)


@pytest.mark.parametrize("settings", [{"cache": True}, {"cache": False}, {"chunk_size": 2}])
def test_products_use_one_draw_of_targets(settings: dict[str, Any]) -> None:
    p = problem("sequence")
    A = FisherOperator(p.model, F.cross_entropy, p.x, data=p.batches(2, 3), samples=2, **settings)
    dense = A.to_dense()
    close(A.to_dense(), dense, 1e-14)
    v = torch.randn(A.shape[0]).double()
    close(A @ v, dense @ v)
    close(A.at(p.x).to_dense(), dense, 1e-14)
    close(A.block("bias").to_dense(), dense[-3:, -3:])
    close(ravel(A @ unravel(v, p.x)), dense @ v)


def test_draws_depend_on_the_generator_only() -> None:
    p = problem("mlp")

    def drawn(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        A = FisherOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets, samples=1, generator=generator)
        torch.randn(3)
        return A.to_dense()

    state = torch.get_rng_state()
    FisherOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets, samples=1).to_dense()
    assert torch.equal(torch.get_rng_state(), state)
    close(drawn(None), drawn(None), 0)
    close(drawn(3), drawn(3), 0)
    assert (drawn(3) - drawn(4)).abs().max() > 1e-3


def test_batches_draw_different_targets() -> None:
    """Two equal batches draw different targets, so their errors differ."""
    p = problem("mlp")
    twice = FisherOperator(p.model, F.cross_entropy, p.x, data=2 * p.batches(), samples=1).to_dense()
    once = FisherOperator(p.model, F.cross_entropy, p.x, data=p.batches(), samples=1).to_dense()
    assert (twice - once).abs().max() > 1e-3


@pytest.mark.parametrize("ignored", [-100, 1])
def test_ignored_targets_do_not_count(ignored: int) -> None:
    p = problem("sequence")
    targets = p.targets.clone()
    targets[0], targets[2, 1] = ignored, ignored
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    exact = FisherOperator(p.model, loss, p.x, p.inputs, targets).to_dense()
    drawn = FisherOperator(p.model, loss, p.x, p.inputs, targets, samples=4000)
    if ignored == -100:
        assert distance(drawn, exact) < 0.1
    else:
        # The ignored class can be drawn, and is then ignored like its position; the result stays finite.
        assert bool(torch.isfinite(drawn.to_dense()).all())


def test_user_likelihood_matches_closed_form() -> None:
    """The Fisher information of a location with Laplace noise is one over the squared scale."""

    def sample(z: Tensor, count: int, generator: torch.Generator) -> Tensor:
        u = torch.rand(count, *z.shape, generator=generator, dtype=z.dtype) - 0.5
        return z - u.sign() * torch.log1p(-2 * u.abs())

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (z - y).abs().mean()

    X = torch.randn(6, 2).double()
    A = FisherOperator(
        lambda w, x: x @ w,
        loss,
        torch.randn(2).double(),
        *(X, torch.zeros(6).double()),
        samples=500,
        likelihood=Likelihood(sample, Tensor.numel),
    )
    # The squared signs are 1 for every draw; only products of different examples are random.
    close(A.to_dense(), X.T @ X / 6)


@pytest.mark.parametrize("name", ["mlp", "regression", "soft-labels", "counts", "dict", "tied"])
@REDUCTIONS
def test_empirical_fisher_matches_sum_of_example_gradients(name: str, reduction: str) -> None:
    """The reference computes the gradient of one example at a time."""
    p = problem(name)
    f = p.objective(reduction)
    rows = []
    for example in p.batches(1, 2, 3, 4):
        leaves = {key: value.clone().requires_grad_() for key, value in p.x.items()}
        rows.append(ravel(list(torch.autograd.grad(f(leaves, example), list(leaves.values())))))
    G = torch.stack(rows)
    # The mean also averages over the elements of a row.
    numbers = p.targets[0].numel() if p.targets.is_floating_point() else 1
    expected = G.T @ G * (numbers / len(rows) if reduction == "mean" else 1)
    loss = partial(p.loss.function, reduction=reduction)
    for arguments, options in (((p.inputs, p.targets), {}), ((), {"data": p.batches(2)})):
        A = EmpiricalFisherOperator(p.model, loss, p.x, *arguments, reduction=reduction, **options)
        close(A.to_dense(), expected)
        v = torch.randn(A.shape[0]).double()
        close(A @ v, expected @ v)


@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits], ids=["squares", "bits"])
def test_empirical_fisher_averages_to_the_fisher_matrix(loss: Any) -> None:
    """Its mean over targets drawn from the model is the Fisher matrix, with bits enumerated and noise at two points."""
    w, inputs = torch.randn(3, 2).double(), torch.randn(4, 3).double()
    model = lambda w, x: x @ w  # noqa: E731
    z = model(w, inputs)
    total = torch.zeros(6, 6).double()
    for bits in itertools.product([0.0, 1.0], repeat=2):
        # Only the first two moments of the noise matter, and two points have them; all examples share the draw.
        y = torch.tensor(bits).double().expand(4, 2)
        if loss is F.mse_loss:
            targets, chances = z + (2 * y - 1) * 0.5**0.5, torch.full((4,), 0.25).double()
        else:
            targets, chances = y, (y * z.sigmoid() + (1 - y) * (-z).sigmoid()).prod(1)
        for i in range(4):
            one = EmpiricalFisherOperator(model, loss, w, inputs[i : i + 1], targets[i : i + 1])
            total += chances[i] * one.to_dense() / 4
    close(total, FisherOperator(model, loss, w, inputs, z.detach().sigmoid()).to_dense())


def test_empirical_fisher_of_sequences_and_several_outputs() -> None:
    p = problem("sequence")

    def both(x: Any, inputs: Tensor) -> Any:
        z = p.call(x, inputs)
        return z, z.square().sum(2)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets) + outputs[1].mean()

    rows = []
    for inputs, targets in p.batches(1, 2, 3, 4):
        leaves = {key: value.clone().requires_grad_() for key, value in p.x.items()}
        rows.append(ravel(list(torch.autograd.grad(loss(both(leaves, inputs), targets), list(leaves.values())))))
    G = torch.stack(rows)
    close(EmpiricalFisherOperator(both, loss, p.x, p.inputs, p.targets).to_dense(), G.T @ G / 5)


IGNORING = {
    "function": (F.cross_entropy, -100, None),
    "partial": (partial(F.cross_entropy, ignore_index=1), 1, None),
    "module": (nn.CrossEntropyLoss(ignore_index=2), 2, None),
    "log-probabilities": (nn.NLLLoss(), -100, None),
    "weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 3.0]).double()), -100, [0.5, 2.0, 3.0]),
    "weights of zero": (partial(F.cross_entropy, weight=torch.tensor([0.5, 2.0, 0.0]).double()), 2, [0.5, 2.0, 0.0]),
}


@pytest.mark.parametrize(("loss", "ignored", "weights"), IGNORING.values(), ids=IGNORING)
def test_empirical_fisher_omits_ignored_targets(loss: Any, ignored: int, weights: Any) -> None:
    """The reference sums the outer products of the loss terms, one example at a time."""
    generator = torch.Generator().manual_seed(0)
    w, inputs = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (3, 5))
    w = w.T
    model = lambda w, x: (x @ w).log_softmax(1)  # noqa: E731
    targets = torch.tensor([0, 1, 2, 0, 2]).masked_fill(torch.tensor([False, True, False, True, False]), ignored)
    of_classes = torch.tensor(weights or [1.0, 1.0, 1.0], dtype=torch.float64)
    kept = [i for i in range(5) if targets[i] != ignored]
    total = sum(float(of_classes[targets[i]]) for i in kept)
    rows = []
    for i in kept:
        leaf = w.clone().requires_grad_()
        share = -len(kept) * of_classes[targets[i]] / total * model(leaf, inputs[i : i + 1])[0, targets[i]]
        rows.append(torch.autograd.grad(share, leaf)[0].flatten())
    G = torch.stack(rows)
    leaf = w.clone().requires_grad_()
    close(G.mean(0), torch.autograd.grad(loss(model(leaf, inputs), targets), leaf)[0].flatten())
    A = EmpiricalFisherOperator(model, loss, w, inputs, targets)
    close(A.to_dense(), G.T @ G / len(kept))
    close(EmpiricalFisherOperator(model, loss, w, inputs[kept], targets[kept]).to_dense(), A.to_dense())


def test_empirical_fisher_counts_partly_ignored_sequences() -> None:
    w, inputs = torch.randn(4, 3).double(), torch.randn(3, 2, 4).double()
    targets = torch.tensor([[0, -100], [1, 2], [-100, -100]])
    model = lambda w, x: (x @ w).transpose(1, 2)  # noqa: E731
    rows = []
    for i in range(2):
        leaf = w.clone().requires_grad_()
        share = F.cross_entropy(model(leaf, inputs[i : i + 1]), targets[i : i + 1], reduction="sum")
        rows.append(torch.autograd.grad(share, leaf)[0].flatten())
    G = torch.stack(rows)
    close(EmpiricalFisherOperator(model, F.cross_entropy, w, inputs, targets).to_dense(), G.T @ G / 3)


def test_rejects_bad_arguments() -> None:
    p = problem("mlp")
    arguments = (p.x, p.inputs, p.targets)
    for samples in (0, 1.5, True):
        with pytest.raises(hodiff.InputError, match="samples: expected"):
            FisherOperator(p.model, F.cross_entropy, *arguments, samples=samples)
    with pytest.raises(hodiff.InputError, match="loss: expected a supported negative log-likelihood"):
        FisherOperator(p.model, F.l1_loss, *arguments)
    for loss in (
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.NLLLoss(weight=torch.ones(3)),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        nn.PoissonNLLLoss(log_input=False),
        partial(F.binary_cross_entropy, weight=torch.ones(3)),
    ):
        with pytest.raises(hodiff.InputError, match=r"loss: .* with (weight|pos_weight|log_input)"):
            FisherOperator(p.model, loss, *arguments)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    with pytest.raises(hodiff.InputError, match=r"expected CrossEntropyLoss without weight, .* use GaussNewtonOp"):
        FisherOperator(p.model, weighted, *arguments)
    # K-FAC refuses weights of smoothed labels, too.
    with pytest.raises(hodiff.InputError, match=r"got CrossEntropyLoss with weight; .* or EmpiricalFisherOperator\.$"):
        FisherOperator(p.model, nn.CrossEntropyLoss(weight=torch.ones(3), label_smoothing=0.1), *arguments)
    with pytest.raises(hodiff.InputError, match=r"expected poisson_nll_loss with log_input=True, .* with log_input;"):
        FisherOperator(p.model, partial(F.poisson_nll_loss, log_input=False), *arguments)
    with pytest.raises(hodiff.InputError, match="samples: expected an int with your own likelihood"):
        FisherOperator(p.model, F.l1_loss, *arguments, likelihood=Likelihood(lambda z, s, g: z, Tensor.numel))
    with pytest.raises(hodiff.InputError, match="generator: expected"):
        FisherOperator(p.model, F.cross_entropy, *arguments, samples=1, generator=3)


def test_rejects_single_example_without_batch_dimension() -> None:
    """Logits (C,) are refused: as C examples they would give a diagonal matrix on the outputs."""
    w, y = torch.randn(2, 3), torch.tensor(1)
    model = lambda w, x: x @ w  # noqa: E731
    for A in (
        EmpiricalFisherOperator(model, F.cross_entropy, w, torch.ones(2), y),
        FisherOperator(model, F.cross_entropy, w, torch.ones(2), y, samples=2),
    ):
        with pytest.raises(hodiff.InputError, match=r"model: expected outputs .* \(1, C\)"):
            A @ w
    with pytest.raises(hodiff.InputError, match="model: expected outputs"):
        EmpiricalFisherOperator(lambda w, x: w.sum() * x, F.mse_loss, w, torch.tensor(1.0), torch.tensor(2.0)) @ w
    with pytest.raises(hodiff.InputError, match="model: expected one tensor"):
        FisherOperator(
            lambda w, x: (x @ w, w), F.mse_loss, w, torch.ones(2), y, samples=1, check_deterministic=False
        ) @ w
    with pytest.raises(hodiff.InputError, match="model: expected outputs"):
        EmpiricalFisherOperator(
            lambda w, x: (x @ w, w), lambda z, y: z[0].sum() + z[1].sum(), w, torch.ones(4, 2), y
        ) @ w
