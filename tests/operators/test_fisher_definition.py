"""Tests of Fisher matrices against their definition, the sum over targets of p(y) g gᵀ, and over uneven batches."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import close
from slow_cases import slow_except
from torch import Tensor, nn

import hodiff
from hodiff import InputError
from hodiff.operators import EmpiricalFisherOperator, FisherOperator, GaussNewtonOperator

GENERATOR = torch.Generator().manual_seed(0)
N, LENGTH, FEATURES, CLASSES = 5, 3, 2, 4
W = torch.randn(FEATURES, CLASSES, generator=GENERATOR, dtype=torch.float64)
INPUTS = torch.randn(N, LENGTH, FEATURES, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(CLASSES, (N, LENGTH), generator=GENERATOR)
# The batches are uneven: two tokens count in batch one, and six in batch two.
PADDED = LABELS.masked_fill(torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1], [1, 0, 1]]).bool(), -100)
CUT = 2


def logits(w: Tensor, inputs: Tensor) -> Tensor:
    return ((inputs @ w).tanh() * 2).movedim(-1, 1)


def log_probabilities(w: Tensor, inputs: Tensor) -> Tensor:
    return logits(w, inputs).log_softmax(1)


def probabilities(w: Tensor, inputs: Tensor) -> Tensor:
    return logits(w, inputs).sigmoid()


def categorical(z: Tensor) -> Any:
    return [(p, torch.tensor(c)) for c, p in enumerate(z.softmax(0))]


def bernoulli(p: Tensor) -> Any:
    return [(p, torch.ones_like(p)), (1 - p, torch.zeros_like(p))]


def definition(
    model: Any, loss: Any, outcomes: Callable[[Tensor], Any], counted: Tensor, w: Tensor = W, inputs: Tensor = INPUTS
) -> Tensor:
    """Sum over all factors and targets, with torch's plain first derivatives."""
    total, count = torch.zeros(w.numel(), w.numel(), dtype=w.dtype), 0
    for i, t in counted.nonzero().tolist():
        leaf = w.clone().requires_grad_()
        z = model(leaf, inputs[i : i + 1, t : t + 1])[0, :, 0]
        for factor in (z,) if outcomes is categorical else z:
            for p, y in outcomes(factor.detach()):
                value = loss(factor[None], y[None]) if outcomes is categorical else loss(factor, y)
                g = torch.autograd.grad(value, leaf, retain_graph=True)[0].flatten()
                total += p * torch.outer(g, g)
            count += 1
    return total / count


KNOWN = {
    "cross_entropy": (logits, F.cross_entropy, categorical),
    "smoothed": (logits, partial(F.cross_entropy, label_smoothing=0.3), categorical),
    "smoothed module": (logits, nn.CrossEntropyLoss(label_smoothing=0.3), categorical),
    "nll_loss": (log_probabilities, F.nll_loss, categorical),
    "NLLLoss": (log_probabilities, nn.NLLLoss(), categorical),
    "binary_cross_entropy": (probabilities, F.binary_cross_entropy, bernoulli),
    "BCELoss": (probabilities, nn.BCELoss(), bernoulli),
    "with logits": (logits, F.binary_cross_entropy_with_logits, None),
}


def targets_for(outcomes: Any, padded: bool) -> Tensor:
    if outcomes is categorical:
        return PADDED if padded else LABELS
    return LABELS[:, None].remainder(2).expand(N, CLASSES, LENGTH).double()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("padded", slow_except([True, False], [True], {False: "whole", True: "padded"}.get))
