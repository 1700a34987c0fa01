"""Losses that are negative log-likelihoods, and targets drawn from a model's predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.torch_internals.compilers.dynamo import original_of
from hodiff.torch_internals.modules import buffers_by_name


@dataclass(frozen=True)
class Likelihood:
    """The distribution whose negative log-density is a loss.

    Attributes:
        sample: Draws targets (S, *target shape) for outputs; takes outputs, S and a generator.
        factors: Number of independent factors in the density of given outputs, over which "mean" averages.
        ignored: A target value whose place does not count in the density, such as padding.
        information: The product of outputs' Fisher information with a vector, both in the outputs' shape and factor by
            factor, without the mean; None if it is the Hessian of the loss.
        normalized: Whether outputs are logarithms of probabilities.
    """

    sample: Callable[[Tensor, int, torch.Generator], Tensor]
    factors: Callable[[Tensor], int]
    ignored: int | None = None
    information: Callable[[Tensor, Tensor], Tensor] | None = None
    normalized: bool = False

    def like(self, drawn: Tensor, targets: Any) -> Tensor:
        """Return drawn targets (S, ...), with the ignored value where `targets` have it."""
        if self.ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
            return drawn
        return drawn.masked_fill(targets == self.ignored, self.ignored)

    def counted(self, outputs: Tensor, drawn: Tensor) -> Tensor | int:
        """Return the number of factors that count."""
        return self.factors(outputs) if self.ignored is None else (drawn != self.ignored).sum()


def _categorical(logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    probabilities = logits.movedim(class_dimension(logits), -1).softmax(-1)
    drawn = torch.multinomial(
        probabilities.reshape(-1, probabilities.shape[-1]), samples, replacement=True, generator=generator
    )
    return drawn.t().reshape(samples, *probabilities.shape[:-1])


def _gaussian(means: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    # The squared error without a factor 1/2 belongs to the variance 1/2.
    noise = torch.randn(samples, *means.shape, generator=generator, dtype=means.dtype, device=means.device)
    return means + 0.5**0.5 * noise


def _bernoulli(logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    return torch.bernoulli(logits.sigmoid().expand(samples, *logits.shape), generator=generator)


def _poisson(log_rates: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    return torch.poisson(log_rates.exp().expand(samples, *log_rates.shape).contiguous(), generator=generator)


def _bernoulli_of_probabilities(p: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    return torch.bernoulli(p.expand(samples, *p.shape), generator=generator)


def class_dimension(outputs: Tensor) -> int:
    """Return the dimension that torch's losses use for classes."""
    return 0 if outputs.dim() == 1 else 1


def _of_log_probabilities(z: Tensor, v: Tensor) -> Tensor:
    # The gradient of -z[y] is -e_y.
    return z.exp() * v


def _of_probabilities(p: Tensor, v: Tensor) -> Tensor:
    # The gradient is (p - y) / (p (1 - p)); torch clamps the denominator at 1e-12.
    variance = p * (1 - p)
    return variance / variance.clamp(min=1e-12).square() * v


def _smoothed(smoothing: float, z: Tensor, v: Tensor) -> Tensor:
    r"""Multiply v by $(1 - s)^2 (\operatorname{diag} p - p p^\top) + s^2 (p - u) (p - u)^\top$, with u = 1/C."""
    dim = class_dimension(z)
    p = z.softmax(dim)
    excess = p - 1 / z.shape[dim]
    covariance = p * (v - (p * v).sum(dim, keepdim=True))
    return (1 - smoothing) ** 2 * covariance + smoothing**2 * excess * (excess * v).sum(dim, keepdim=True)


def _columns(logits: Tensor) -> int:
    return logits.numel() // logits.shape[class_dimension(logits)]


