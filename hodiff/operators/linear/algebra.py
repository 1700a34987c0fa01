"""Operators composed of operators: sums, multiples, products, transposes, blocks; and the identity."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.estimators import DiagonalEstimate
from hodiff.operators.linear.constant_points import point_leaves
from hodiff.operators.linear.conversion import Conversion
from hodiff.operators.linear.linear_operator import LinearOperator, require_operator
from hodiff.operators.linear.linear_product import multiply
from hodiff.operators.linear.restriction import leaves_named, subspace
from hodiff.operators.linear.spaces import Space


def _exactly(value: Any, products: int) -> DiagonalEstimate:
    return DiagonalEstimate(value, torch.zeros_like(value), products, "exact")


class SumOperator(LinearOperator):
    r"""The sum $A_1 + \dots + A_j$ of operators between the same spaces."""

    composed = True

    def __init__(self, terms: Sequence[LinearOperator]):
        first = terms[0]
        super().__init__(first.domain, first.codomain, symmetric=all(term.symmetric for term in terms))
        self.terms = tuple(terms)

    def multiply(self, block: Tensor) -> Tensor:
        """Add up the products of the terms."""
        total = multiply(self.terms[0], block)
        for term in self.terms[1:]:
            total = total + multiply(term, block)
        return total

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Add up the transposed products of the terms."""
        total = multiply(self.terms[0].T, block)
        for term in self.terms[1:]:
            total = total + multiply(term.T, block)
        return total

    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        """Add up the diagonals of the terms."""
        found = [term.diagonal(exact=True, chunk_size=chunk_size, progress=progress) for term in self.terms]
        return _exactly(sum(each.value for each in found), sum(each.products for each in found))

    def at(self, x: PyTree) -> SumOperator:
        """See `LinearOperator.at`."""
        return SumOperator(_moved(self, self.terms, x))

    def converted(self, conversion: Conversion) -> SumOperator:
        """See `LinearOperator.to`."""
        return SumOperator([term.converted(conversion) for term in self.terms])


class ScaledOperator(LinearOperator):
    r"""The multiple $c A$."""

    composed = True

    def __init__(self, operator: LinearOperator, factor: float | Tensor):
        super().__init__(operator.domain, operator.codomain, symmetric=operator.symmetric)
        self.operator = operator
        self.factor = factor

    def multiply(self, block: Tensor) -> Tensor:
        """Return the multiple of the product."""
        return self.factor * multiply(self.operator, block)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Return the multiple of the transposed product."""
        return self.factor * multiply(self.operator.T, block)

    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        """Return the multiple of the diagonal."""
        found = self.operator.diagonal(exact=True, chunk_size=chunk_size, progress=progress)
        return _exactly(self.factor * found.value, found.products)

    def at(self, x: PyTree) -> ScaledOperator:
        """See `LinearOperator.at`."""
        return ScaledOperator(self.operator.at(x), self.factor)

    def converted(self, conversion: Conversion) -> ScaledOperator:
        """See `LinearOperator.to`."""
        factor = conversion(self.factor) if isinstance(self.factor, Tensor) else self.factor
        return ScaledOperator(self.operator.converted(conversion), factor)


class ProductOperator(LinearOperator):
    r"""The product $A_1 A_2 \cdots A_j$, with the last factor applied first."""

    composed = True

    def __init__(self, factors: Sequence[LinearOperator]):
        super().__init__(factors[-1].domain, factors[0].codomain)
        self.factors = tuple(factors)

    def multiply(self, block: Tensor) -> Tensor:
        """Apply the factors from last to first."""
        for factor in reversed(self.factors):
            block = multiply(factor, block)
        return block

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Apply the transposes of the factors from first to last."""
        for factor in self.factors:
            block = multiply(factor.T, block)
        return block

    def at(self, x: PyTree) -> ProductOperator:
        """See `LinearOperator.at`."""
        return ProductOperator(_moved(self, self.factors, x))

    def converted(self, conversion: Conversion) -> ProductOperator:
        """See `LinearOperator.to`."""
        return ProductOperator([factor.converted(conversion) for factor in self.factors])


class TransposedOperator(LinearOperator):
    r"""The transpose $A^\top$."""

    def __init__(self, operator: LinearOperator):
        super().__init__(operator.codomain, operator.domain)
        self.operator = operator
        self.composed = operator.composed
        self.made_of_constants = operator.made_of_constants

    def multiply(self, block: Tensor) -> Tensor:
        """Compute the operator's transposed product."""
        return self.operator.multiply_transposed(block)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Compute the operator's own product."""
        return self.operator.multiply(block)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - as in the base class
        """The operator itself."""
        return self.operator

    def at(self, x: PyTree) -> LinearOperator:
        """See `LinearOperator.at`."""
        moved: LinearOperator = self.operator.at(x).T
        return moved

    def converted(self, conversion: Conversion) -> TransposedOperator:
        """See `LinearOperator.to`."""
        return TransposedOperator(self.operator.converted(conversion))


