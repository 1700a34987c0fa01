"""Quadrature rules and traces of functions of a symmetric operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hodiff.common.chunks import spans
from hodiff.common.options import require_choice, require_int
from hodiff.errors import HodiffWarning
from hodiff.estimators.dense_matrix import symmetric_matrix_of
from hodiff.estimators.probes import PROBES, draw, generator_or_default
from hodiff.estimators.results import Estimate, mean_and_error
from hodiff.estimators.spectra.lanczos import Chain, advance
from hodiff.estimators.view import View

Rule = tuple[Tensor, Tensor]  # nodes and weights, (samples, steps) each


def exact_rule(view: View) -> Rule:
    """Return all eigenvalues with equal weights, (1, n) each."""
    values = torch.linalg.eigvalsh(symmetric_matrix_of(view))[None]
    return values, torch.full_like(values, 1 / view.n)


def lanczos_rules(
    view: View, samples: int, steps: int, probes: str, generator: torch.Generator, progress: bool
) -> tuple[Rule, Rule]:
    """Compute Gauss rules from each of `samples` random vectors, with all steps and with a tenth fewer."""
    require_int(view.caller, "samples", samples, 2)
    require_int(view.caller, "steps", steps, 1)
    require_choice(view.caller, "probes", probes, PROBES)
    steps = min(steps, view.total)
    size = view.group_size(samples, steps * view.n * view.dtype.itemsize)
    pairs = []
    with view.counting(samples * steps, progress):
        for start, stop in spans(samples, size):
            chains = [Chain(view, vector, steps) for vector in draw(view, probes, stop - start, generator).unbind(1)]
            while advance(view, chains):
                continue
            pairs += [(_gauss(chain, len(chain)), _gauss(chain, _fewer(chain))) for chain in chains]
    return _padded([full for full, _ in pairs]), _padded([short for _, short in pairs])


def truncation_of(samples: Tensor, short: Tensor) -> float:
    """Return the absolute mean difference between the values of the rules and of shorter ones, (samples,) each."""
    return (samples - short).mean().abs().item()


def trace_of_function(
    view: View,
    function: Callable[[Tensor], Tensor],
    method: str,
    samples: int,
    steps: int,
    generator: torch.Generator | None,
    progress: bool,
) -> Estimate:
    r"""Estimate the trace of $f(A)$, or compute it if that needs no more products; `function` may raise on nodes."""
    require_choice(view.caller, "method", method, ["slq", "exact"])
    require_int(view.caller, "samples", samples, 2)
    require_int(view.caller, "steps", steps, 1)
    generator = generator_or_default(view.caller, generator)
    if method == "exact" or samples * min(steps, view.n) >= view.n:
        with view.counting(view.n, progress):
            nodes, _ = exact_rule(view)
        return Estimate(function(nodes).sum().item(), 0.0, view.products, "exact")
    rules = lanczos_rules(view, samples, steps, "rademacher", generator, progress)
    # Padded nodes repeat a node of the rule, so that a function may check all of them.
    full, short = ((function(nodes) * weights).sum(1) * view.n for nodes, weights in rules)
    value, error = mean_and_error(full)
    truncation = truncation_of(full, short)
    if truncation > max(error, 1e-3 * abs(value)):
        warnings.warn(
            f"{view.caller}: {steps} Lanczos steps are too few: the last tenth of them changed the value by "
            f"{truncation:.2g}, more than the standard error {error:.2g}; raise steps or damping.",
            HodiffWarning,
            stacklevel=3,
        )
    return Estimate(value, error, view.products, method, truncation)


def _gauss(chain: Chain, count: int) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = chain.ritz(count)
    return values, vectors[0] ** 2


def _fewer(chain: Chain) -> int:
    """Return the number of steps of the shorter rule; an exhausted chain is exact and keeps all steps."""
    return len(chain) if chain.exhausted else max(1, len(chain) - max(1, len(chain) // 10))


def _padded(rules: list[tuple[np.ndarray, np.ndarray]]) -> Rule:
    """Stack rules of different lengths, padded by the last node with weight 0."""
    longest = max(len(values) for values, _ in rules)
    missing = [longest - len(values) for values, _ in rules]
    nodes = [np.pad(values, (0, more), mode="edge") for (values, _), more in zip(rules, missing, strict=True)]
    weights = [np.pad(w, (0, more)) for (_, w), more in zip(rules, missing, strict=True)]
    return torch.from_numpy(np.stack(nodes)), torch.from_numpy(np.stack(weights))