CATEGORICAL = Likelihood(_categorical, _columns, ignored=-100)
LOG_PROBABILITIES = replace(CATEGORICAL, information=_of_log_probabilities, normalized=True)
GAUSSIAN = Likelihood(_gaussian, Tensor.numel)
BERNOULLI = Likelihood(_bernoulli, Tensor.numel)
PROBABILITIES = Likelihood(_bernoulli_of_probabilities, Tensor.numel, information=_of_probabilities)
POISSON = Likelihood(_poisson, Tensor.numel)

# Largest distance of sums of probabilities from 1; bfloat16 is accurate to a hundredth.
NORMALIZED = 0.02

UNWEIGHTED = {"weight": None}
BERNOULLI_OPTIONS = {"weight": None, "pos_weight": None}
POISSON_OPTIONS = {"log_input": True}

# Losses whose targets are classes, which may include an ignored one.
IGNORING = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)

# The likelihood of a loss (a function or module of torch), and the values that its options must have.
LIKELIHOODS: dict[Any, tuple[Likelihood, dict[str, Any]]] = {
    F.cross_entropy: (CATEGORICAL, UNWEIGHTED),
    F.nll_loss: (LOG_PROBABILITIES, UNWEIGHTED),
    F.mse_loss: (GAUSSIAN, UNWEIGHTED),
    F.binary_cross_entropy_with_logits: (BERNOULLI, BERNOULLI_OPTIONS),
    F.binary_cross_entropy: (PROBABILITIES, UNWEIGHTED),
    F.poisson_nll_loss: (POISSON, POISSON_OPTIONS),
    nn.CrossEntropyLoss: (CATEGORICAL, UNWEIGHTED),
    nn.NLLLoss: (LOG_PROBABILITIES, UNWEIGHTED),
    nn.MSELoss: (GAUSSIAN, {}),
    nn.BCEWithLogitsLoss: (BERNOULLI, BERNOULLI_OPTIONS),
    nn.BCELoss: (PROBABILITIES, UNWEIGHTED),
    nn.PoissonNLLLoss: (POISSON, POISSON_OPTIONS),
}


def likelihood_of(caller: str, loss: Any) -> Likelihood:
    """Look up the distribution of a loss; raise for unknown losses and options that change the distribution."""
    likelihood, changed = _look_up(loss)
    if likelihood is not None and changed:
        key = _options_of(loss)[0]
        options = ((name, LIKELIHOODS[key][1][name]) for name in changed)
        wanted = [f"without {name}" if value is None else f"with {name}={value}" for name, value in options]
        # Of these losses, K-FAC takes the information instead of the Hessian, and would refuse the options, too.
        exact = ", or for losses of logits KFACOperator or EKFACOperator with fisher='exact'"
        raise InputError(
            f"{caller}: loss: expected {key.__name__} {' and '.join(wanted)}, which is a negative log-likelihood, got "
            f"{key.__name__} with {', '.join(changed)}; use GaussNewtonOperator or EmpiricalFisherOperator"
            f"{exact if likelihood.information is None else ''}."
        )
    if likelihood is None:
        known = ", ".join(f"{key.__module__}.{key.__name__}" for key in LIKELIHOODS)
        raise InputError(
            f"{caller}: loss: expected a supported negative log-likelihood, one of {known}, got {loss!r}; pass a "
            "hodiff.operators.Likelihood and samples=, or use GaussNewtonOperator."
        )
    return likelihood


def require_rows(caller: str, loss: Any, outputs: Tensor, likelihood: Likelihood | None = None) -> None:
    """Raise if the first dimension of outputs does not count independent factors, as for a single example."""
    likelihood = likelihood or _look_up(loss)[0]
    if outputs.dim() == 0 or (likelihood is not None and likelihood.factors(outputs) % max(outputs.shape[0], 1)):
        raise InputError(
            f"{caller}: model: expected outputs with examples along their first dimension, got {describe(outputs)}; "
            "return one row for each example, (1, C) for a single example."
        )


