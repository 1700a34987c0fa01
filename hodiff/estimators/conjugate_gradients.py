"""Preconditioned conjugate gradients for several right-hand sides at once, on the operator's device."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.estimators.results import precise
from hodiff.estimators.systems import Correction, System, norms_of


def correct(system: System, residual: Tensor, targets: Tensor) -> Correction:
    r"""Minimize $\frac12 x^T A x - r^T x$ over a growing Krylov space, each column with its own steps and its own stop.

    Columns that are done leave the block, and cost no more products.

    Args:
        system: The system, positive definite.
        residual: What the correction is to remove, (n, k).
        targets: Norms to which the columns are to be reduced.

    Returns:
        The correction.

    Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49 (1952).
    """
    step = torch.zeros_like(residual)
    reasons: list[str | None] = [None] * residual.shape[1]
    columns = torch.arange(residual.shape[1], device=residual.device)
    r = residual.clone()
    z = _preconditioned(system, r)
    p, rz = z.clone(), _dots(r, z)
    iteration = 0
    while True:
        blocked = (rz <= 0) | ~torch.isfinite(rz)
        for column in columns[blocked].tolist():
            reasons[column] = (
                f"the preconditioner is not positive definite at iteration {system.offset + iteration + 1}; make it so"
            )
        columns, r, p, rz, targets = _keep(~blocked, columns, r, p, rz, targets)
        if not len(columns) or iteration >= system.left:
            return Correction(step, reasons)

        image = system.apply(p)
        curvature = _dots(p, image)
        flat = ~(curvature > 0)
        for column in columns[flat].tolist():
            reasons[column] = (
                f"negative curvature met at iteration {system.offset + iteration + 1}: A + damping I is not positive "
                'definite; raise damping or use method="minres"'
            )
        columns, r, p, rz, targets, image, curvature = _keep(~flat, columns, r, p, rz, targets, image, curvature)
        length = (rz / curvature).to(r.dtype)
        step[:, columns] += length * p
        r = r - length * image
        iteration += 1
        norms = norms_of(r)
        system.advance_to(iteration)
        system.report(norms)
        columns, r, p, rz, targets = _keep(norms > targets, columns, r, p, rz, targets)
        if not len(columns):
            return Correction(step, reasons)
        z = _preconditioned(system, r)
        ahead = _dots(r, z)
        p = z + (ahead / rz).to(r.dtype) * p
        rz = ahead


def _preconditioned(system: System, r: Tensor) -> Tensor:
    return r if system.precondition is None else system.precondition(r)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (precise(a) * precise(b)).sum(0)


def _keep(mask: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """The columns of each part for which the mask is true."""
    return parts if bool(mask.all()) else tuple(part[..., mask] for part in parts)
