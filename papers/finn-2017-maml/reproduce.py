"""MAML on sine waves: the error after one gradient step on five points, and after more.

python papers/finn-2017-maml/reproduce.py
python papers/finn-2017-maml/reproduce.py --steps 70000     as many meta-steps as in the paper
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.maml_sinusoid import (
    INNER_RATE,
    META_BATCH,
    TEST_STEPS,
    TEST_TASKS,
    check_meta_gradient,
    evaluate,
    make_network,
    mean_squared_error,
    spread,
    train,
)
from hodiff.meta import MAML, MetaLearner
from papers.common import OURS, Claim, Reproduction, run, verdict

SHOTS = 5
PAPER_STEPS, STEPS, QUICK_STEPS = 70_000, 10_000, 400
# Means over 600 new waves and half-widths of 95% intervals, for two seeds of a torch implementation. The paper itself
# gives figures only.
REFERENCE = ((0.671, 0.068), (0.693, 0.063))
MAML_ROW, PRETRAINED_ROW = "MAML", "pretrained on all waves"


def make_learner(name: str) -> MetaLearner:
    """Return MAML, or MAML without inner steps: a network that learns all waves at once."""
    return MAML(make_network(), mean_squared_error, INNER_RATE, steps=1 if name == MAML_ROW else 0)


def trained_errors(name: str, seed: int, steps: int, progress: bool) -> Tensor:
    """Train, and return errors on new waves after 0, 1, ... steps: (steps + 1, waves)."""
    torch.manual_seed(seed)
    learner = make_learner(name)
    train(learner, SHOTS, steps, seed, f"{name}, seed {seed}", progress)
    return evaluate(learner, SHOTS, seed)


def shown(errors: Tensor) -> str:
    """Format a mean with the half-width of its 95% interval."""
    return f"{errors.mean():.3f} ± {spread(errors):.3f}"


def reaches_reference(errors: Tensor) -> bool:
    """Return True if the mean exceeds a reference by no more than the combined half-widths of the 95% intervals."""
    mean, half = errors.mean().item(), spread(errors).item()
    return any(mean - value <= math.hypot(half, other) for value, other in REFERENCE)


def draw(runs: dict[str, list[Tensor]], steps: int) -> Figure:
    """Plot error by gradient steps on the new wave."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for index, (name, curves) in enumerate(runs.items()):
        for seed, errors in enumerate(curves):
            mean, half = errors.mean(dim=1), spread(errors)
            axes.plot(mean, marker=".", color=f"C{index}", label=None if seed else name)
            axes.fill_between(range(len(mean)), mean - half, mean + half, color=f"C{index}", alpha=0.15)
    axes.set(xlabel="gradient steps on the new wave", ylabel="mean squared error", yscale="log")
    axes.set_title(f"{steps:,} meta-steps, K = {SHOTS}", fontsize=9)
    axes.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool, steps: int | None = None) -> Reproduction:
    """Check the meta-gradient, train both networks, and adapt them to new waves."""
    torch.set_num_threads(1)
    steps = steps or (QUICK_STEPS if quick else STEPS)
    seeds = range(1 if quick else len(REFERENCE))
    distance = check_meta_gradient(SHOTS, seed=0)
    runs = {
        name: [trained_errors(name, seed, steps, progress) for seed in seeds] for name in (MAML_ROW, PRETRAINED_ROW)
    }
    learned, pretrained = runs[MAML_ROW], runs[PRETRAINED_ROW]
    after = {name: torch.stack(curves).mean(dim=(0, 2)) for name, curves in runs.items()}
    improves = after[MAML_ROW][-1] < after[MAML_ROW][1] < after[MAML_ROW][0]
    gap = (after[PRETRAINED_ROW][1] / after[MAML_ROW][1]).item()
    claims = [
        Claim(
            f"The error after one step on K = {SHOTS} points of a new wave",
            f"a figure; {PAPER_STEPS:,} meta-steps of a torch implementation: "
            + ", ".join(f"{mean} ± {half}" for mean, half in REFERENCE),
            ", ".join(shown(errors[1]) for errors in learned) + f" after {steps:,} meta-steps",
            verdict(
                all(reaches_reference(errors[1]) for errors in learned),
                all(errors[1].mean() < 2 * REFERENCE[0][0] for errors in learned),
            ),
        ),
        Claim(
            "A network trained for one step improves further with more steps",
            "qualitative",
            f"{after[MAML_ROW][0]:.2f}, {after[MAML_ROW][1]:.2f}, {after[MAML_ROW][-1]:.2f} after 0, 1, "
            f"{TEST_STEPS} steps",
            verdict(bool(improves), bool(after[MAML_ROW][1] < after[MAML_ROW][0])),
        ),
        Claim(
            "A network pretrained on all waves does not adapt as well",
            "qualitative",
            ", ".join(shown(errors[1]) for errors in pretrained)
            + f" after one step, {after[PRETRAINED_ROW][-1]:.2f} after {TEST_STEPS}: {gap:.1f} times MAML's error",
            verdict(gap > 2, gap > 1),
        ),
        Claim(
            "The meta-gradient compared with central differences",
            "not in the paper",
            f"{distance:.0e} apart, relative, in float64",
            OURS,
        ),
    ]
    settings = {
        "meta-steps": steps,
        "meta-steps of the paper": PAPER_STEPS,
        "shots": SHOTS,
        "inner rate": INNER_RATE,
        "tasks a meta-step": META_BATCH,
        "new waves": TEST_TASKS,
        "seeds": len(seeds),
    }
    data = {
        "meta-gradient against differences": distance,
        "errors": {
            name: [{"mean": errors.mean(dim=1), "half of 95%": spread(errors)} for errors in curves]
            for name, curves in runs.items()
        },
    }
    return Reproduction(claims, settings, data, draw(runs, steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps", type=int)
    own, sys.argv[1:] = parser.parse_known_args()
    run(__file__, __doc__ or "", lambda quick, progress: reproduce(quick, progress, own.steps))