def require_normalized(caller: str, likelihood: Likelihood, outputs: Tensor) -> None:
    """Raise if a loss takes log-probabilities and the outputs are not normalized."""
    if likelihood.normalized:
        off = (outputs.detach().double().exp().sum(class_dimension(outputs)) - 1).abs()
        if off.numel() and not bool(off.max() < NORMALIZED):
            raise InputError(
                f"{caller}: model: expected log-probabilities for this loss, got outputs whose exponentials add up to "
                f"1 plus or minus {off.max().item():.2g}; apply log_softmax, or use cross_entropy."
            )


def divisor(loss: Any, targets: Any, *, weighted: bool = True) -> float | None:
    """Return the divisor of a mean loss up to a constant: the number of targets that count, or their weights."""
    key, given = _options_of(loss)
    if _look_up(loss)[0] is None or not isinstance(targets, Tensor):
        return None
    if targets.is_floating_point() or not any(key is each for each in IGNORING):
        return float(targets.numel())
    counted = targets != given.get("ignore_index", -100)
    weight = given.get("weight")
    if isinstance(weight, Tensor):
        weights = weight[targets.where(counted, 0)] * counted
        return float(weights.sum() if weighted else weights.count_nonzero())
    return float(counted.sum())


def counted_factors(loss: Any, outputs: Tensor, targets: Any) -> float:
    """Count the factors in a loss's mean: targets that count; for a loss that is not torch's, rows of outputs."""
    likelihood = known_likelihood(loss)
    if likelihood is None:
        return float(len(outputs))
    counted = None if ignored_targets(loss, targets) is None else divisor(loss, targets, weighted=False)
    return float(likelihood.factors(outputs)) if counted is None else counted


def ignored_targets(loss: Any, targets: Any) -> Tensor | None:
    """Mask the targets that a loss of torch ignores or weights by 0; None for other losses and targets."""
    key, given = _options_of(loss)
    if not any(key is each for each in IGNORING) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    ignored = targets == given.get("ignore_index", -100)
    weight = given.get("weight")
    return ignored | (weight[targets.where(~ignored, 0)] == 0) if isinstance(weight, Tensor) else ignored


def share_of_factors(likelihood: Likelihood, outputs: Tensor, targets: Any, mean: bool) -> Tensor | float:
    """Weight of each factor, in the outputs' shape or one number; 0 where the loss ignores the target."""
    ignored = likelihood.ignored
    if ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return 1 / likelihood.factors(outputs) if mean else 1.0
    counted = targets.ne(ignored).unsqueeze(class_dimension(outputs)).to(outputs.dtype)
    return counted / counted.sum() if mean else counted


def known_likelihood(loss: Any) -> Likelihood | None:
    """Return the distribution of a loss of torch, whatever its weights; None for any other loss."""
    return _look_up(loss)[0]


def has_classes(loss: Any) -> bool:
    """Whether the Hessian of a loss couples the classes of a place; other losses of torch couple nothing."""
    return any(_options_of(loss)[0] is each for each in IGNORING)


def _options_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return a loss as the key of the table, and its options."""
    loss = original_of(loss)
    if isinstance(loss, nn.Module):
        return type(loss), {**vars(loss), **buffers_by_name(loss)}
    given: dict[str, Any] = {}
    while isinstance(loss, partial) and not loss.args:
        loss, given = loss.func, loss.keywords | given
    return original_of(loss), given


def _look_up(loss: Any) -> tuple[Likelihood | None, list[str]]:
    """Return the distribution of a loss, and the options that change it."""
    key, given = _options_of(loss)
    try:
        likelihood, options = LIKELIHOODS.get(key, (None, {}))
    except TypeError:  # not hashable
        return None, []
    changed = [name for name, value in options.items() if _differs(given.get(name, value), value)]
    if likelihood is not None:
        likelihood = replace(likelihood, ignored=given.get("ignore_index", likelihood.ignored))
        if smoothing := given.get("label_smoothing", 0.0):
            likelihood = replace(likelihood, information=partial(_smoothed, smoothing))
    return likelihood, changed


def _differs(option: Any, expected: Any) -> bool:
    return isinstance(option, Tensor) or option != expected
