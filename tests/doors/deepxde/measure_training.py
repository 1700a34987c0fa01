"""Print the seconds to an error of DeepXDE's examples, before and after hodiff, as the table of docs/guides/physics.md.

    python tests/doors/deepxde/measure_training.py

Before: DeepXDE's residual, Adam at 1e-3 and then L-BFGS, as its examples train. After: the residual by hodiff's Taylor
mode, and `hodiff.optim.SSBroyden` in DeepXDE's loop. Rows between change one of the two. Seconds are processor seconds
of one core, without those of the error, medians of three starts. Losses are DeepXDE's, at the end of a run.
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
ADAM, LBFGS, BROYDEN, EACH = 2000, 6000, 3000, 10


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
    clock.next = clock.count
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
    "hodiff's residual, Adam, then L-BFGS": (by_theirs, True),
    "after: hodiff's residual, SSBroyden": (by_broyden, True),
}


def main(names, seeds=3):
    torch.set_num_threads(1)
    print(
        "| example | training | " + " | ".join(f"seconds to {goal:.0e}" for goal in GOALS) + " | least error | loss |"
    )
    print("|---|---|" + "---:|" * (len(GOALS) + 2))
    for name in names:
        problem = PROBLEMS[name]
        for title, (train, by_hodiff) in WAYS.items():
            runs = []
            for seed in range(seeds):
                model = problem.model(by_hodiff, seed)
                clock = Clock(problem)
                train(model, clock)
                runs.append((clock, float(sum(model.losshistory.loss_train[-1]))))
            times = [median(clock.found.get(goal, math.inf) for clock, _ in runs) for goal in GOALS]
            cells = ["" if math.isinf(each) else f"{each:.1f}" for each in times]
            least, loss = median(clock.least for clock, _ in runs), median(loss for _, loss in runs)
            print(f"| {name} | {title} | {' | '.join(cells)} | {least:.1e} | {loss:.1e} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["Poisson", "heat", "Burgers"])
