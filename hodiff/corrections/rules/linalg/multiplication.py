r"""Rules for products of matrices in groups, as in mixtures of experts, and of Householder reflectors.

Groups multiply as $Y_g = A_g B_g$. If one matrix holds all groups, `offs` gives their ends, and the rule differentiates
products of slices. Reflectors multiply in their compact form, $H_1 \cdots H_k = I - V T V^H$ with the reflectors as
columns of V and $T = (I + D S)^{-1} D$, where D has the coefficients $\tau$ on its diagonal and S is the strict upper
triangle of $V^H V$.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value_of
from hodiff.corrections.rules.linalg.factored_solves import for_lapack
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated, only_reverse_mode
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_internals.operators import grouped_mm
from hodiff.torch_operators.table import forms_of


@register(
    grouped_mm,
    name="torch.nn.functional.grouped_mm",
    kind="missing",
    routes=ROUTES[1:],
    reason="there is no forward rule; float64 is not supported",
    reference="the products of the groups, one by one",
)
def _grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Any:
    if only_reverse_mode() and self.dtype != torch.float64:
        return UNNEEDED
    if torch.compiler.is_compiling():
        return unable("a compiler does not know where groups end")
    product = _product(self, mat2, [] if offs is None else below_transforms(offs).tolist())
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


def _product(a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    if a.dim() == b.dim() == 3:
        return a @ b
    groups = [slice(*each) for each in pairwise([0, *ends])]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.dim() == 2:
        rows = [a[group] @ matrix for group, matrix in zip(groups, b.unbind(), strict=True)]
        # Rows after the last group belong to no group.
        return torch.cat([*rows, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
    columns = [matrix @ b[:, group] for group, matrix in zip(groups, a.unbind(), strict=True)]
    return torch.cat([*columns, b.new_zeros(a.shape[1], b.shape[1] - ends[-1])], dim=1)


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
    *forms_of("linalg.householder_product"),
    routes=FORWARD_INSIDE,
    reason="the forward rule overwrites a tensor that second derivatives need",
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
    *forms_of("ormqr"),
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
