"""Operators composed of operators: sums, multiples, products, transposes; and the identity."""

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
from hodiff.operators.linear.spaces import Space


def _exactly(value: Any, products: int) -> DiagonalEstimate:
    return DiagonalEstimate(value, torch.zeros_like(value), products, "exact")


class SumOperator(LinearOperator):
    r"""The sum $A_1 + \dots + A_j$ of operators between the same spaces."""

    composed = True

    def __init__(self, terms: Sequence[LinearOperator], *, symmetric: bool = False):
        first, symmetric = terms[0], symmetric or _is_symmetric_sum(terms)
        # A transpose may have pytrees where the operator has flat vectors.
        super().__init__(first.domain, first.domain if symmetric else first.codomain, symmetric=symmetric)
        self.terms = tuple(terms)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - as in the base class
        """The sum of the transposes."""
        return self if self.symmetric else SumOperator([term.T for term in self.terms])

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
        return SumOperator(_moved(self, self.terms, x), symmetric=self.symmetric)

    def converted(self, conversion: Conversion) -> SumOperator:
        """See `LinearOperator.to`."""
        return SumOperator([term.converted(conversion) for term in self.terms], symmetric=self.symmetric)


class ScaledOperator(LinearOperator):
    r"""The multiple $c A$."""

    composed = True

    def __init__(self, operator: LinearOperator, factor: float | Tensor):
        super().__init__(operator.domain, operator.codomain, symmetric=operator.symmetric)
        self.operator = operator
        self.factor = factor

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - as in the base class
        """The multiple of the transpose."""
        return self if self.symmetric else ScaledOperator(self.operator.T, self.factor)

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

    def __init__(self, factors: Sequence[LinearOperator], *, symmetric: bool = False):
        super().__init__(factors[-1].domain, factors[0].codomain, symmetric=symmetric or _is_symmetric_product(factors))
        self.factors = tuple(factors)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - as in the base class
        """The product of the transposes."""
        return self if self.symmetric else ProductOperator([factor.T for factor in reversed(self.factors)])

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
        return ProductOperator(_moved(self, self.factors, x), symmetric=self.symmetric)

    def converted(self, conversion: Conversion) -> ProductOperator:
        """See `LinearOperator.to`."""
        return ProductOperator([factor.converted(conversion) for factor in self.factors], symmetric=self.symmetric)


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


def _is_symmetric_sum(terms: Sequence[LinearOperator]) -> bool:
    """Whether each term is symmetric, or has its transpose among the others, as in A + A.T."""
    left = [term for term in terms if not term.symmetric]
    if left and not _fit(terms[0].domain, terms[0].codomain):
        return False
    while left:
        term = left.pop()
        partner = next((k for k, other in enumerate(left) if _are_transposes(term, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _is_symmetric_product(factors: Sequence[LinearOperator]) -> bool:
    """Whether the factors, from either end, are each other's transposes, as in J.T @ H @ J."""
    ends = factors[-1].domain.same(factors[0].codomain)
    return ends and all(map(_are_transposes, factors, reversed(factors)))


def _are_transposes(one: LinearOperator, other: LinearOperator) -> bool:
    """Whether two operators are each other's transposes by their construction."""
    if one is other:
        return one.symmetric
    if isinstance(one, ScaledOperator) and isinstance(other, ScaledOperator):
        equal = one.factor is other.factor or (isinstance(one.factor, float) and one.factor == other.factor)
        return equal and _are_transposes(one.operator, other.operator)
    if isinstance(one, ProductOperator) and isinstance(other, ProductOperator):
        pairs = zip(one.factors, reversed(other.factors), strict=False)
        return len(one.factors) == len(other.factors) and all(_are_transposes(*pair) for pair in pairs)
    return any(isinstance(a, TransposedOperator) and a.operator is b for a, b in ((one, other), (other, one)))


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


def _fit(one: Space, other: Space) -> bool:
    """Whether vectors of one space can be used in the other: the leaves are the same, or one space is flat."""
    return one.same(other) or one.spec.is_leaf() or other.spec.is_leaf()
