"""Operators made of operators: sums, multiples, products, transposes, blocks; matrices and diagonals as operators."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.operators.base import LinearOperator, require_operator
from hodiff.operators.restriction import leaves_named, subspace
from hodiff.operators.spaces import Space


class SumOperator(LinearOperator):
    r"""The sum $A_1 + \dots + A_j$.

    Args:
        terms: The operators, all between the same spaces.
    """

    def __init__(self, terms: Sequence[LinearOperator]):
        first = terms[0]
        super().__init__(first.domain, first.codomain, symmetric=all(term.symmetric for term in terms))
        self.terms = tuple(terms)

    def multiply(self, block: Tensor) -> Tensor:
        """The sum of the terms' products."""
        total = self.terms[0].multiply(block)
        for term in self.terms[1:]:
            total = total + term.multiply(block)
        return total

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The sum of the terms' transposed products."""
        total = self.terms[0].multiply_transposed(block)
        for term in self.terms[1:]:
            total = total + term.multiply_transposed(block)
        return total


class ScaledOperator(LinearOperator):
    r"""The multiple $c A$.

    Args:
        operator: The operator.
        factor: The number.
    """

    def __init__(self, operator: LinearOperator, factor: float | Tensor):
        super().__init__(operator.domain, operator.codomain, symmetric=operator.symmetric)
        self.operator = operator
        self.factor = factor

    def multiply(self, block: Tensor) -> Tensor:
        """The multiple of the product."""
        return self.factor * self.operator.multiply(block)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The multiple of the transposed product."""
        return self.factor * self.operator.multiply_transposed(block)


class ProductOperator(LinearOperator):
    r"""The product $A_1 A_2 \cdots A_j$: the last one is applied first.

    Args:
        factors: The operators; each maps from where the one before it takes its vectors.
    """

    def __init__(self, factors: Sequence[LinearOperator]):
        super().__init__(factors[-1].domain, factors[0].codomain)
        self.factors = tuple(factors)

    def multiply(self, block: Tensor) -> Tensor:
        """Apply one after the other."""
        for factor in reversed(self.factors):
            block = factor.multiply(block)
        return block

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Apply the transposes, the first factor's first."""
        for factor in self.factors:
            block = factor.multiply_transposed(block)
        return block


class TransposedOperator(LinearOperator):
    r"""The transpose $A^\top$.

    Args:
        operator: The operator.
    """

    def __init__(self, operator: LinearOperator):
        super().__init__(operator.codomain, operator.domain)
        self.operator = operator

    def multiply(self, block: Tensor) -> Tensor:
        """The operator's transposed product."""
        return self.operator.multiply_transposed(block)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The operator's own product."""
        return self.operator.multiply(block)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - as in the base class
        """The operator itself."""
        return self.operator


class IdentityOperator(LinearOperator):
    """The identity.

    Args:
        domain: The space, or a pytree like its vectors.
    """

    def __init__(self, domain: Any):
        super().__init__(domain if isinstance(domain, Space) else Space.of(domain), symmetric=True)

    def multiply(self, block: Tensor) -> Tensor:
        """The block itself."""
        return block


class DiagonalOperator(LinearOperator):
    r"""The diagonal matrix $\operatorname{diag}(d)$, for instance a preconditioner.

    Args:
        diagonal: The numbers d, as a pytree; a flat vector (n,) makes an operator on flat vectors.

    Example:
        >>> import torch
        >>> DiagonalOperator(torch.tensor([1.0, 2.0])) @ torch.ones(2)
        tensor([1., 2.])
    """

    def __init__(self, diagonal: Any):
        super().__init__(Space.of(diagonal), symmetric=True)
        self.diagonal = self.domain.flatten(diagonal, "DiagonalOperator")

    def multiply(self, block: Tensor) -> Tensor:
        """Each row times its number."""
        return self.diagonal[:, None] * block


class MatrixOperator(LinearOperator):
    """A dense or sparse matrix as an operator on flat vectors.

    Args:
        matrix: Tensor (m, n), real and floating-point; dense, or any layout that torch multiplies.
        symmetric: Whether the matrix is its own transpose.

    Raises:
        InputError: If it is no such matrix.

    Example:
        >>> import torch
        >>> MatrixOperator(torch.tensor([[0.0, 1.0], [2.0, 0.0]])).T @ torch.tensor([1.0, 0.0])
        tensor([0., 1.])
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False):
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or not matrix.is_floating_point():
            raise InputError(
                f"MatrixOperator: matrix: expected a floating-point tensor (m, n), got {describe(matrix)}; "
                "reshape or convert it."
            )
        m, n = matrix.shape
        if symmetric and m != n:
            raise InputError(
                f"MatrixOperator: matrix: expected a square one, as symmetric=True, got {describe(matrix)}; "
                "drop symmetric."
            )
        spaces = (Space.flat(size, matrix.dtype, matrix.device) for size in (n, m))
        super().__init__(*spaces, symmetric=symmetric)
        self.matrix = matrix

    def multiply(self, block: Tensor) -> Tensor:
        """The matrix product."""
        return (self.matrix @ block.to(self.matrix.dtype)).to(self.dtype)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The product with the transposed matrix."""
        return (self.matrix.t() @ block.to(self.matrix.dtype)).to(self.dtype)


