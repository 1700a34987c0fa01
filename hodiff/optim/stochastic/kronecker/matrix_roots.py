"""Roots and eigenvectors of second moments."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import symmetric_eigen


def inverse_root(caller: str, moment: Tensor, power: float, damping: float) -> Tensor:
    r"""Compute $(M + \epsilon \lambda_{\max} I)^{-p}$ of a nonzero positive semi-definite M, or of a diagonal."""
    _require_finite(caller, moment)
    # Inverse roots of small eigenvalues magnify rounding errors.
    precise = moment if moment.device.type == "mps" else moment.double()
    values, vectors = (precise, None) if moment.dim() == 1 else symmetric_eigen(precise)
    largest = values.max()
    # Eigenvalues of zero up to rounding had no gradients; without damping their scale is zero.
    seen = values > len(values) * torch.finfo(moment.dtype).eps * largest
    scales = (values.where(seen, 0) + damping * largest) ** -power
    scales = scales.nan_to_num(posinf=0.0)
    return (scales if vectors is None else (vectors * scales) @ vectors.mT).to(moment.dtype)


def eigenvectors(caller: str, moment: Tensor) -> Tensor:
    """Return the eigenvectors of a symmetric matrix as columns, by decreasing eigenvalue."""
    _require_finite(caller, moment)
    precise = moment if moment.device.type == "mps" else moment.double()
    return symmetric_eigen(precise)[1].flip(-1).to(moment.dtype)


def turned(caller: str, moment: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of orthogonal iteration; return the order of the old columns and the new basis."""
    _require_finite(caller, moment)
    products = moment @ basis
    order = (basis * products).sum(0).argsort(descending=True, stable=True)
    return order, torch.linalg.qr(products[:, order]).Q


def _require_finite(caller: str, moment: Tensor) -> None:
    if not bool(moment.isfinite().all()):
        raise InputError(
            f"{caller}: step: expected gradients whose squares are finite, got NaN or infinity in the sum of them; "
            "look for the step where the loss is no number any more, or scale it down."
        )