@pytest.mark.parametrize("name", KNOWN)
def test_fisher_matches_its_definition(name: str, padded: bool) -> None:
    """The matrix is correct for all examples at once, and for two batches with unequal numbers of counted labels."""
    model, loss, outcomes = KNOWN[name]
    y = targets_for(outcomes, padded)
    counted = (y != -100) if outcomes is categorical else torch.ones(N, LENGTH)
    if outcomes is None:
        expected = definition(probabilities, F.binary_cross_entropy, bernoulli, counted)
    else:
        expected = definition(model, loss, outcomes, counted)
    A = FisherOperator(model, loss, W, INPUTS, y)
    close(A.to_dense(), expected)
    v = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).double()
    close(A @ v, expected @ v)
    close(A @ v[:, 0], expected @ v[:, 0])
    batches = [(INPUTS[:CUT], y[:CUT]), (INPUTS[CUT:], y[CUT:])]
    close(FisherOperator(model, loss, W, data=batches).to_dense(), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in KNOWN if name != "smoothed module"])
def test_monte_carlo_estimates_converge(name: str) -> None:
    """Labels are drawn likewise for a smoothed function and module, so that the function stands for both."""
    model, loss, outcomes = KNOWN[name]
    y = targets_for(outcomes, True)
    expected = FisherOperator(model, loss, W, INPUTS, y).to_dense()
    batches = [(INPUTS[:CUT], y[:CUT]), (INPUTS[CUT:], y[CUT:])]
    drawn = FisherOperator(model, loss, W, data=batches, samples=3000).to_dense()
    assert float((drawn - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("name", ["smoothed", "nll_loss", "binary_cross_entropy"])
def test_sum_reduction_is_a_multiple_of_mean(name: str) -> None:
    model, loss, outcomes = KNOWN[name]
    y = targets_for(outcomes, True)
    mean = FisherOperator(model, loss, W, INPUTS, y).to_dense()
    loss = partial(loss, reduction="sum")
    count = (y != -100).sum() if outcomes is categorical else y.numel()
    close(FisherOperator(model, loss, W, INPUTS, y, reduction="sum").to_dense(), mean * count)


def test_float32_matches_float64() -> None:
    exact = FisherOperator(log_probabilities, F.nll_loss, W, INPUTS, PADDED).to_dense()
    single = FisherOperator(log_probabilities, F.nll_loss, W.float(), INPUTS.float(), PADDED).to_dense()
    close(single.double(), exact, 1e-6)


# Inductor imports TorchScript, which warns of its deprecation.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_compiled_products_match() -> None:
    for name in ("smoothed", "nll_loss"):
        model, loss, _ = KNOWN[name]
        eager = FisherOperator(model, loss, W, INPUTS, PADDED)
        compiled = FisherOperator(model, loss, W, INPUTS, PADDED, compile=True)
        v = torch.ones(8).double()
        close(compiled @ v, eager @ v)


def test_certain_probabilities_have_finite_information() -> None:
    """A probability of 1 in floating point has zero information, not inf."""
    w = torch.full((1, 1), 100.0)
    A = FisherOperator(lambda w, x: (x @ w).sigmoid(), F.binary_cross_entropy, w, torch.ones(2, 1), torch.ones(2, 1))
    assert A.to_dense().item() == 0.0


def test_rejects_outputs_that_are_no_log_probabilities() -> None:
    for samples in (None, 2):
        A = FisherOperator(logits, F.nll_loss, W, INPUTS, LABELS, samples=samples)
        with pytest.raises(InputError, match=r"model: expected log-probabilities .* apply log_softmax"):
            A.to_dense()


@pytest.mark.parametrize("kind", [GaussNewtonOperator, FisherOperator])
def test_matrix_does_not_depend_on_the_batch_split(kind: Any) -> None:
    """Splitting the data gives the same matrix for ignored labels, class weights and sequences of different lengths."""
    batches = [(INPUTS[:CUT], PADDED[:CUT]), (INPUTS[CUT:], PADDED[CUT:])]
    whole = kind(logits, F.cross_entropy, W, INPUTS, PADDED).to_dense()
    close(kind(logits, F.cross_entropy, W, data=batches).to_dense(), whole)
    shorter = [(INPUTS[:CUT, :1], LABELS[:CUT, :1]), (INPUTS[CUT:], LABELS[CUT:])]
    flat = [
        (torch.cat([x.reshape(-1, 1, FEATURES) for x, _ in shorter]), torch.cat([y.reshape(-1, 1) for _, y in shorter]))
    ]
    close(
        kind(logits, F.cross_entropy, W, data=shorter).to_dense(),
        kind(logits, F.cross_entropy, W, data=flat).to_dense(),
    )
    if kind is GaussNewtonOperator:
        loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 1.0, 5.0]).double())
        whole = kind(logits, loss, W, INPUTS, PADDED).to_dense()
        close(kind(logits, loss, W, data=batches).to_dense(), whole)
    given = kind(logits, F.cross_entropy, W, data=batches, batch_size=lambda batch: len(batch[0])).to_dense()
    assert float((given - whole).abs().max()) > 1e-6


