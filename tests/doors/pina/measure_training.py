"""Print the seconds to an error of two PINA problems, before and after hodiff, as the table of docs/guides/physics.md.

    python tests/doors/pina/measure_training.py

Before: PINA's equation, Adam at 1e-3 and then L-BFGS with a strong Wolfe line search, by PINA's Trainer. After:
`hodiff.optim.SSBroyden` by the same Trainer, with PINA's equation and with hodiff's. Seconds are processor seconds of
one core, without those of the error; one start. A run ends at the last goal, or after 500 steps of Adam and 1,000
iterations of L-BFGS, or 1,000 of SSBroyden. Losses are PINA's, at the end of a run.
"""

import math
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import logging

import torch
from doors.pina.problems import error, made
from lightning.pytorch import Callback
from pina import Trainer
from pina.optim import TorchOptimizer
from pina.solver import PhysicsInformedSingleModelSolver

import hodiff

GOALS = (1e-2, 1e-3, 1e-4)
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Clock(Callback):
    """Notes the error after processor seconds of training, and stops once the last goal is reached."""

    def __init__(self, problem):
        self.problem, self.used, self.start, self.found, self.count, self.next = problem, 0.0, 0.0, {}, 0, 1
        self.least = math.inf

    def on_train_epoch_start(self, trainer, module):
        self.start = time.process_time()

    def on_train_epoch_end(self, trainer, module):
        self.used += time.process_time() - self.start
        self.count += 1
        if self.count < self.next:
            return
        self.next = math.ceil(1.05 * self.count)
        self.least = min(self.least, error(self.problem, module))
        for goal in GOALS:
            if self.least <= goal:
                self.found.setdefault(goal, self.used)
        trainer.should_stop = self.least <= GOALS[-1]


def train(problem, model, clock, epochs, kind, **options):
    solver = PhysicsInformedSingleModelSolver(problem, model, optimizer=TorchOptimizer(kind, **options))
    trainer = Trainer(solver, max_epochs=epochs, callbacks=[clock], enable_model_summary=False, shuffle=False, **QUIET)
    trainer.train()
    return float(trainer.callback_metrics["train_loss"])


def by_theirs(problem, model, clock):
    train(problem, model, clock, 500, torch.optim.Adam, lr=1e-3)
    clock.count, clock.next = 0, 1
    options = {"max_iter": 20, "history_size": 100, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    return train(problem, model, clock, 50, torch.optim.LBFGS, **options)


def by_broyden(problem, model, clock):
    return train(problem, model, clock, 100, hodiff.optim.SSBroyden, max_iter=10)


WAYS = {
    "before: Adam, then L-BFGS": (by_theirs, False),
    "their residual, SSBroyden": (by_broyden, False),
    "hodiff's residual, SSBroyden": (by_broyden, True),
}


def report(line):
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    goals = " | ".join(f"seconds to {goal:.0e}" for goal in GOALS)
    report(f"| example | training | {goals} | least error | loss |\n|---|---|" + "---:|" * (len(GOALS) + 2))
    for name in ("Poisson", "heat"):
        for title, (run, by_hodiff) in WAYS.items():
            problem, model = made(name, by_hodiff=by_hodiff)
            clock = Clock(problem)
            loss = run(problem, model, clock)
            cells = [f"{clock.found[goal]:.1f}" if goal in clock.found else "" for goal in GOALS]
            report(f"| {name} | {title} | {' | '.join(cells)} | {clock.least:.1e} | {loss:.1e} |")


if __name__ == "__main__":
    main()
