"""Inverse Hessians of many problems for quasi-Newton methods: dense matrices, or a few pairs of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hodiff.optimize.batched.running_rows import Rows, chosen, inner, times


class Memory(Protocol):
    """Approximation of the inverse Hessian of each problem."""

    def times(self, gradient: Tensor, free: Tensor | None) -> Tensor:
        """Multiply with gradients (b, n), in the space of the free unknowns; None if all are free."""

    def learn(self, which: Tensor, step: Tensor, change: Tensor) -> None:
        """Update some problems by steps (b, n) and changes of gradients."""

    def forget(self, which: Tensor) -> None:
        """Reset the matrices of some problems to the identity."""

    @property
    def fresh(self) -> Tensor:
        """Mask (b,) of problems without an update."""

    def retain(self, keep: Tensor) -> None:
        """Drop the rows of problems that are not in the mask `keep`."""


def has_curvature(along: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """Return whether s'y is positive beyond rounding."""
    eps = torch.finfo(along.dtype).eps
    return along > eps * (inner(step, step) * inner(change, change)).sqrt()


@dataclass
class DenseInverse(Rows):
    r"""BFGS updates of matrices (b, n, n).

    $$ H_+ = (I - \rho s y^T) H (I - \rho y s^T) + \rho s s^T, \qquad \rho = 1 / y^T s $$

    Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., equations 6.17 and 6.20.
    """

    matrix: Tensor
    learned: Tensor

    @classmethod
    def of(cls, x: Tensor) -> DenseInverse:
        """Begin with the identity for each row."""
        eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return cls(eye.expand(len(x), -1, -1).clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device))

    @property
    def fresh(self) -> Tensor:
        """Mask (b,) of problems without an update."""
        return ~self.learned

    def times(self, gradient: Tensor, free: Tensor | None = None) -> Tensor:
        """Multiply the matrices with gradients; all unknowns are free."""
        return times(self.matrix, gradient)

    def learn(self, which: Tensor, step: Tensor, change: Tensor) -> None:
        """Update the matrices; the first update scales the identity to the curvature of the step."""
        along = inner(step, change)
        which = which & has_curvature(along, step, change)
        scale = torch.where(self.learned, 1.0, along / inner(change, change))
        hy = scale[:, None] * times(self.matrix, change)
        weight = (1 + inner(change, hy) / along) / along
        # The update of rank two is the sum of this half and its transpose.
        column = weight[:, None] / 2 * step - hy / along[:, None]
        half = column[:, :, None] * step[:, None, :]
        updated = scale[:, None, None] * self.matrix + half + half.mT
        self.matrix = chosen(which, updated, self.matrix)
        self.learned = self.learned | which

    def forget(self, which: Tensor) -> None:
        """Reset the matrices of some problems to the identity."""
        eye = torch.eye(self.matrix.shape[1], dtype=self.matrix.dtype, device=self.matrix.device)
        self.matrix = chosen(which, eye.expand_as(self.matrix), self.matrix)
        self.learned = self.learned & ~which


@dataclass
class LimitedMemory(Rows):
    """Last pairs of steps and changes (b, m, n), multiplied by the two-loop recursion.

    Pairs are restricted to the free unknowns; a pair without curvature there is left out.

    Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., algorithm 7.4.
    """

    steps: Tensor
    changes: Tensor
    # Number of pairs since the last reset.
    learned: Tensor

    @classmethod
    def of(cls, x: Tensor, pairs: int) -> LimitedMemory:
        """Begin without pairs for each row."""
        empty = x.new_zeros(len(x), pairs, x.shape[1])
        return cls(empty, empty.clone(), torch.zeros(len(x), dtype=torch.int64, device=x.device))

    @property
    def fresh(self) -> Tensor:
        """Mask (b,) of problems without an update."""
        return self.learned == 0

    def times(self, gradient: Tensor, free: Tensor | None = None) -> Tensor:
        """Multiply with gradients; the result is zero for unknowns that are not free."""
        mask = torch.ones_like(gradient) if free is None else free.to(gradient.dtype)
        rows = torch.arange(len(gradient), device=gradient.device)
        q = mask * gradient
        scale, scaled = torch.ones_like(q[:, 0]), torch.zeros_like(self.learned, dtype=torch.bool)
        taken: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for back in range(1, min(self.steps.shape[1], int(self.learned.max())) + 1):
            place = (self.learned - back) % self.steps.shape[1]
            s, y = mask * self.steps[rows, place], mask * self.changes[rows, place]
            along = inner(s, y)
            good = (back <= self.learned) & has_curvature(along, s, y)
            weight = torch.where(good, 1 / along, 0.0)
            scale = torch.where(good & ~scaled, along / inner(y, y), scale)
            scaled = scaled | good
            alpha = weight * inner(s, q)
            q = q - alpha[:, None] * y
            taken.append((s, y, weight, alpha))
        r = scale[:, None] * q
        for s, y, weight, alpha in reversed(taken):
            r = r + (alpha - weight * inner(y, r))[:, None] * s
        return r

    def learn(self, which: Tensor, step: Tensor, change: Tensor) -> None:
        """Store the pairs of some problems, replacing the oldest ones."""
        which = which & has_curvature(inner(step, change), step, change)
        (rows,) = torch.nonzero(which, as_tuple=True)
        place = self.learned[rows] % self.steps.shape[1]
        self.steps[rows, place], self.changes[rows, place] = step[rows], change[rows]
        self.learned = self.learned + which

    def forget(self, which: Tensor) -> None:
        """Reset the matrices of some problems to the identity."""
        self.learned = torch.where(which, 0, self.learned)