# torch's mean losses of such labels are 0/0.
UNCOUNTED = {
    "ignored": (F.cross_entropy, torch.full_like(PADDED, -100)),
    "of weight 0": (nn.CrossEntropyLoss(weight=torch.tensor([0.0, 2.0, 1.0, 5.0]).double()), 0 * PADDED),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "name"),
    # A loss with class weights is not a likelihood.
    [(FisherOperator, "ignored"), *itertools.product((GaussNewtonOperator, EmpiricalFisherOperator), UNCOUNTED)],
)
def test_batches_without_counted_labels_do_not_count(kind: Any, name: str, place: int) -> None:
    loss, labels = UNCOUNTED[name]
    batches = [(INPUTS[:CUT], PADDED[:CUT]), (INPUTS[CUT:], PADDED[CUT:])]
    more = [*batches[:place], (INPUTS, labels), *batches[place:]]
    joined = [torch.cat(parts) for parts in zip(*more, strict=True)]
    for cache in (True, False):
        A = kind(logits, loss, W, data=more, cache=cache)
        close(A.to_dense(), kind(logits, loss, W, data=batches).to_dense())
        close((A @ W).flatten(), kind(logits, loss, W, *joined).to_dense() @ W.flatten())
    if kind is FisherOperator:
        close(*(kind(logits, loss, W, data=data, samples=3).to_dense() for data in (more, batches)))
    with pytest.raises(InputError, match="data: expected a target that counts in the loss"):
        kind(logits, loss, W, data=[(INPUTS, labels)]).to_dense()
    for empty, options in (
        ((INPUTS[:0], labels[:0]), {}),
        ((INPUTS, labels), {"batch_size": lambda batch: (batch[1] > 0).sum()}),
    ):
        with pytest.raises(InputError, match="batch_size: expected a positive number"):
            kind(logits, loss, W, data=[*batches, empty], **options).to_dense()


def test_empirical_fisher_counts_examples_over_batches() -> None:
    """One example per output row: batch one has an ignored example, and batch two has none."""
    labels = LABELS[:, :1].clone()
    labels[:CUT] = torch.tensor([[-100], [1]])
    inputs = INPUTS[:, :1]
    whole = EmpiricalFisherOperator(logits, F.cross_entropy, W, inputs, labels).to_dense()
    batches = [(inputs[:CUT], labels[:CUT]), (inputs[CUT:], labels[CUT:])]
    close(EmpiricalFisherOperator(logits, F.cross_entropy, W, data=batches).to_dense(), whole)


OF_CLASSES = torch.tensor([0.1, 2.0, 1.0, 5.0], dtype=torch.float64)
ONE_HOT = F.one_hot(LABELS, CLASSES).movedim(-1, 1).double()
COUNTED = PADDED[PADDED != -100]


