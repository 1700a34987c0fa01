r"""Rules for products of Householder reflectors, in their compact form.

$H_1 \cdots H_k = I - V T V^H$ with the reflectors as columns of V and $T = (I + D S)^{-1} D$, where D has the
coefficients $\tau$ on its diagonal and S is the strict upper triangle of $V^H V$.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED
from hodiff.corrections.linalg.factored import for_lapack
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value_of
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

_SOURCE = "Schreiber & Van Loan (1989); Joffrain et al. (2006), UT transform"


def _compact(input: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return V and T."""
    k = tau.shape[-1]
    columns = input[..., :, :k]
    reflectors = columns.tril(-1) + torch.eye(*columns.shape[-2:], dtype=input.dtype, device=input.device)
    coefficients = tau.diag_embed()
    # The solve reads the strict upper triangle only, and takes the diagonal as ones.
    system = tau.unsqueeze(-1) * (reflectors.mH @ reflectors)
    triangle = torch.linalg.solve_triangular(system, coefficients, upper=True, unitriangular=True)
    return reflectors, triangle


@register(
    torch.linalg.householder_product,
    torch.orgqr,
    torch.Tensor.orgqr,
    name="torch.linalg.householder_product",
    routes=FORWARD_INSIDE,
    reason="the forward rule changes in place what a second derivative needs",
    reference=_SOURCE,
    covers=for_lapack,
)
def _householder_product(input: Tensor, tau: Tensor) -> Any:
    if not _fits(input, tau) or input.shape[-1] > input.shape[-2]:
        return INVALID
    if not may_be_differentiated((input, tau)):
        return UNNEEDED
    reflectors, triangle = _compact(input, tau)
    identity = torch.eye(*input.shape[-2:], dtype=input.dtype, device=input.device)
    y = identity - reflectors @ (triangle @ reflectors[..., : input.shape[-1], :].mH)
    return with_value_of(y, torch.linalg.householder_product, input, tau)


@register(
    torch.ormqr,
    torch.Tensor.ormqr,
    name="torch.ormqr",
    kind="missing",
    routes=ROUTES[1:],
    reason="there is no forward rule",
    reference=_SOURCE,
    covers=for_lapack,
)
def _ormqr(input: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False) -> Any:
    if not _fits(input, tau) or other.dim() != input.dim() or other.shape[-2 if left else -1] != input.shape[-2]:
        return INVALID
    if not may_be_differentiated((input, tau, other)):
        return UNNEEDED
    reflectors, triangle = _compact(input, tau)
    if transpose:
        triangle = triangle.mH
    if left:
        y = other - reflectors @ (triangle @ (reflectors.mH @ other))
    else:
        y = other - ((other @ reflectors) @ triangle) @ reflectors.mH
    return with_value_of(y, torch.ormqr, input, tau, other, left, transpose)


def _fits(input: Tensor, tau: Tensor) -> bool:
    """Whether shapes and dtypes are valid; torch refuses other arguments."""
    return (
        input.dim() >= 2
        and input.dtype == tau.dtype
        and input.shape[:-2] == tau.shape[:-1]
        and tau.shape[-1] <= min(input.shape[-2:])
    )
