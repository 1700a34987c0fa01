"""Sophia and AdamW on a small language model: the loss after half of the steps, and the cost of a step.

python papers/liu-2023-sophia/reproduce.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.training.language import Text, language_model, loss_on
from papers.common import OURS, Claim, Reproduction, run, span, verdict

ADAMW, SOPHIA_G, SOPHIA_H = "AdamW", "Sophia-G", "Sophia-H"
# Rates around the best rate of each optimizer, so that the best is not at an end of the range.
RATES = {ADAMW: (1e-3, 3e-3, 1e-2, 3e-2), SOPHIA_G: (3e-4, 1e-3, 3e-3), SOPHIA_H: (3e-4, 1e-3, 3e-3)}
EVERY = 10  # steps between curvature updates, as in the paper
# The part of a batch that the curvature uses: 240 and 32 of 480 examples in the paper.
PART = {SOPHIA_G: 1 / 2, SOPHIA_H: 1 / 15}
MAKERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    ADAMW: lambda p, rate: torch.optim.AdamW(p, lr=rate, betas=(0.9, 0.95), weight_decay=0.1),
    SOPHIA_G: lambda p, rate: hodiff.optim.SophiaG(p, lr=rate, weight_decay=0.1, update_every=None),
    SOPHIA_H: lambda p, rate: hodiff.optim.SophiaH(p, lr=rate, weight_decay=0.1, update_every=None),
}


def train(text: Text, name: str, rate: float, steps: int, batch: int, size: dict[str, int]) -> dict[str, Any]:
    """Return validation losses and seconds; the rate rises for a twentieth of the steps, then falls as a cosine."""
    torch.manual_seed(0)
    model = language_model(text.vocabulary, **size)
    optimizer = MAKERS[name](model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) / (steps / 20)) * (0.525 + 0.475 * math.cos(math.pi * k / steps))
    )
    generator = torch.Generator().manual_seed(0)
    losses, seconds, curvature = [], 0.0, 0.0
    for step in range(steps):
        inputs, targets = text.batch(batch, generator)
        start = time.process_time()
        if name in PART and step % EVERY == 0:
            few = max(1, round(PART[name] * batch))
            logits = model(inputs[:few])
            if name == SOPHIA_G:
                optimizer.update_curvature(logits)
            else:
                optimizer.update_curvature(F.cross_entropy(logits, targets[: len(logits)]))
            curvature += time.process_time() - start
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - start
        if (step + 1) % (steps // 10) == 0:
            losses.append(loss_on(model, text.validation))
    return {"rate": rate, "steps": steps, "losses": losses, "seconds": seconds, "curvature": curvature / seconds}


def draw(best: dict[str, dict[int, dict[str, Any]]]) -> Figure:
    """Plot validation losses by step, at the best rate of every optimizer."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for index, (name, runs) in enumerate(best.items()):
        for (steps, found), style in zip(runs.items(), (":", "-"), strict=False):
            places = [steps * (i + 1) / len(found["losses"]) for i in range(len(found["losses"]))]
            axes.plot(places, found["losses"], style, color=f"C{index}", marker=".", label=f"{name}, {steps} steps")
    axes.set(xlabel="step", ylabel="validation loss")
    axes.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train with all rates for half of the steps, and with AdamW also for all steps."""
    torch.set_num_threads(1)
    steps, batch = (40, 4) if quick else (2000, 15)
    size = {"width": 16 if quick else 32, "layers": 1 if quick else 2}
    text = Text()
    names = list(RATES)
    work = [(name, rate, steps // 2) for name in names for rate in (RATES[name][1:2] if quick else RATES[name])]
    work += [(ADAMW, rate, steps) for name, rate, _ in work if name == ADAMW]
    runs: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in names}
    for name, rate, count in tqdm(work, desc="training", leave=False, disable=not progress):
        runs[name].setdefault(count, []).append(train(text, name, rate, count, batch, size))
    best = {
        name: {count: min(found, key=lambda each: each["losses"][-1]) for count, found in by_steps.items()}
        for name, by_steps in runs.items()
    }
    half, full = steps // 2, steps
    ends = {name: best[name][half]["losses"][-1] for name in names}
    goal = best[ADAMW][full]["losses"][-1]
    gains = [ends[ADAMW] - ends[name] for name in (SOPHIA_G, SOPHIA_H)]
    share = {name: best[name][half]["curvature"] for name in (SOPHIA_G, SOPHIA_H)}
    step = {name: min(e["seconds"] for e in runs[name][half]) / half for name in names}
    # Losses that differ by less count as equal.
    alike = 0.01
    claims = [
        Claim(
            "Sophia reaches AdamW's loss with half of the steps",
            "half of the steps (GPT-2, 125M to 770M)",
            f"after {half} steps {ends[SOPHIA_G]:.3f} (G), {ends[SOPHIA_H]:.3f} (H), AdamW {ends[ADAMW]:.3f}; "
            f"AdamW after {full}: {goal:.3f}",
            verdict(
                min(ends[SOPHIA_G], ends[SOPHIA_H]) < goal + alike,
                min(ends[SOPHIA_G], ends[SOPHIA_H]) < ends[ADAMW] - alike,
            ),
        ),
        Claim(
            "Both estimators have a lower loss than AdamW after the same number of steps",
            "qualitative",
            f"lower by {gains[0]:.3f} (G) and {gains[1]:.3f} (H)",
            verdict(min(gains) > alike, max(gains) > alike),
        ),
        Claim(
            f"Curvature of a part of a batch every {EVERY} steps takes a small part of the time",
            "less than 5 % of the time on average (abstract: negligible)",
            f"{100 * share[SOPHIA_G]:.1f} % (G), {100 * share[SOPHIA_H]:.1f} % (H)",
            verdict(max(share.values()) < 0.06, min(share.values()) < 0.1),
        ),
        Claim(
            "The time of a step",
            "not quoted here",
            f"{span([step[SOPHIA_G] / step[ADAMW], step[SOPHIA_H] / step[ADAMW]], 2)} times AdamW's",
            OURS,
        ),
    ]
    settings = {**size, "steps": steps, "batch": batch, "letters": text.training.numel(), "rates": RATES}
    return Reproduction(claims, settings, {"runs": runs, "seconds a step": step}, draw(best))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