class RestrictedOperator(LinearOperator):
    r"""A principal block $P A P^\top$: some leaves of the pytree only, the others held at zero.

    Args:
        operator: A square operator on a pytree.
        indices: Which leaves.
        domain: The space of the leaves kept.
    """

    def __init__(self, operator: LinearOperator, indices: Sequence[int], domain: Space):
        super().__init__(domain, symmetric=operator.symmetric)
        self.operator = operator
        self._slices = operator.domain.select(indices)

    def multiply(self, block: Tensor) -> Tensor:
        """Pad with zeros, multiply, and keep the wanted rows."""
        return self._keep(self.operator.multiply(self._pad(block)))

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The same with the transpose."""
        return self._keep(self.operator.multiply_transposed(self._pad(block)))

    def _pad(self, block: Tensor) -> Tensor:
        padded = block.new_zeros(self.operator.domain.size, block.shape[1])
        for place, piece in zip(self._slices, block.split(self.domain.sizes), strict=True):
            padded[place] = piece
        return padded

    def _keep(self, product: Tensor) -> Tensor:
        return torch.cat([product[place] for place in self._slices])


def add(left: LinearOperator, right: LinearOperator) -> SumOperator:
    """The sum of two operators between the same spaces.

    Args:
        left: One term.
        right: The other.

    Returns:
        Their sum; terms of sums are taken over one by one.

    Raises:
        InputError: If the spaces differ.
    """
    if left.shape != right.shape or not _fit(left.domain, right.domain) or not _fit(left.codomain, right.codomain):
        raise InputError(
            f"A + B: expected operators between the same spaces, got {left} and {right}; "
            "make both for parameters of the same structure."
        )
    terms = [term for each in (left, right) for term in (each.terms if isinstance(each, SumOperator) else (each,))]
    # The sum speaks in pytrees where one of its terms does.
    terms.sort(key=lambda term: term.domain.spec.is_leaf())
    return SumOperator(terms)


def scale(operator: LinearOperator, factor: Any) -> ScaledOperator:
    """A multiple of an operator.

    Args:
        operator: The operator.
        factor: A real number, or a tensor of shape ().

    Returns:
        The multiple; factors of multiples are joined.

    Raises:
        InputError: If the factor is no real number.
    """
    if not (isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.shape == ())):
        raise InputError(
            f"c * A: c: expected a real number or a tensor of shape (), got {describe(factor)}; "
            "for products use A @ v, for diagonal scaling DiagonalOperator(d) @ A."
        )
    number = factor if isinstance(factor, Tensor) else float(factor)
    if isinstance(operator, ScaledOperator):
        return ScaledOperator(operator.operator, number * operator.factor)
    return ScaledOperator(operator, number)


def product(left: LinearOperator, right: LinearOperator) -> ProductOperator:
    """The product of two operators, the right one applied first.

    Args:
        left: Applied second.
        right: Applied first.

    Returns:
        Their product; factors of products are taken over one by one.

    Raises:
        InputError: If the right one does not map to where the left one takes its vectors.
    """
    require_operator(right, "A @ B", "B")
    if left.domain.size != right.codomain.size or not _fit(left.domain, right.codomain):
        raise InputError(
            f"A @ B: expected B to map to the vectors that A takes, {left.domain.size} numbers, got {left} and {right}."
        )
    return ProductOperator([
        factor for each in (left, right) for factor in (each.factors if isinstance(each, ProductOperator) else (each,))
    ])


def block(operator: LinearOperator, names: str | Sequence[str]) -> RestrictedOperator:
    """The principal block of some leaves; see `LinearOperator.block`."""
    if not operator.domain.same(operator.codomain):
        raise InputError(
            f"block: expected an operator that maps a space to itself, got {operator}; take the block of A.T @ A."
        )
    indices, labels = leaves_named(operator.domain, names)
    return RestrictedOperator(operator, indices, subspace(operator.domain, indices, labels))


def _fit(one: Space, other: Space) -> bool:
    """Whether vectors of one can be taken for vectors of the other: the same leaves, or one of them flat."""
    return one.same(other) or one.spec.is_leaf() or other.spec.is_leaf()
