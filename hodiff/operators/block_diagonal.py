"""The block diagonal of an operator, with a dense block for each layer or parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_int
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.operators.data.watched_point import Point
from hodiff.operators.kfac.blocks import DenseBlock, Layout, Piece
from hodiff.operators.kfac.factored import FactoredOperator
from hodiff.operators.linear.constant_points import point_leaves
from hodiff.operators.linear.conversion import Conversion
from hodiff.operators.linear.linear_operator import LinearOperator, require_operator
from hodiff.operators.linear.spaces import Space

LAYER, PARAMETER = "layer", "parameter"


class BlockDiagonalOperator(FactoredOperator):
    r"""The block diagonal of a symmetric operator, with the couplings between layers or parameters set to 0.

    $$ B = \operatorname{blockdiag}(A_{11}, \dots, A_{LL}) $$

    The blocks are exact, computed on first use as `A.block(names).to_dense()`, and kept. Products, inverse, determinant
    and eigenvalues then need no more products with A.

    Args:
        A: A symmetric operator on a pytree, such as a `hodiff.GaussNewtonOperator`.
        by: "layer" for a block of all parameters with the same name before the last dot, such as "0.weight" and
            "0.bias"; "parameter" for a block of each; or a list of lists of names that has each parameter once.
        memory_budget: The largest memory of all blocks in bytes, 4 GiB by default.

    Attributes:
        blocks: The blocks, with `matrix` (p, p).

    Raises:
        InputError: If an argument is invalid, or the blocks take more memory.

    Example:
        >>> import torch, hodiff
        >>> from hodiff.operators import BlockDiagonalOperator
        >>> x = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
        >>> A = hodiff.HessianOperator(lambda x: (x["a"] ** 2 * x["b"] ** 2).sum(), x)
        >>> B = BlockDiagonalOperator(A, by="parameter")
        >>> A.to_dense(), B.to_dense()
        (tensor([[8., 8.],
                [8., 2.]]), tensor([[8., 0.],
                [0., 2.]]))
        >>> B.inverse() @ x
        {'a': tensor([0.1250]), 'b': tensor([1.])}

    Source: J. Martens & R. Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML
    2015, section 4.2.
    """

    def __init__(self, A: LinearOperator, *, by: str | Sequence[Sequence[str]] = LAYER, memory_budget: int = 2**32):
        require_operator(A, "BlockDiagonalOperator", "A")
        require_int("BlockDiagonalOperator", "memory_budget", memory_budget, 0, remedy="it counts bytes")
        A.domain.require_whole("BlockDiagonalOperator", "products A @ v")
        if not A.symmetric:
            raise InputError(
                f"BlockDiagonalOperator: A: expected a symmetric operator, got {A!r}; pass 0.5 * (A + A.T), or for "
                "a matrix MatrixOperator(matrix, symmetric=True)."
            )
        super().__init__(A.domain)
        self.operator, self.by, self.memory_budget = A, by, memory_budget
        self.names = _groups(A.domain, by)
        sizes = dict(zip(A.domain.labels, A.domain.sizes, strict=True))
        numbers = [sum(sizes[name] for name in names) for names in self.names]
        needed = sum(size**2 for size in numbers) * self.dtype.itemsize
        if needed > memory_budget:
            largest = max(range(len(numbers)), key=numbers.__getitem__)
            raise InputError(
                f"BlockDiagonalOperator: memory_budget: expected at least {needed:,} bytes for all blocks, of which "
                f"{', '.join(self.names[largest])} has {numbers[largest]:,} columns, got {memory_budget:,}; use "
                "smaller blocks, hodiff.KFACOperator, or A.diagonal(exact=True)."
            )
        self.point = Point(point_leaves(A))
        self._blocks: tuple[DenseBlock, ...] | None = None

    @property
    def blocks(self) -> tuple[DenseBlock, ...]:
        """The blocks, computed on first use."""
        self._require_unchanged()
        if self._blocks is None:
            self._blocks = self._compute()
        return self._blocks

    @leave_inference_mode
    def _compute(self) -> tuple[DenseBlock, ...]:
        indices = {label: i for i, label in enumerate(self.domain.labels)}
        found = []
        for names in self.names:
            pieces = tuple(Piece(indices[name], (1, self.domain.sizes[indices[name]], 1)) for name in names)
            with torch.no_grad():
                matrix = self._block(names)
            # Products differ by rounding from those of the transpose.
            found.append(DenseBlock(Layout(pieces, dim=-2), (matrix + matrix.mT) / 2))
        return tuple(found)

    def _block(self, names: Sequence[str]) -> Tensor:
        try:
            # A block has the dtype and device of its own parameters.
            return self.operator.block(names).to_dense().to(self.device, self.dtype)
        except InputError:
            # The function does not depend on these parameters alone. Products with the whole operator take longer.
            starts = dict(zip(self.domain.labels, accumulate((0, *self.domain.sizes)), strict=False))
            sizes = dict(zip(self.domain.labels, self.domain.sizes, strict=True))
            index = torch.cat([torch.arange(starts[name], starts[name] + sizes[name]) for name in names])
            units = torch.zeros(self.shape[0], len(index), dtype=self.dtype, device=self.device)
            units[index, torch.arange(len(index))] = 1
            return self.operator.multiply(units)[index]

    def at(self, x: PyTree) -> BlockDiagonalOperator:
        """See `LinearOperator.at`."""
        return BlockDiagonalOperator(self.operator.at(x), by=self.by, memory_budget=self.memory_budget)

    def converted(self, conversion: Conversion) -> BlockDiagonalOperator:
        """See `LinearOperator.to`."""
        return BlockDiagonalOperator(self.operator.converted(conversion), by=self.by, memory_budget=self.memory_budget)


def _groups(domain: Space, by: Any) -> list[list[str]]:
    """Return the names of the parameters of each block."""
    labels = domain.labels
    if isinstance(by, str):
        require_choice("BlockDiagonalOperator", "by", by, (LAYER, PARAMETER))
        layers: dict[str, list[str]] = {}
        for label in labels:
            layers.setdefault(label if by == PARAMETER else label.rpartition(".")[0], []).append(label)
        return list(layers.values())
    groups = [list(names) for names in by]
    if sorted(name for names in groups for name in names) != sorted(labels):
        raise InputError(
            f"BlockDiagonalOperator: by: expected 'layer', 'parameter', or lists with each of {', '.join(labels)} "
            f"once, got {by!r}."
        )
    return groups
