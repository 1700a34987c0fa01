"""Print the seconds to an error of DeepXDE's examples, before and after hodiff, as the table of docs/guides/physics.md.

    python tests/doors/deepxde/measure_training.py STARTS [EXAMPLE ...]

Before: Adam at 1e-3 and then L-BFGS, as DeepXDE's examples train. After: `hodiff.optim.SSBroyden` in DeepXDE's loop,
with DeepXDE's residual and with that of hodiff's Taylor mode. Seconds are processor seconds
of one core, without those of the error, medians over the starts. A run ends at the last goal or after 3,000 iterations
(2,000 of SSBroyden). Losses are DeepXDE's, at the end of a run.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from doors.deepxde.problems import PROBLEMS, dde
from doors.seconds_to_errors import Clock, report, report_head, report_row

import hodiff

ADAM, LBFGS, BROYDEN, EACH = 1000, 2000, 2000, 10


class Timer(dde.callbacks.Callback):
    """Runs the clock in DeepXDE's loop, and stops training at the last goal."""

    def __init__(self, problem, clock):
        super().__init__()
        self.problem, self.clock = problem, clock

    def on_train_begin(self):
        self.clock.begin()

    def on_epoch_end(self):
        if self.clock.end_step(lambda: self.problem.error(self.model)):
            self.model.stop_training = True
        self.clock.begin()


def by_theirs(model, timer):
    model.compile("adam", lr=1e-3, verbose=0)
    model.train(iterations=ADAM, display_every=ADAM, callbacks=[timer], verbose=0)
    # As "L-BFGS" of DeepXDE, whose loop has no callback within its 1,000 iterations, in steps of a few.
    timer.clock.restart_steps()
    optimizer = torch.optim.LBFGS(
        model.net.parameters(),
        max_iter=EACH,
        history_size=100,
        tolerance_grad=1e-8,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    model.compile(optimizer, verbose=0)
    model.train(iterations=LBFGS // EACH, display_every=10**6, callbacks=[timer], verbose=0)


def by_broyden(model, timer):
    model.compile(hodiff.optim.SSBroyden(model.net.parameters(), max_iter=EACH), verbose=0)
    model.train(iterations=BROYDEN // EACH, display_every=10**6, callbacks=[timer], verbose=0)


WAYS = {
    "before: Adam, then L-BFGS": (by_theirs, False),
    "their residual, SSBroyden": (by_broyden, False),
    "hodiff's residual, SSBroyden": (by_broyden, True),
}


def report_ratios(rounds=30):
    """Print the time of a loss with its gradient by hodiff's residual, eager and compiled, and by DeepXDE's."""
    for name, problem in PROBLEMS.items():
        times = {}
        models = {way: problem.model(way != "theirs") for way in ("ours", "compiled", "theirs")}
        models["compiled"].data.pde = torch.compile(models["compiled"].data.pde)
        for model in models.values():
            model.compile("adam", lr=1e-3, verbose=0)
        for _ in range(rounds):
            for way, model in models.items():
                start = time.process_time()
                model.outputs_losses_train(*model.data.train_next_batch())[1].sum().backward()
                times.setdefault(way, []).append(time.process_time() - start)
        found = {way: 1e3 * min(own) for way, own in times.items()}
        ratios = (found[way] / found["theirs"] for way in ("ours", "compiled"))
        report(f"| {name} | {' | '.join(f'{each:.2f}' for each in (*found.values(), *ratios))} |")


def main(names, seeds):
    report_head()
    for name in names:
        problem = PROBLEMS[name]
        for title, (train, by_hodiff) in WAYS.items():
            clocks, losses = [Clock() for _ in range(seeds)], []
            for seed, clock in enumerate(clocks):
                model = problem.model(by_hodiff, seed)
                train(model, Timer(problem, clock))
                losses.append(model.outputs_losses_train(*model.data.train_next_batch())[1].sum().item())
            report_row(name, title, clocks, losses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report("| example | ms per loss with gradient, hodiff | compiled | DeepXDE | ratio | compiled |")
    report("|---|---:|---:|---:|---:|---:|")
    report_ratios()
    if int(sys.argv[1]):
        main(sys.argv[2:] or ["Poisson", "heat"], int(sys.argv[1]))
