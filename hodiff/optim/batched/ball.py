r"""Quadratic models, each minimised in its ball.

$$ \min_p\; g^T p + \tfrac12 p^T H p \quad\text{with}\quad \|p\| \le r $$

Where H is positive definite and its Newton step lies in the ball, that is the step, by Cholesky's factors. Elsewhere
p solves $(H + \lambda I)\,p = -g$ with $\|p\| = r$, in the basis of eigenvectors, where Newton's method for
$1/\|p(\lambda)\| = 1/r$ rises to the solution from below.

Source: J. Moré & D. Sorensen, SIAM J. Sci. Stat. Comput. 4 (1983); A. Conn, N. Gould & Ph. Toint, *Trust-Region
Methods*, section 7.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.optim.batched.rows import inner, length, times

# Newton's method doubles the digits: it needs four to ten iterations.
MOST = 50
PRECISION = 1e-10


@dataclass
class Steps:
    """Steps (b, n), by how much the models fall, and whether the boundary ended them, (b,)."""

    step: Tensor
    change: Tensor
    bounded: Tensor


def steps_in_balls(hessian: Tensor, gradient: Tensor, radius: Tensor) -> Steps:
    """Minimise the models (b, n, n), (b, n) in balls of the radii (b,); all of them are finite."""
    factor, fault = torch.linalg.cholesky_ex(hessian)
    newton = -torch.cholesky_solve(gradient[..., None], factor)[..., 0]
    within = (fault == 0) & (length(newton) <= radius)
    found = Steps(newton, inner(gradient, newton) / 2, ~within)
    if not bool(within.all()):
        rest = ~within
        found.step[rest], found.change[rest], found.bounded[rest] = _at_boundary(
            hessian[rest], gradient[rest], radius[rest]
        )
    return found


def _at_boundary(hessian: Tensor, gradient: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(hessian)
    g = times(vectors.mT, gradient)
    rounding = torch.finfo(values.dtype).eps * values.abs().amax(-1)
    # By what the lowest eigenvalue is raised has all its digits, where the shift has lost them.
    gaps = values - values[:, :1]
    # Each element of p alone is as long as the radius at one shift: the solution's is none below.
    raised = (g.abs() / radius[:, None] - gaps).amax(-1).maximum(rounding)
    for _ in range(MOST):
        p = _raised(g, gaps, raised)
        norm = length(p)
        # Where the norm is below the radius already, the gradient has no part along the lowest eigenvector.
        outside = norm > radius * (1 + PRECISION)
        if not bool(outside.any()):
            break
        slope = inner(p, p / (gaps + raised[:, None]))
        raised = torch.where(outside, raised + norm.square() / slope * (norm / radius - 1), raised)
    p, bounded = _to_boundary(_raised(g, gaps, raised), values[:, 0] < -rounding, radius)
    change = inner(g, p) + inner(values, p.square()) / 2
    return times(vectors, p), change, bounded


def _raised(g: Tensor, gaps: Tensor, raised: Tensor) -> Tensor:
    """The solution in the basis of eigenvectors; zero where both vanish."""
    return -torch.where(g == 0, 0.0, g / (gaps + raised[:, None]))


def _to_boundary(p: Tensor, indefinite: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The hard case: where H is indefinite and p falls short, the rest of the way goes along the lowest eigenvector."""
    missing = (radius.square() - inner(p, p)).clamp_min(0)
    falls_short = (missing > 4 * PRECISION * radius.square()) & indefinite
    head = p[:, 0]
    # To the side where the model falls.
    along = torch.where(head >= 0, 1.0, -1.0) * (head.square() + missing).sqrt()
    p = torch.cat([torch.where(falls_short, along, head)[:, None], p[:, 1:]], -1)
    return p, falls_short | (missing <= 4 * PRECISION * radius.square())
