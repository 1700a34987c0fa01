r"""Line searches of many problems, each a trial a round, by a bracket that ends at Wolfe's weak conditions.

$$ \varphi(t) \le \varphi(0) + c_1 t\, \varphi'(0), \qquad \varphi'(t) \ge c_2\, \varphi'(0) $$

A trial that breaks the first is the bracket's upper end, one that breaks the second its lower; so it closes on a step
that keeps both also where the line is bent at bounds. Where values differ by rounding only, slopes decide.

Source: A. Lewis & M. Overton, Math. Program. 141 (2013), algorithm 2.6; W. Hager & H. Zhang, SIAM J. Optim. 16 (2005),
equation 4.1, for the approximate conditions; J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., equation 3.59.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.optim.batched.rows import Rows, chosen

# By what steps grow before there is an upper end; how near to its ends a bracket is probed; how often in a row before
# it is halved; how far a step goes back to where the function is finite; and how many trials there are.
GROWTH, MARGIN, HALVED, RETREAT, MOST = 2.5, 0.1, 3, 0.1, 60


@dataclass
class Search(Rows):
    """Where each search is.

    Attributes:
        value: (b,), that of step 0.
        slope: That along the line.
        step: The next trial's.
        low: The lower end's step, value and slope, (b, 3).
        high: The upper end's; its step is infinite where there is none.
        trials: How many there were.
    """

    value: Tensor
    slope: Tensor
    step: Tensor
    low: Tensor
    high: Tensor
    trials: Tensor

    @classmethod
    def begin(cls, value: Tensor, slope: Tensor, step: Tensor) -> Search:
        """With a first step."""
        low = torch.stack([torch.zeros_like(value), value, slope], 1)
        return cls(value, slope, step, low, torch.full_like(low, torch.inf), torch.zeros_like(value, dtype=torch.int64))

    def anew(self, which: Tensor, value: Tensor, slope: Tensor, step: Tensor) -> None:
        """Begin some of them again."""
        other = Search.begin(value, slope, step)
        for name in ("value", "slope", "step", "low", "high", "trials"):
            setattr(self, name, chosen(which, getattr(other, name), getattr(self, name)))

    def judge(self, value: Tensor, slope: Tensor, expected: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        """Which trials end their search; of the others the bracket takes them in.

        Args:
            value: At the trials.
            slope: Along the line there.
            expected: By how much the values would change if they were linear.
            c1: Of Wolfe's first condition.
            c2: Of the second.
            eps: Machine epsilon of values.

        Returns:
            A mask (b,).
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
        """Which searches have nowhere left to look."""
        low, high = self.low[:, 0], self.high[:, 0]
        closed = torch.isfinite(high) & (high - low <= 4 * torch.finfo(high.dtype).eps * high)
        return closed | (self.trials >= MOST)

    def _next(self) -> Tensor:
        """Where the cubic through the bracket's ends is least; beyond the lower end where there is no upper."""
        (a, value_a, slope_a), (b, value_b, slope_b) = self.low.T, self.high.T
        width = b - a
        mean = slope_a + slope_b - 3 * (value_b - value_a) / width
        root = (mean.square() - slope_a * slope_b).sqrt()
        least = b - width * (slope_b + root - mean) / (slope_b - slope_a + 2 * root)
        halved = (self.trials % HALVED == 0) | ~torch.isfinite(least)
        inside = torch.where(halved, a + width / 2, least.maximum(a + MARGIN * width).minimum(b - MARGIN * width))
        inside = torch.where(torch.isfinite(value_b) & torch.isfinite(slope_b), inside, a + RETREAT * width)
        return torch.where(torch.isfinite(b), inside, GROWTH * self.step)