def masked_mean(z: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    total = F.cross_entropy(z, y, reduction="sum")
    return total / (y != -100).sum() if reduction == "mean" else total


weighted = partial(F.cross_entropy, weight=OF_CLASSES)
smoothed = partial(weighted, label_smoothing=0.2)
with_logits = partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0).double())
# Loss, targets, the divisor of the mean, and the number of factors.
CUT_ALIKE = {
    "class weights": (weighted, LABELS, OF_CLASSES[LABELS].sum(), LABELS.numel()),
    "ignored, too": (nn.CrossEntropyLoss(weight=OF_CLASSES), PADDED, OF_CLASSES[COUNTED].sum(), len(COUNTED)),
    "smoothed": (smoothed, LABELS, OF_CLASSES[LABELS].sum(), LABELS.numel()),
    "labels that are probabilities": (weighted, 0.9 * ONE_HOT + 0.025, LABELS.numel(), LABELS.numel()),
    "weights of logits": (with_logits, ONE_HOT, ONE_HOT.numel(), ONE_HOT.numel()),
    "another loss": (masked_mean, PADDED, len(COUNTED), N),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cuts", [[2, 3], [1, 4], [1] * 5])
@pytest.mark.parametrize(("loss", "targets", "divisor", "factors"), CUT_ALIKE.values(), ids=CUT_ALIKE)
def test_empirical_fisher_does_not_depend_on_the_batch_split(
    loss: Any, targets: Tensor, divisor: Any, factors: Any, cuts: list[int]
) -> None:
    """The matrix is M / D^2 times the sum of outer products of gradients that are not divided by a mean."""
    summed = partial(loss, reduction="sum") if not isinstance(loss, nn.Module) else copy.copy(loss)
    if isinstance(summed, nn.Module):
        summed.reduction = "sum"
    rows = []
    for i in range(N):
        leaf = W.clone().requires_grad_()
        value = summed(logits(leaf, INPUTS[i : i + 1]), targets[i : i + 1])
        rows.append(torch.autograd.grad(value, leaf)[0].flatten())
    G = torch.stack(rows)
    expected = factors / divisor**2 * G.T @ G
    close(EmpiricalFisherOperator(logits, loss, W, INPUTS, targets).to_dense(), expected)
    data = list(zip(INPUTS.split(cuts), targets.split(cuts), strict=True))
    told = {"batch_size": lambda batch: (batch[1] != -100).sum()} if loss is masked_mean else {}
    for options in ({}, {"cache": False}):
        A = EmpiricalFisherOperator(logits, loss, W, data=data, **told, **options)
        close(A.to_dense(), expected)
        close((A @ W).flatten(), expected @ W.flatten())
        close(A.diagonal().value, expected.diagonal())
    close(EmpiricalFisherOperator(logits, summed, W, data=data, reduction="sum").to_dense(), G.T @ G)


def test_dict_batches_are_accepted() -> None:
    """Batches may be a dict of inputs with separate labels, or a dict that both functions get, as from tokenizers."""
    batches = [{"tokens": INPUTS[:CUT], "labels": PADDED[:CUT]}, {"tokens": INPUTS[CUT:], "labels": PADDED[CUT:]}]
    expected = FisherOperator(logits, F.cross_entropy, W, INPUTS, PADDED).to_dense()
    model = lambda w, batch: logits(w, batch["tokens"])  # noqa: E731
    pairs = [(batch, batch["labels"]) for batch in batches]
    close(FisherOperator(model, F.cross_entropy, W, data=pairs).to_dense(), expected)
    G = hodiff.GaussNewtonOperator(
        *(model, lambda z, batch: F.cross_entropy(z, batch["labels"]), W),
        data=batches,
        batch_size=lambda batch: int((batch["labels"] != -100).sum()),
    )
    close(G.to_dense(), expected)


def test_sample_weights_are_float64() -> None:
    """The quotient of 8 labels and 3 samples is not representable in float32."""
    mean = FisherOperator(logits, F.cross_entropy, W, INPUTS, PADDED, samples=3).to_dense()
    loss = partial(F.cross_entropy, reduction="sum")
    summed = FisherOperator(logits, loss, W, INPUTS, PADDED, samples=3, reduction="sum").to_dense()
    close(mean * (PADDED != -100).sum(), summed)
