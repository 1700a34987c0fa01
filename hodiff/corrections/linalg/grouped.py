r"""Products of matrices in groups, as in mixtures of experts: $Y_g = A_g B_g$.

If one matrix holds all groups, `offs` gives their ends. The rule differentiates products of slices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED, unable
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_internals.operators import grouped_mm


@register(
    grouped_mm,
    name="torch.nn.functional.grouped_mm",
    kind="missing",
    routes=ROUTES[1:],
    reason="there is no forward rule, and nothing at all for float64",
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
