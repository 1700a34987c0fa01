"""Soft ranks and soft sorting: projections on the permutahedron, the hull of all permutations of a vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_bool
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import (
    require_dims,
    require_floating,
    require_positive_or_floating,
)
from hodiff.rules.blockwise import all_batched
from hodiff.rules.nesting import nestable_jvp


@torch.library.custom_op("hodiff::isotonic_blocks", mutates_args=())
def isotonic_blocks(y: Tensor) -> Tensor:
    """Blocks on which nonincreasing isotonic regression is constant, by pooling adjacent violators.

    Every round merges all runs of blocks whose means increase, in all rows at once. Merging in any order gives the
    same blocks.

    Args:
        y: Floating-point tensor, with one regression per row of the last dimension.

    Returns:
        The block of each entry, numbered from 0 in each row.

    Source: M. J. Best & N. Chakravarti, "Active set algorithms for isotonic regression", 1990, section 3.
    """
    y = y.double()
    blocks = torch.arange(y.shape[-1], device=y.device).expand(y.shape).clone()
    while True:
        sums = torch.zeros_like(y).scatter_add_(-1, blocks, y)
        counts = torch.zeros_like(y).scatter_add_(-1, blocks, torch.ones_like(y))
        means = (sums / counts).gather(-1, blocks)
        # A new block starts where the mean falls, or stays between two blocks.
        starts = (blocks.diff(dim=-1) > 0) & ~(means.diff(dim=-1) > 0)
        merged = torch.zeros_like(blocks)
        merged[..., 1:] = starts.cumsum(-1)
        if torch.equal(merged, blocks):
            return blocks
        blocks = merged


@isotonic_blocks.register_fake
def _(y: Tensor) -> Tensor:
    return torch.empty(y.shape, dtype=torch.int64, device=y.device)


@isotonic_blocks.register_vmap
def _(info: Any, in_dims: tuple[int], y: Tensor) -> tuple[Tensor, int]:
    del info
    return isotonic_blocks(y.movedim(in_dims[0], 0)), 0


class PermutahedronProjection(AnyOrderFunction):
    """Projection of a descending vector on the permutahedron of another, given the blocks. Saves the blocks.

    It is linear for fixed blocks: in each block, the mean of w replaces the mean of z.
    """

    @staticmethod
    def forward(z: Tensor, w: Tensor, blocks: Tensor) -> Tensor:
        r"""Compute $z - \bar z + \bar w$ with means over blocks, which keeps the digits of a small w."""
        return z - _block_means(z, blocks) + _block_means(w, blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the blocks."""
        del output
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Subtract block means for z, and return block means for w: the Jacobians are symmetric."""
        if cotangent is None:
            return None, None, None
        means = _block_means(cotangent, *ctx.saved_tensors)
        by_z, by_w = ctx.needs_input_grad[:2]
        return cotangent - means if by_z else None, means if by_w else None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, z_tangent: Tensor | None, w_tangent: Tensor | None, _: None) -> Tensor | None:
        """Replace the block means of z's tangent by the block means of w's tangent."""
        (blocks,) = ctx.saved_tensors
        if z_tangent is None:
            return None if w_tangent is None else _block_means(w_tangent, blocks)
        exchanged = z_tangent if w_tangent is None else z_tangent - w_tangent
        return z_tangent - _block_means(exchanged, blocks)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        """Put every batch dimension in front."""
        return PermutahedronProjection.call(*all_batched(info.batch_size, in_dims, inputs)), 0


@overridable
def soft_rank(x: Tensor, temperature: Tensor | float = 1.0, dim: int = -1, *, descending: bool = False) -> Tensor:
    r"""Soft ranks along a dimension, from 1 to n: the projection of $x / \varepsilon$ on all permutations of 1, ..., n.

    $$ r = P(x / \varepsilon, \rho), \quad P(z, w) = \arg\min_{y \in \operatorname{conv} \Pi(w)} \tfrac12
       \lVert y - z \rVert^2, \quad \rho = (n, \dots, 1) $$

    As the temperature falls, they become the ranks, exactly once all gaps are wider than $\varepsilon$; as it rises,
    all become their mean $(n + 1) / 2$. Equal numbers get equal ranks. The Jacobian takes block means, and second
    derivatives with respect to `x` are 0 almost everywhere; derivatives with respect to the temperature are exact, too.

    Args:
        x: Floating-point tensor of at least one dimension, finite.
        temperature: $\varepsilon > 0$, the strength of the quadratic regularization: number, or floating-point tensor
            without dimensions that may require a gradient.
        dim: The dimension along which to rank.
        descending: Whether rank 1 goes to the largest number instead of the smallest.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> soft_rank(torch.tensor([0.5, 3.0, 1.0]), 0.1)
        tensor([1., 3., 2.])
        >>> soft_rank(torch.tensor([0.5, 3.0, 1.0]), 1.0)
        tensor([1.2500, 3.0000, 1.7500])

    Source: M. Blondel, O. Teboul, Q. Berthet & J. Djolonga, "Fast differentiable sorting and ranking", 2020,
    equation 6 and propositions 3 and 4.
    """
    dim = _checked("soft_rank", x, temperature, dim, descending)
    z = (-x if descending else x).movedim(dim, -1) / temperature
    z, order = z.sort(dim=-1, descending=True)
    ranks = _project(z, _descending_ranks(z))
    return ranks.gather(-1, order.argsort(dim=-1)).movedim(-1, dim)


@overridable
def soft_sort(x: Tensor, temperature: Tensor | float = 1.0, dim: int = -1, *, descending: bool = False) -> Tensor:
    r"""Soft sorting along a dimension: the projection of $\rho / \varepsilon$ on all permutations of `x`.

    $$ s = P(\rho / \varepsilon, x), \quad P(z, w) = \arg\min_{y \in \operatorname{conv} \Pi(w)} \tfrac12
       \lVert y - z \rVert^2, \quad \rho = (n, \dots, 1) $$

    This is the descending order; the ascending order is minus the descending order of $-x$. As the temperature falls,
    it becomes the sorted vector, exactly once no gap is wider than $1 / \varepsilon$; as it rises, all entries become
    their mean. The Jacobian takes block means of the sorted entries, and second derivatives with respect to `x` are 0
    almost everywhere; derivatives with respect to the temperature are exact, too.

    Args:
        x: Floating-point tensor of at least one dimension, finite.
        temperature: $\varepsilon > 0$, the strength of the quadratic regularization: number, or floating-point tensor
            without dimensions that may require a gradient.
        dim: The dimension along which to sort.
        descending: Whether the largest number comes first.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> soft_sort(torch.tensor([0.5, 3.0, 1.0]), 0.1)
        tensor([0.5000, 1.0000, 3.0000])
        >>> soft_sort(torch.tensor([0.5, 3.0, 1.0]), 1.0)
        tensor([0.5000, 1.5000, 2.5000])

    Source: M. Blondel, O. Teboul, Q. Berthet & J. Djolonga, "Fast differentiable sorting and ranking", 2020,
    equation 5 and propositions 3 and 4.
    """
    dim = _checked("soft_sort", x, temperature, dim, descending)
    w = (x if descending else -x).movedim(dim, -1).sort(dim=-1, descending=True).values
    s = _project(_descending_ranks(w) / temperature, w)
    return (s if descending else -s).movedim(-1, dim)


def _project(z: Tensor, w: Tensor) -> Tensor:
    """Project descending z on the permutahedron of descending w."""
    blocks = isotonic_blocks((z - w).detach())
    if torch.compiler.is_compiling():
        return PermutahedronProjection.forward(z, w, blocks)
    return PermutahedronProjection.call(z, w, blocks)


def _block_means(x: Tensor, blocks: Tensor) -> Tensor:
    """Return for each entry the mean over its block."""
    sums = torch.zeros_like(x).scatter_add(-1, blocks, x)
    counts = torch.zeros_like(x).scatter_add(-1, blocks, torch.ones_like(x))
    # Block numbers without entries are never gathered; without the clamp, they would give 0 / 0.
    return (sums / counts.clamp(min=1)).gather(-1, blocks)


def _descending_ranks(x: Tensor) -> Tensor:
    size = x.shape[-1]
    return torch.arange(size, 0, -1, dtype=x.dtype, device=x.device).expand(x.shape)


def _checked(function: str, x: Tensor, temperature: Any, dim: Any, descending: Any) -> int:
    require_floating(function, x=x)
    require_positive_or_floating(function, "temperature", temperature)
    require_bool(function, "descending", descending)
    if x.dim() == 0:
        raise InputError(f"{function}: x: expected at least one dimension, got a number; x.unsqueeze(0) adds one.")
    dims = require_dims(function, x, dim)
    if len(dims) != 1:
        raise InputError(f"{function}: dim: expected one dimension, got {dim!r}.")
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        raise InputError(
            f"{function}: temperature: expected a number or a tensor without dimensions, got shape "
            f"{tuple(temperature.shape)}; use torch.func.vmap for one temperature per row."
        )
    return dims[0]
