"""Print the seconds to an error of two PINA problems, before and after hodiff, as the table of docs/guides/physics.md.

    python tests/doors/pina/measure_training.py

Before: PINA's equation, Adam at 1e-3 and then L-BFGS with a strong Wolfe line search, by PINA's Trainer. After:
`hodiff.optim.SSBroyden` by the same Trainer, with PINA's equation and with hodiff's. Seconds are processor seconds of
one core, without those of the error; one start. A run ends at the last goal, or after 500 steps of Adam and 1,000
iterations of L-BFGS, or 1,000 of SSBroyden. Losses are PINA's, at the end of a run.
"""

import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from doors.pina.problems import error, made
from doors.seconds_to_errors import Clock, report_head, report_row
from lightning.pytorch import Callback
from pina import Trainer
from pina.optim import TorchOptimizer
from pina.solver import PhysicsInformedSingleModelSolver

import hodiff

QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Timer(Callback):
    """Runs the clock in PINA's Trainer, and stops training at the last goal."""

    def __init__(self, problem, clock):
        self.problem, self.clock = problem, clock

    def on_train_epoch_start(self, trainer, module):
        self.clock.begin()

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = self.clock.end_step(lambda: error(self.problem, module))


def train(problem, model, clock, epochs, kind, **options):
    solver = PhysicsInformedSingleModelSolver(problem, model, optimizer=TorchOptimizer(kind, **options))
    trainer = Trainer(
        solver, max_epochs=epochs, callbacks=[Timer(problem, clock)], enable_model_summary=False, shuffle=False, **QUIET
    )
    trainer.train()
    return float(trainer.callback_metrics["train_loss"])


def by_theirs(problem, model, clock):
    train(problem, model, clock, 500, torch.optim.Adam, lr=1e-3)
    clock.restart_steps()
    options = {"max_iter": 20, "history_size": 100, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    return train(problem, model, clock, 50, torch.optim.LBFGS, **options)


def by_broyden(problem, model, clock):
    return train(problem, model, clock, 100, hodiff.optim.SSBroyden, max_iter=10)


WAYS = {
    "before: Adam, then L-BFGS": (by_theirs, False),
    "their residual, SSBroyden": (by_broyden, False),
    "hodiff's residual, SSBroyden": (by_broyden, True),
}


def main():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report_head()
    for name in ("Poisson", "heat"):
        for title, (run, by_hodiff) in WAYS.items():
            problem, model = made(name, by_hodiff=by_hodiff)
            clock = Clock()
            report_row(name, title, [clock], [run(problem, model, clock)])


if __name__ == "__main__":
    main()
