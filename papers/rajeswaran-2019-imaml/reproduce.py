"""Implicit MAML: error and memory of its meta-gradient against the number of inner steps.

python papers/rajeswaran-2019-imaml/reproduce.py
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from examples.imaml_memory import (
    INNER_RATE,
    LIMIT_STEPS,
    QUERY,
    STRENGTH,
    SUPPORT,
    WAYS,
    Job,
    find_limit,
    make_problem,
    measure_all,
    meta_gradient,
)
from hodiff.meta import IMAML
from papers.common import OURS, Claim, Reproduction, run, span, verdict

SEED = 0
FEW = (2, 5)  # steps of conjugate gradients, as in the paper's figure 2
# Variation of the allocator's memory between equal computations, in MiB.
MEMORY_NOISE = 8.0


def few_step_errors(steps: list[int], hidden: int, limit: np.ndarray, progress: bool) -> dict[str, list[float]]:
    """Return relative errors of implicit meta-gradients with a few steps of conjugate gradients."""
    network, tasks = make_problem(hidden, SEED)
    found: dict[str, list[float]] = {f"implicit, {few} CG steps": [] for few in FEW}
    work = [(curve, few, count) for (few, curve) in zip(FEW, found.values(), strict=True) for count in steps]
    for curve, few, count in tqdm(work, desc="few CG steps", leave=False, disable=not progress):
        learner = IMAML(network, F.cross_entropy, INNER_RATE, count, strength=STRENGTH, cg_steps=few)
        with warnings.catch_warnings():
            # Errors without convergence are measured on purpose.
            warnings.simplefilter("ignore", hodiff.HodiffWarning)
            curve.append(relative(meta_gradient(learner, tasks).numpy(), limit))
    return found


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference over the norm of the expected array."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def draw(steps: list[int], errors: dict[str, list[float]], memory: dict[str, list[float]]) -> Figure:
    """Plot errors and memory against the number of inner steps."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, curve), style in zip(errors.items(), ("o-", "s:", "^-", "v--", "d--"), strict=True):
        left.loglog(steps, curve, style, markersize=4, label=name)
    for (name, curve), style in zip(memory.items(), ("o-", "s:", "^-"), strict=True):
        right.plot(steps, curve, style, markersize=4, label=name)
    left.set(xlabel="inner steps", ylabel="relative error of the meta-gradient")
    right.set(xlabel="inner steps", ylabel="peak memory above that of 2 steps, MiB")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure every way in fresh processes, and compare with the limit of very many steps."""
    torch.set_num_threads(1)
    hidden = 64 if quick else 256
    steps = [8, 64, 256] if quick else [4, 8, 16, 32, 50, 100, 200, 400, 800]
    jobs = [Job(way, count, hidden, SEED) for count in steps for way in WAYS]
    found = dict(measure_all(jobs, progress))
    limit, distance = find_limit(hidden, SEED)
    measured = {way: [each for job, each in found.items() if job.way == way] for way in WAYS}
    errors = {way: [relative(each.gradient, limit) for each in all_steps] for way, all_steps in measured.items()}
    memory = {way: [each.mebibytes for each in all_steps] for way, all_steps in measured.items()}
    few = few_step_errors(steps, hidden, limit, progress)
    every = errors | few

    unrolled, implicit = errors["unrolled"], errors["implicit"]
    last, middle = len(steps) - 1, len(steps) // 2
    gains = [ours / theirs for ours, theirs in zip(unrolled, implicit, strict=True)]
    # Smaller errors are dominated by rounding and the solver's tolerance.
    early = [gain for gain, error in zip(gains, unrolled, strict=True) if error > 1e-5]
    growth = memory["unrolled"][last] / max(memory["unrolled"][middle], 1.0)
    terminal = {count: curve[last] for count, curve in zip(FEW, few.values(), strict=True)}
    claims = [
        Claim(
            "Memory does not grow with the inner steps; memory of unrolling grows linearly",
            "qualitative",
            f"{steps[last]} steps: implicit {memory['implicit'][last]:.0f} MiB, unrolled "
            f"{memory['unrolled'][last]:.0f} MiB, {growth:.1f} times that of {steps[middle]}",
            verdict(
                max(memory["implicit"]) < MEMORY_NOISE and abs(growth / (steps[last] / steps[middle]) - 1) < 0.3,
                memory["implicit"][last] < memory["unrolled"][last] / 4,
            ),
        ),
        Claim(
            "Implicit and unrolled meta-gradients tend to the same limit",
            "qualitative",
            f"{unrolled[last]:.0e} unrolled, {implicit[last]:.0e} implicit from it after {steps[last]} steps",
            verdict(max(unrolled[last], implicit[last]) < 1e-5, max(unrolled[last], implicit[last]) < 1e-2),
        ),
        Claim(
            "After finitely many steps, the implicit meta-gradient is nearer to the limit",
            "qualitative",
            f"nearer by {span(early)} times",
            verdict(min(early) > 1, max(early) > 1),
        ),
        Claim(
            f"{FEW[0]} steps of conjugate gradients leave an error, which vanishes with {FEW[1]} steps",
            "qualitative",
            ", ".join(f"{error:.1e} with {count}" for count, error in terminal.items())
            + f" after {steps[last]} inner steps",
            verdict(terminal[FEW[1]] < 1e-2 < terminal[FEW[0]], terminal[FEW[1]] < terminal[FEW[0]] / 2),
        ),
        Claim(
            "Unrolling with a checkpoint every sqrt(T) steps",
            "not in the paper",
            f"{memory['checkpointed'][last]:.0f} MiB after {steps[last]} steps, "
            f"{measured['checkpointed'][last].seconds / measured['unrolled'][last].seconds:.1f} times the seconds; "
            f"implicit {measured['implicit'][last].seconds / measured['unrolled'][last].seconds:.1f} times",
            OURS,
        ),
    ]
    settings = {
        "network": f"64-{hidden}-10, tanh, float64",
        "images": f"{SUPPORT} + {QUERY} digits",
        "inner rate": INNER_RATE,
        "strength": STRENGTH,
        "limit": f"unrolled meta-gradient of {LIMIT_STEPS} steps",
    }
    data = {
        "steps": steps,
        "errors": every,
        "MiB": memory,
        "seconds": {way: [each.seconds for each in all_steps] for way, all_steps in measured.items()},
        "limit, unrolled against implicit": distance,
    }
    return Reproduction(claims, settings, data, draw(steps, every, memory))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
