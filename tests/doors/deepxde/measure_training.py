"""Print the seconds to an error of DeepXDE's examples, before and after hodiff, as the table of docs/guides/physics.md.

    python tests/doors/deepxde/measure_training.py STARTS [EXAMPLE ...]

Before: Adam at 1e-3 and then L-BFGS, as DeepXDE's examples train. After: `hodiff.optim.SSBroyden` in DeepXDE's loop,
with DeepXDE's residual and with that of hodiff's Taylor mode. Seconds are processor seconds
of one core, without those of the error, medians over the starts. A run ends at the last goal or after 3,000 iterations
(2,000 of SSBroyden). Losses are DeepXDE's, at the end of a run.
"""

import math
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from doors.deepxde.problems import PROBLEMS, dde

import hodiff

GOALS = (1e-2, 1e-3, 1e-4)
ADAM, LBFGS, BROYDEN, EACH = 1000, 2000, 2000, 10


class Clock(dde.callbacks.Callback):
    """Notes the error after processor seconds of training, and stops once the last goal is reached."""

    def __init__(self, problem):
        super().__init__()
        self.problem, self.used, self.start, self.found, self.count, self.next = problem, 0.0, 0.0, {}, 0, 1

    def on_train_begin(self):
        self.start = time.process_time()

    def on_epoch_end(self):
        self.used += time.process_time() - self.start
        self.count += 1
        if self.count >= self.next:
            self.next = math.ceil(1.05 * self.count)
            error = self.problem.error(self.model)
            self.least = min(error, getattr(self, "least", math.inf))
            for goal in GOALS:
                if error <= goal:
                    self.found.setdefault(goal, self.used)
            if error <= GOALS[-1]:
                self.model.stop_training = True
        self.start = time.process_time()


def by_theirs(model, clock):
    model.compile("adam", lr=1e-3, verbose=0)
    model.train(iterations=ADAM, display_every=ADAM, callbacks=[clock], verbose=0)
    # As "L-BFGS" of DeepXDE, whose loop has no callback within its 1,000 iterations, in steps of a few.
    clock.count, clock.next = 0, 1
    optimizer = torch.optim.LBFGS(
        model.net.parameters(),
        max_iter=EACH,
        history_size=100,
        tolerance_grad=1e-8,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    model.compile(optimizer, verbose=0)
    model.train(iterations=LBFGS // EACH, display_every=10**6, callbacks=[clock], verbose=0)


def by_broyden(model, clock):
    model.compile(hodiff.optim.SSBroyden(model.net.parameters(), max_iter=EACH), verbose=0)
    model.train(iterations=BROYDEN // EACH, display_every=10**6, callbacks=[clock], verbose=0)


WAYS = {
    "before: Adam, then L-BFGS": (by_theirs, False),
    "their residual, SSBroyden": (by_broyden, False),
    "hodiff's residual, SSBroyden": (by_broyden, True),
}


def report(line):
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report_ratios(rounds=30):
    """Print the time of a loss with its gradient by hodiff's residual, over that by DeepXDE's, in turns."""
    for name, problem in PROBLEMS.items():
        times = {}
        models = {by_hodiff: problem.model(by_hodiff) for by_hodiff in (True, False)}
        for model in models.values():
            model.compile("adam", lr=1e-3, verbose=0)
        for _ in range(rounds):
            for by_hodiff, model in models.items():
                start = time.process_time()
                model.outputs_losses_train(*model.data.train_next_batch())[1].sum().backward()
                times.setdefault(by_hodiff, []).append(time.process_time() - start)
        ours, theirs = (1e3 * min(times[by_hodiff]) for by_hodiff in (True, False))
        report(f"| {name} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")


def main(names, seeds):
    report(
        "| example | training | " + " | ".join(f"seconds to {goal:.0e}" for goal in GOALS) + " | least error | loss |"
    )
    report("|---|---|" + "---:|" * (len(GOALS) + 2))
    for name in names:
        problem = PROBLEMS[name]
        for title, (train, by_hodiff) in WAYS.items():
            runs = []
            for seed in range(seeds):
                model = problem.model(by_hodiff, seed)
                clock = Clock(problem)
                train(model, clock)
                _, losses = model.outputs_losses_train(*model.data.train_next_batch())
                runs.append((clock, losses.sum().item()))
            times = [median(clock.found.get(goal, math.inf) for clock, _ in runs) for goal in GOALS]
            cells = ["" if math.isinf(each) else f"{each:.1f}" for each in times]
            least, loss = median(clock.least for clock, _ in runs), median(loss for _, loss in runs)
            report(f"| {name} | {title} | {' | '.join(cells)} | {least:.1e} | {loss:.1e} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    report("| example | ms per loss with gradient, hodiff | DeepXDE | ratio |\n|---|---:|---:|---:|")
    report_ratios()
    main(sys.argv[2:] or ["Poisson", "heat"], int(sys.argv[1]))
