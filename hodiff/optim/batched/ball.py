r"""Minimisation of many quadratic models, each in a ball.

$$ \min_p\; g^T p + \tfrac12 p^T H p \quad\text{with}\quad \|p\| \le r $$

If H is positive definite and its Newton step lies in the ball, that is the step, by a Cholesky factorization.
Otherwise p solves $(H + \lambda I)\,p = -g$ with $\|p\| = r$. In the basis of eigenvectors, Newton's method for
$1/\|p(\lambda)\| = 1/r$ converges to the solution from below.

Source: J. Moré & D. Sorensen, SIAM J. Sci. Stat. Comput. 4 (1983); A. Conn, N. Gould & Ph. Toint, *Trust-Region
Methods*, section 7.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.optim.batched.rows import inner, length, times

# Newton's method converges quadratically: it needs four to ten iterations.
MOST = 50
PRECISION = 1e-10


@dataclass
class Steps:
    """Steps (b, n), the models' changes (b,), and whether the steps end at the boundary (b,)."""

    step: Tensor
    change: Tensor
    bounded: Tensor


def steps_in_balls(hessian: Tensor, gradient: Tensor, radius: Tensor) -> Steps:
    """Minimise finite models (b, n, n), (b, n) in balls of the radii (b,)."""
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
    # The iteration uses the raised lowest eigenvalue, as the shift itself would lose digits by cancellation.
    gaps = values - values[:, :1]
    # The largest shift at which a single element of p has length r is a lower bound of the solution's shift.
    raised = (g.abs() / radius[:, None] - gaps).amax(-1).maximum(rounding)
    for _ in range(MOST):
        p = _raised(g, gaps, raised)
        norm = length(p)
        # If the norm is below the radius from the start, the gradient has no part along the lowest eigenvector.
        outside = norm > radius * (1 + PRECISION)
        if not bool(outside.any()):
            break
        slope = inner(p, p / (gaps + raised[:, None]))
        raised = torch.where(outside, raised + norm.square() / slope * (norm / radius - 1), raised)
    p, bounded = _to_boundary(_raised(g, gaps, raised), values[:, 0] < -rounding, radius)
    change = inner(g, p) + inner(values, p.square()) / 2
    return times(vectors, p), change, bounded


def _raised(g: Tensor, gaps: Tensor, raised: Tensor) -> Tensor:
    """Solve in the basis of eigenvectors; elements with a zero gradient are zero."""
    return -torch.where(g == 0, 0.0, g / (gaps + raised[:, None]))


def _to_boundary(p: Tensor, indefinite: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Handle the hard case: if H is indefinite and p is too short, extend p along the lowest eigenvector."""
    missing = (radius.square() - inner(p, p)).clamp_min(0)
    falls_short = (missing > 4 * PRECISION * radius.square()) & indefinite
    head = p[:, 0]
    # The sign is that of the direction in which the model falls.
    along = torch.where(head >= 0, 1.0, -1.0) * (head.square() + missing).sqrt()
    p = torch.cat([torch.where(falls_short, along, head)[:, None], p[:, 1:]], -1)
    return p, falls_short | (missing <= 4 * PRECISION * radius.square())
