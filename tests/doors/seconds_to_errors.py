"""Processor seconds of training until an error reaches each goal, as rows of a table."""

import math
import sys
import time
from statistics import median

GOALS = (1e-2, 1e-3, 1e-4)


class Clock:
    """Notes the error after processor seconds of training, without those of computing the error."""

    def __init__(self):
        self.used, self.begun, self.least, self.found = 0.0, 0.0, math.inf, {}
        self.restart_steps()

    def restart_steps(self):
        """Count steps of another optimizer, whose first errors are computed at each step."""
        self.steps, self.next = 0, 1

    def begin(self):
        """Begin to measure."""
        self.begun = time.process_time()

    def end_step(self, error):
        """Stop to measure, and call `error()` if due; return whether the last goal is reached."""
        self.used += time.process_time() - self.begun
        self.steps += 1
        if self.steps >= self.next:
            self.next = math.ceil(1.05 * self.steps)
            self.least = min(self.least, error())
            for goal in GOALS:
                if self.least <= goal:
                    self.found.setdefault(goal, self.used)
        return self.least <= GOALS[-1]


def report(line):
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report_head():
    """Write the head of the table."""
    goals = " | ".join(f"seconds to {goal:.0e}" for goal in GOALS)
    report(f"| example | training | {goals} | least error | loss |\n|---|---|" + "---:|" * (len(GOALS) + 2))


def report_row(name, title, clocks, losses):
    """Write medians over the starts."""
    times = [median(clock.found.get(goal, math.inf) for clock in clocks) for goal in GOALS]
    cells = ["" if math.isinf(each) else f"{each:.1f}" for each in times]
    least = median(clock.least for clock in clocks)
    report(f"| {name} | {title} | {' | '.join(cells)} | {least:.1e} | {median(losses):.1e} |")
