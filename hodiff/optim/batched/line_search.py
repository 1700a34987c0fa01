r"""Line searches of many problems, with one trial each in a round, by brackets for the weak Wolfe conditions.

$$ \varphi(t) \le \varphi(0) + c_1 t\, \varphi'(0), \qquad \varphi'(t) \ge c_2\, \varphi'(0) $$

A trial that violates the first condition becomes the bracket's upper end. A trial that violates the second becomes
the lower end. The bracket so closes on a step that satisfies both, even if bounds bend the line. If values differ
only by rounding, slopes decide.

Source: A. Lewis & M. Overton, Math. Program. 141 (2013), algorithm 2.6; W. Hager & H. Zhang, SIAM J. Optim. 16 (2005),
equation 4.1, for the approximate conditions; J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., equation 3.59.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.optim.batched.running_rows import Rows, chosen

# Growth of steps without an upper end; smallest distance of a trial to the bracket's ends, relative to its width;
# every how many trials a bracket is halved; retreat to where the function is finite; most trials.
GROWTH, MARGIN, HALVED, RETREAT, MOST = 2.5, 0.1, 3, 0.1, 60


@dataclass
class Search(Rows):
    """State of the line searches.

    Attributes:
        value: Values at step 0, (b,).
        slope: Slopes along the lines at step 0.
        step: Steps of the next trials.
        low: Step, value and slope at the lower ends, (b, 3).
        high: Step, value and slope at the upper ends; the step is infinite if there is no upper end.
        trials: Numbers of trials.
    """

    value: Tensor
    slope: Tensor
    step: Tensor
    low: Tensor
    high: Tensor
    trials: Tensor

    @classmethod
    def begin(cls, value: Tensor, slope: Tensor, step: Tensor) -> Search:
        """Begin searches with a first step."""
        low = torch.stack([torch.zeros_like(value), value, slope], 1)
        return cls(value, slope, step, low, torch.full_like(low, torch.inf), torch.zeros_like(value, dtype=torch.int64))

    def anew(self, which: Tensor, value: Tensor, slope: Tensor, step: Tensor) -> None:
        """Restart the searches of some problems."""
        other = Search.begin(value, slope, step)
        for name in ("value", "slope", "step", "low", "high", "trials"):
            setattr(self, name, chosen(which, getattr(other, name), getattr(self, name)))

    def judge(self, value: Tensor, slope: Tensor, expected: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        """Mark the trials that end their search; the other trials update the brackets.

        Args:
            value: Values at the trials.
            slope: Slopes along the lines at the trials.
            expected: Changes of the values if the functions were linear.
            c1: Constant of Wolfe's first condition.
            c2: Constant of Wolfe's second condition.
            eps: Machine epsilon of the values.

        Returns:
            Mask (b,) of the searches that end.
        """
        finite = torch.isfinite(value) & torch.isfinite(slope)
        lower = value <= self.value + c1 * expected.clamp_max(0)
        noise = 10 * eps * self.value.abs()
        same = (value <= self.value + noise) & (slope <= (2 * c1 - 1) * self.slope)
        low = finite & (lower | same)
        steep = slope < c2 * self.slope
        trial = torch.stack([self.step, value, slope], 1)
        self.low = chosen(low & steep, trial, self.low)
        self.high = chosen(~low, trial, self.high)
        self.trials = self.trials + 1
        self.step = self._next()
        return low & ~steep

    def stuck(self) -> Tensor:
        """Mark the searches whose bracket is closed or whose trials are used up."""
        low, high = self.low[:, 0], self.high[:, 0]
        closed = torch.isfinite(high) & (high - low <= 4 * torch.finfo(high.dtype).eps * high)
        return closed | (self.trials >= MOST)

    def _next(self) -> Tensor:
        """Minimise the cubic through the bracket's ends; without an upper end, grow the step."""
        (a, value_a, slope_a), (b, value_b, slope_b) = self.low.T, self.high.T
        width = b - a
        mean = slope_a + slope_b - 3 * (value_b - value_a) / width
        root = (mean.square() - slope_a * slope_b).sqrt()
        least = b - width * (slope_b + root - mean) / (slope_b - slope_a + 2 * root)
        halved = (self.trials % HALVED == 0) | ~torch.isfinite(least)
        inside = torch.where(halved, a + width / 2, least.maximum(a + MARGIN * width).minimum(b - MARGIN * width))
        inside = torch.where(torch.isfinite(value_b) & torch.isfinite(slope_b), inside, a + RETREAT * width)
        return torch.where(torch.isfinite(b), inside, GROWTH * self.step)
