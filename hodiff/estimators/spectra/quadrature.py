"""Quadrature rules and traces of functions of a symmetric operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_int
from hodiff.errors import HodiffWarning
from hodiff.estimators.checkpoints import Checkpoint, Keep, Stages, State
from hodiff.estimators.dense_matrix import symmetric_matrix_of
from hodiff.estimators.probes import PROBES, draw, generator_or_default
from hodiff.estimators.results import Estimate, mean_and_error
from hodiff.estimators.spectra.lanczos import Chain, advance
from hodiff.estimators.view import View

Rule = tuple[Tensor, Tensor]  # nodes and weights, (samples, steps) each


def exact_rule(view: View) -> Rule:
    """Return all eigenvalues with equal weights, (1, n) each."""
    values = torch.linalg.eigvalsh(symmetric_matrix_of(view))[None]
    return values, torch.full_like(values, 1 / view.total)


def lanczos_rules(
    view: View,
    samples: int,
    steps: int,
    probes: str,
    generator: torch.Generator,
    progress: bool,
    checkpoint: Checkpoint | str | Path | None = None,
) -> tuple[Rule, Rule]:
    """Compute Gauss rules from each of `samples` random vectors, with all steps and with a tenth fewer."""
    require_int(view.caller, "samples", samples, 2)
    require_int(view.caller, "steps", steps, 1)
    require_choice(view.caller, "probes", probes, PROBES)
    steps = min(steps, view.total)
    size = view.group_size(samples, steps * view.n * view.dtype.itemsize)

    def run(saved: State | None, keep: Keep) -> State:
        rules: list[Any] = saved.numbers["rules"] if saved else []
        chains = [Chain(view, each, steps) for each in _parts(saved)] if saved else []
        while len(rules) < samples:
            count = min(size, samples - len(rules))
            chains = chains or [Chain(view, vector, steps) for vector in draw(view, probes, count, generator).unbind(1)]
            while advance(view, chains):
                keep(partial(_joint, rules, chains))
            rules += [[*_gauss(chain, len(chain)), *_gauss(chain, _fewer(chain))] for chain in chains]
            chains = []
        return State({"rules": rules})

    with view.counting(samples * steps, progress):
        call = {"samples": samples, "steps": steps, "probes": probes}
        rules = Stages(view, checkpoint, call, generator=generator).stage("rules", run).numbers["rules"]
    return _padded([each[:2] for each in rules]), _padded([each[2:] for each in rules])


def _joint(rules: list[Any], chains: Sequence[Chain]) -> State:
    """Return the state of finished rules and of chains that run together."""
    states = [chain.state for chain in chains]
    vectors = {f"chain {i}": each.blocks["vectors"] for i, each in enumerate(states)}
    return State({"rules": list(rules), "chains": [each.numbers for each in states]}, vectors)


def _parts(joint: State) -> list[State]:
    """Return the states of the chains that ran together."""
    numbers = enumerate(joint.numbers["chains"])
    return [State(each, {"vectors": joint.blocks[f"chain {i}"]}) for i, each in numbers]


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
    if method == "exact" or samples * min(steps, view.total) >= view.total:
        with view.counting(view.total, progress):
            nodes, _ = exact_rule(view)
        return Estimate(function(nodes).sum().item(), 0.0, view.products, "exact")
    rules = lanczos_rules(view, samples, steps, "rademacher", generator, progress)
    # Padded nodes repeat a node of the rule, so that a function may check all of them.
    full, short = ((function(nodes) * weights).sum(1) * view.total for nodes, weights in rules)
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


def _gauss(chain: Chain, count: int) -> tuple[list[float], list[float]]:
    values, vectors = chain.ritz(count)
    return values.tolist(), (vectors[0] ** 2).tolist()


def _fewer(chain: Chain) -> int:
    """Return the number of steps of the shorter rule; an exhausted chain is exact and keeps all steps."""
    return len(chain) if chain.exhausted else max(1, len(chain) - max(1, len(chain) // 10))


def _padded(rules: list[list[list[float]]]) -> Rule:
    """Stack rules of different lengths, padded by the last node with weight 0."""
    longest = max(len(values) for values, _ in rules)
    missing = [longest - len(values) for values, _ in rules]
    nodes = [np.pad(values, (0, more), mode="edge") for (values, _), more in zip(rules, missing, strict=True)]
    weights = [np.pad(w, (0, more)) for (_, w), more in zip(rules, missing, strict=True)]
    return torch.from_numpy(np.stack(nodes)), torch.from_numpy(np.stack(weights))
