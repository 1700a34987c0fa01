r"""Lesson 26: `ElementwiseFunction`, a Function from a formula and its slope.

$$ y = x^2, \qquad y' = 2x, \qquad y'' = 2 $$

This is the square of lesson 1 once more. Every elementwise Function has the same backward, jvp and batching rule around
its slope, with broadcasting as in lesson 11. `ElementwiseFunction` provides them, so only the formula and its slope
remain. The slope is differentiated in turn. If torch operators would be unstable, the slope calls another such
Function, as the sigmoid of lesson 6 does. Most Functions of `hodiff.functions` are written like this.

    python examples/functions/26_elementwise.py

Exercise: write `ScaledExp`, $x e^y$ with broadcasting, as an `ElementwiseFunction`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hodiff
from hodiff.functions import ElementwiseFunction

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Square(ElementwiseFunction):
    """$x^2$. Saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x * x

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Return $2x$, the slope of the only input."""
        del index
        return 2 * x


def draw(figure: Any) -> None:
    """The same picture as in lesson 1; the dots are SciPy's differences."""
    hodiff.plot.derivatives(Square.apply, -2, 2, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Square by every route to third order."""
    report = hodiff.check(Square, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