class IdentityOperator(LinearOperator):
    """The identity.

    Args:
        domain: The space, or a pytree in the form of its vectors.
    """

    composed = True

    def __init__(self, domain: Any):
        super().__init__(domain if isinstance(domain, Space) else Space.of(domain), symmetric=True)

    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        """Return ones."""
        return _exactly(torch.ones(self.shape[0], dtype=self.dtype, device=self.device), 0)

    def multiply(self, block: Tensor) -> Tensor:
        """Return a copy of the block."""
        return block.clone()

    def converted(self, conversion: Conversion) -> IdentityOperator:
        """See `LinearOperator.to`."""
        return IdentityOperator(conversion.space(self.domain))


class RestrictedOperator(LinearOperator):
    r"""A principal block $P A P^\top$: some leaves of the pytree, with the other leaves held at zero."""

    composed = True

    def __init__(self, operator: LinearOperator, indices: Sequence[int], domain: Space):
        super().__init__(domain, symmetric=operator.symmetric)
        self.operator = operator
        self._slices = operator.domain.select(indices)

    def multiply(self, block: Tensor) -> Tensor:
        """Pad with zeros, multiply, and keep the wanted rows."""
        return self._keep(multiply(self.operator, self._pad(block)))

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Pad with zeros, multiply by the transpose, and keep the wanted rows."""
        return self._keep(multiply(self.operator.T, self._pad(block)))

    def _pad(self, block: Tensor) -> Tensor:
        padded = block.new_zeros(self.operator.domain.size, block.shape[1])
        for place, piece in zip(self._slices, block.split(self.domain.sizes), strict=True):
            padded[place] = piece
        return padded

    def _keep(self, product: Tensor) -> Tensor:
        return torch.cat([product[place] for place in self._slices])


def _moved(operator: LinearOperator, parts: Sequence[LinearOperator], x: PyTree) -> list[LinearOperator]:
    """Return the parts of an operator at another point; parts without a point are the same everywhere."""
    are_at_points = [bool(point_leaves(part)) for part in parts]
    if not any(are_at_points):
        LinearOperator.at(operator, x)  # raises
    return [part.at(x) if is_at_point else part for part, is_at_point in zip(parts, are_at_points, strict=True)]


def add(left: LinearOperator, right: LinearOperator) -> SumOperator:
    """Add two operators between the same spaces; nested sums are flattened."""
    if left.shape != right.shape or not _fit(left.domain, right.domain) or not _fit(left.codomain, right.codomain):
        raise InputError(
            f"A + B: expected operators between the same spaces, got {left} and {right}; "
            "create both for parameters of the same structure."
        )
    terms = [term for each in (left, right) for term in (each.terms if isinstance(each, SumOperator) else (each,))]
    # The sum takes and returns pytrees if one of its terms does.
    terms.sort(key=lambda term: term.domain.spec.is_leaf())
    return SumOperator(terms)


def scale(operator: LinearOperator, factor: Any) -> ScaledOperator:
    """Multiply an operator by a real number or a tensor of shape (); factors of nested multiples are combined."""
    number = _number(operator, factor, "c * A")
    if isinstance(operator, ScaledOperator):
        return ScaledOperator(operator.operator, number * operator.factor)
    return ScaledOperator(operator, number)


def divide(operator: LinearOperator, divisor: Any) -> ScaledOperator:
    """Divide an operator by a real number or a tensor of shape ()."""
    number = _number(operator, divisor, "A / c")
    if not isinstance(number, Tensor) and number == 0:
        raise InputError("A / c: c: expected a number other than zero, got 0.")
    return scale(operator, 1 / number)


def _number(operator: LinearOperator, factor: Any, where: str) -> float | Tensor:
    """Return a factor in the operator's precision, before it is used in any computation."""
    if isinstance(factor, Real):
        return float(factor)
    if isinstance(factor, Tensor) and factor.shape == () and not factor.is_complex():
        return factor.to(operator.dtype)
    raise InputError(
        f"{where}: c: expected a real number or a tensor of shape (), got {describe(factor)}; "
        "for products, use A @ v; for diagonal scaling, use DiagonalOperator(d) @ A."
    )


def product(left: LinearOperator, right: LinearOperator) -> ProductOperator:
    """Compose two operators, the right one applied first; nested products are flattened."""
    require_operator(right, "A @ B", "B")
    if left.domain.size != right.codomain.size or not _fit(left.domain, right.codomain):
        raise InputError(
            f"A @ B: expected B to map to the domain of A, {left.domain.size} numbers, got {left} and {right}."
        )
    return ProductOperator([
        factor for each in (left, right) for factor in (each.factors if isinstance(each, ProductOperator) else (each,))
    ])


def block(operator: LinearOperator, names: str | Sequence[str]) -> RestrictedOperator:
    """Return the principal block of some leaves; see `LinearOperator.block`."""
    if not operator.domain.same(operator.codomain):
        raise InputError(
            f"block: expected an operator that maps a space to itself, got {operator}; use the block of A.T @ A."
        )
    operator.domain.require_whole("block", "an operator whose x has only these parameters")
    indices, labels = leaves_named(operator.domain, names)
    return RestrictedOperator(operator, indices, subspace(operator.domain, indices, labels))


def _fit(one: Space, other: Space) -> bool:
    """Whether vectors of one space can be used in the other: the leaves are the same, or one space is flat."""
    return one.same(other) or one.spec.is_leaf() or other.spec.is_leaf()
