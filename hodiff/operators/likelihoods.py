"""Losses that are negative log-likelihoods, and targets drawn from what a model predicts."""

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
from hodiff.torch_internals.modules import buffers_by_name


@dataclass(frozen=True)
class Likelihood:
    """The distribution whose negative log-density a loss is.

    Attributes:
        sample: Draws targets (S, *target shape) for outputs; takes outputs, S and a generator.
        factors: How many independent factors the density of these outputs has, over which "mean" averages.
        ignored: A target that takes its place out of the density, as padding.
    """

    sample: Callable[[Tensor, int, torch.Generator], Tensor]
    factors: Callable[[Tensor], int]
    ignored: int | None = None

    def like(self, drawn: Tensor, targets: Any) -> Tensor:
        """Drawn targets (S, ...), ignored where the given ones are."""
        if self.ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
            return drawn
        return drawn.masked_fill(targets == self.ignored, self.ignored)

    def counted(self, outputs: Tensor, drawn: Tensor) -> Tensor | int:
        """How many factors count."""
        return self.factors(outputs) if self.ignored is None else (drawn != self.ignored).sum()


def _categorical(logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    dim = 0 if logits.dim() == 1 else 1
    probabilities = logits.movedim(dim, -1).softmax(-1)
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


def _columns(logits: Tensor) -> int:
    return logits.numel() // logits.shape[0 if logits.dim() == 1 else 1]


CATEGORICAL = Likelihood(_categorical, _columns, ignored=-100)
GAUSSIAN = Likelihood(_gaussian, Tensor.numel)
BERNOULLI = Likelihood(_bernoulli, Tensor.numel)
POISSON = Likelihood(_poisson, Tensor.numel)

CATEGORICAL_OPTIONS = {"weight": None, "label_smoothing": 0.0}
BERNOULLI_OPTIONS = {"weight": None, "pos_weight": None}
POISSON_OPTIONS = {"log_input": True}

# Losses whose targets are classes, of which some may be ignored.
IGNORING = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)

# By the loss: a function of torch, or a module, and the options that it must have.
LIKELIHOODS: dict[Any, tuple[Likelihood, dict[str, Any]]] = {
    F.cross_entropy: (CATEGORICAL, CATEGORICAL_OPTIONS),
    F.mse_loss: (GAUSSIAN, {"weight": None}),
    F.binary_cross_entropy_with_logits: (BERNOULLI, BERNOULLI_OPTIONS),
    F.poisson_nll_loss: (POISSON, POISSON_OPTIONS),
    nn.CrossEntropyLoss: (CATEGORICAL, CATEGORICAL_OPTIONS),
    nn.MSELoss: (GAUSSIAN, {}),
    nn.BCEWithLogitsLoss: (BERNOULLI, BERNOULLI_OPTIONS),
    nn.PoissonNLLLoss: (POISSON, POISSON_OPTIONS),
}


def likelihood_of(caller: str, loss: Any) -> Likelihood:
    """The distribution of a loss in the table; others, and options that change the distribution, are refused."""
    likelihood, changed = _look_up(loss)
    if likelihood is None or changed:
        known = ", ".join(f"{key.__module__}.{key.__name__}" for key in LIKELIHOODS)
        got = f"{type(loss).__name__} with {', '.join(changed)}" if changed else repr(loss)
        raise InputError(
            f"{caller}: loss: expected a negative log-likelihood that is known here, one of {known}, "
            f"got {got}; pass a hodiff.operators.Likelihood and samples=, or take GaussNewtonOperator."
        )
    return likelihood


def require_rows(caller: str, loss: Any, outputs: Tensor, likelihood: Likelihood | None = None) -> None:
    """Refuse outputs whose first dimension does not count independent factors of the density, as a single example's."""
    likelihood = likelihood or _look_up(loss)[0]
    if outputs.dim() == 0 or (likelihood is not None and likelihood.factors(outputs) % max(outputs.shape[0], 1)):
        raise InputError(
            f"{caller}: model: expected outputs with examples along their first dimension, got {describe(outputs)}; "
            "return one row an example, (1, C) for a single one."
        )


def counted_examples(loss: Any, targets: Any, rows: int) -> Tensor | int:
    """How many of the outputs' rows a loss takes a mean over: all but those that it ignores or weights by 0."""
    key, given = _options_of(loss)
    if not any(key is each for each in IGNORING) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return rows
    counted = targets != given.get("ignore_index", -100)
    weight = given.get("weight")
    if isinstance(weight, Tensor):
        counted = counted & (weight[targets.where(counted, 0)] != 0)
    return counted.unsqueeze(-1).flatten(1).any(1).sum()


def _options_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """A loss as the table names it, and the options that it carries."""
    if isinstance(loss, nn.Module):
        return type(loss), vars(loss) | buffers_by_name(loss)
    if isinstance(loss, partial) and not loss.args:
        return loss.func, loss.keywords
    return loss, {}


def _look_up(loss: Any) -> tuple[Likelihood | None, list[str]]:
    """The distribution of a loss, and what options of it change that."""
    key, given = _options_of(loss)
    try:
        likelihood, options = LIKELIHOODS.get(key, (None, {}))
    except TypeError:  # not hashable
        return None, []
    changed = [name for name, value in options.items() if _differs(given.get(name, value), value)]
    if likelihood is not None:
        likelihood = replace(likelihood, ignored=given.get("ignore_index", likelihood.ignored))
    return likelihood, changed


def _differs(option: Any, expected: Any) -> bool:
    return isinstance(option, Tensor) or option != expected
