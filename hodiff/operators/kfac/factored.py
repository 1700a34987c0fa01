"""Block-diagonal operators whose blocks are Kronecker products: inverses, spectra and norms in closed form."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hodiff import estimators
from hodiff.common.options import require_amount
from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.estimators import DiagonalEstimate, Estimate
from hodiff.operators.data.watched_point import Point
from hodiff.operators.kfac.blocks import Block, EigenBlock, KroneckerBlock, Layout
from hodiff.operators.kfac.sharded_blocks import agreed, product, scattered, total
from hodiff.operators.linear.conversion import Conversion, Portable
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linear.spaces import Space
from hodiff.recompute.closed_over import is_constant

CLOSED_FORM = "closed form"
EXACT, HEURISTIC = "exact", "heuristic"


@dataclass(frozen=True, eq=False)
class Eigendecomposition:
    r"""The eigendecomposition $Q \operatorname{diag}(\lambda) Q^\top$ of a matrix.

    Attributes:
        eigenvalues: Ascending, (n,).
        eigenvectors: The orthogonal Q, a `hodiff.LinearOperator`: `Q @ e_i` is the i-th eigenvector, `Q.to_dense()` has
            all of them as columns.
    """

    eigenvalues: Tensor
    eigenvectors: LinearOperator

    @property
    def value(self) -> Tensor:
        """The eigenvalues."""
        return self.eigenvalues


class AtPoint(Portable):
    """An operator made of numbers that were computed at a point; it raises after the point was changed in place."""

    point: Point

    def _require_portable(self) -> None:
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        self.point.require_unchanged(type(self).__name__)

    def _restore(self) -> None:
        """Keep the numbers, which are no recorded graphs."""


class FactoredOperator(AtPoint, LinearOperator):
    """A symmetric operator with a block for each layer, with inverse, spectrum and norms in closed form."""

    made_of_constants = True

    def __init__(self, domain: Space):
        super().__init__(domain, symmetric=True)

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the operator."""

    def multiply(self, block: Tensor) -> Tensor:
        """Multiply columns by the blocks."""
        return _by_blocks(self.domain, self.blocks, lambda each, V: each.multiply(V), block)

    def __mul__(self, factor: Any) -> Any:
        number = _constant(self, factor)
        return super().__mul__(factor) if number is None else ShiftedFactored(self, number, 0.0)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        number = _constant(self, divisor)
        return self * (1 / number) if number else super().__truediv__(divisor)

    def __neg__(self) -> Any:
        return self * -1.0

    def damped(self, damping: Any) -> Any:
        r"""Return the operator $A + \lambda I$, with the same closed forms."""
        number = _constant(self, damping)
        return super().damped(damping) if number is None else ShiftedFactored(self, 1.0, number)

    def inverse(self, method: str = EXACT, **options: Any) -> Any:
        r"""Return the inverse of $A + \lambda I$, in closed form.

        Args:
            method: "exact", by the eigenvectors of the factors; "heuristic", which damps the factors instead of their
                product: $(B + \tfrac{\sqrt\lambda}{\pi} I)^{-1} \otimes (A + \pi \sqrt\lambda I)^{-1}$ with $\pi^2$
                the ratio of the factors' mean eigenvalues, $\tfrac{\operatorname{tr} A / q}{\operatorname{tr} B / p}$;
                or an iterative method of `hodiff.operators.InverseOperator`.
            **options: `damping`, the $\lambda$, 0 or more and 0 by default; for iterative methods also their options.

        Returns:
            An operator like this one, with the same closed forms.

        Raises:
            InputError: If a damped block is singular to rounding, or an option does not fit the method.

        Source: J. Martens & R. Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature",
        ICML 2015, sections 6.3 and 6.6 and appendix B.
        """
        if method not in (EXACT, HEURISTIC):
            return super().inverse(method, **options)
        damping = _damping(f"{type(self).__name__}.inverse", options)
        own = self.blocks
        caller = f"{type(self).__name__}.inverse"
        blocks = agreed(self.domain, caller, lambda: tuple(self._inverted(each, method, damping) for each in own))
        return InverseFactored(self.domain, blocks, self.point)

    def _inverted(self, block: Block, method: str, damping: float) -> EigenBlock:
        if method == EXACT:
            eigen = block.eigen
            inverted = EigenBlock(eigen.layout, eigen.left, eigen.right, 1 / (eigen.values + damping))
        elif isinstance(block, KroneckerBlock):
            inverted = block.inverse_by_factors(damping)
        else:
            raise InputError(
                f"{type(self).__name__}.inverse: method: expected 'exact', because the blocks' eigenvalues are not "
                "products of factors' eigenvalues, got 'heuristic'; use KFACOperator for 'heuristic'."
            )
        # The largest reciprocal gives the range of the original eigenvalues.
        if not bool((inverted.values.abs() * _noise(1 / inverted.values) < 1).all()):
            raise InputError(
                f"{type(self).__name__}.inverse: damping: expected more than the rounding of a singular block, got "
                f"{damping:g}; pass inverse(damping=1e-3), or another fraction of the largest eigenvalue, "
                f"{float(block.eigen.values.max()):.3g}."
            )
        return inverted

    def trace(self, **options: Any) -> Estimate:
        r"""Compute the trace, $\sum \operatorname{tr} A \operatorname{tr} B$.

        Args:
            **options: Options of `hodiff.estimators.trace`, none of which is needed.

        Returns:
            An `Estimate` without error.
        """
        _require_options_of(estimators.trace, options)
        return _exactly(self._added([each.trace() for each in self.blocks]))

    def diagonal(self, *, exact: bool = True, **options: Any) -> DiagonalEstimate:
        """Compute the diagonal.

        Args:
            exact: Not needed; the diagonal is always exact.
            **options: Options of `hodiff.estimators.diagonal`, none of which is needed.

        Returns:
            A `DiagonalEstimate` without error.
        """
        _require_options_of(estimators.diagonal, options)
        found = _scattered(self.domain, [(each.layout, each.diagonal()[None]) for each in self.blocks], 1)[:, 0]
        return DiagonalEstimate(found, torch.zeros_like(found), 0, CLOSED_FORM)

    def logdet(self, **options: Any) -> Estimate:
        r"""Compute the log-determinant of $A + \lambda I$, $\sum \ln(\lambda_B \lambda_A + \lambda)$.

        Args:
            **options: `damping`, the $\lambda$; other options of `hodiff.estimators.logdet` are not needed.

        Returns:
            An `Estimate` without error.

        Raises:
            InputError: If a damped block is singular to rounding.
        """
        _require_options_of(estimators.logdet, options)
        damping = _damping(f"{type(self).__name__}.logdet", {"damping": options.get("damping", 0.0)})
        own = self.blocks

        def logarithms() -> list[Tensor]:
            return [self._logarithm(each, damping) for each in own]

        return _exactly(self._added(agreed(self.domain, f"{type(self).__name__}.logdet", logarithms)))

    def _logarithm(self, block: Block, damping: float) -> Tensor:
        shifted = block.eigen.values + damping
        if not bool((shifted > _noise(shifted)).all()):
            raise InputError(
                f"{type(self).__name__}.logdet: damping: expected more than the rounding of a singular block, got "
                f"{damping:g}; pass logdet(damping=...), or use det(), which is 0."
            )
        return shifted.double().log().sum()

    def det(self, *, damping: float = 0.0) -> Estimate:
        r"""Compute the determinant of $A + \lambda I$; use `logdet` if it leaves the range of float64.

        Args:
            damping: The $\lambda$, 0 or more.

        Returns:
            An `Estimate` without error.

        Raises:
            InputError: If `damping` is negative.
        """
        _damping(f"{type(self).__name__}.det", {"damping": damping})
        logarithms = [(each.eigen.values + damping).double().log().sum() for each in self.blocks]
        return _exactly(self._added(logarithms).exp())

    def frobenius_norm(self) -> Estimate:
        r"""Compute the Frobenius norm, the root of $\sum \|A\|_F^2 \|B\|_F^2$.

        Returns:
            An `Estimate` without error.
        """
        return _exactly(self._added([each.squared_norm() for each in self.blocks]).sqrt())

    def eigh(self) -> Eigendecomposition:
        """Compute all eigenvalues, and the eigenvectors as an operator.

        Returns:
            An `Eigendecomposition`.
        """
        self.domain.require_whole("eigh", "hodiff.estimators.eigsh")
        blocks = tuple(each.eigen for each in self.blocks)
        values = _scattered(self.domain, [(each.layout, each.values[None]) for each in blocks], 1)[:, 0]
        ordered, order = values.sort()
        return Eigendecomposition(ordered, Eigenvectors(self.domain, blocks, order, self.point))

    def _added(self, numbers: Sequence[Tensor]) -> Tensor:
        """Sum numbers in float64, if the device supports it."""
        precise = torch.float32 if self.device.type == "mps" else torch.float64
        own = torch.zeros((), dtype=precise, device=self.device)
        return total(self.domain, torch.stack([own, *(each.to(precise) for each in numbers)]).sum())


class InverseFactored(FactoredOperator):
    """The inverse of a factored operator."""

    def __init__(self, domain: Space, blocks: tuple[EigenBlock, ...], point: Point):
        super().__init__(domain)
        self._blocks, self.point = blocks, point

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the inverse."""
        self._require_unchanged()
        return self._blocks

    def converted(self, conversion: Conversion) -> InverseFactored:
        """See `LinearOperator.to`."""
        self.domain.require_whole("to", "an operator on converted parameters")
        blocks = tuple(each.converted(conversion) for each in self._blocks)
        self._require_unchanged()
        point = Point(list(map(conversion, self.point.leaves)))
        return InverseFactored(conversion.space(self.domain), blocks, point)


class ShiftedFactored(FactoredOperator):
    r"""The operator $c A + d I$ of a factored operator A, whose blocks are computed when a closed form needs them."""

    def __init__(self, operator: FactoredOperator, factor: float, shift: float):
        super().__init__(operator.domain)
        self._operator, self._factor, self._shift = operator, factor, shift
        self.point = operator.point

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, which stay Kronecker products if only a nonnegative factor changes them."""
        self._require_unchanged()
        return self._changed_blocks

    @cached_property
    def _changed_blocks(self) -> tuple[Block, ...]:
        return tuple(self._changed(each) for each in self._operator.blocks)

    def _changed(self, block: Block) -> Block:
        if isinstance(block, KroneckerBlock) and self._factor >= 0 and self._shift == 0:
            return KroneckerBlock(block.layout, block.A, self._factor * block.B)
        eigen = block.eigen
        return EigenBlock(eigen.layout, eigen.left, eigen.right, self._factor * eigen.values + self._shift)

    def multiply(self, block: Tensor) -> Tensor:
        """Multiply and shift, without an eigendecomposition."""
        product = self._factor * self._operator.multiply(block)
        return product.add_(block, alpha=self._shift) if self._shift else product

    def at(self, x: PyTree) -> ShiftedFactored:
        """See `LinearOperator.at`."""
        return ShiftedFactored(self._operator.at(x), self._factor, self._shift)

    def converted(self, conversion: Conversion) -> ShiftedFactored:
        """See `LinearOperator.to`."""
        return ShiftedFactored(self._operator.converted(conversion), self._factor, self._shift)


class Eigenvectors(AtPoint, LinearOperator):
    """The orthogonal matrix of eigenvectors, in the order of their eigenvalues."""

    made_of_constants = True

    def __init__(self, space: Space, blocks: tuple[EigenBlock, ...], order: Tensor, point: Point):
        super().__init__(Space.flat(space.size, space.dtype, space.device), space)
        self._blocks, self._order, self.point = blocks, order, point

    def multiply(self, block: Tensor) -> Tensor:
        """Combine eigenvectors with given coefficients."""
        self._require_unchanged()
        placed = torch.empty_like(block).index_copy_(0, self._order, block)
        return _by_blocks(self.codomain, self._blocks, lambda each, V: each.from_basis(V), placed)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Return the coefficients of vectors in the eigenvectors."""
        self._require_unchanged()
        return _by_blocks(self.codomain, self._blocks, lambda each, V: each.to_basis(V), block)[self._order]


def _constant(operator: LinearOperator, factor: Any) -> float | None:
    """Return a factor as a number in the operator's precision; None if it is not a number, or has a derivative."""
    if isinstance(factor, Tensor) and factor.shape == () and not factor.is_complex() and is_constant(factor):
        return float(factor.to(operator.dtype))
    return float(factor) if isinstance(factor, Real) else None


def _by_blocks(space: Space, blocks: Sequence[Any], act: Callable[[Any, Tensor], Tensor], columns: Tensor) -> Tensor:
    """Apply `act` to each block and its part of columns (n, k)."""
    if space.shards is not None:
        return product(space, blocks, act, columns)
    rows, count = columns.t().split(space.sizes, dim=1), columns.shape[1]
    return _scattered(space, [(each.layout, act(each, each.layout.gather(rows, count))) for each in blocks], count)


def _scattered(space: Space, parts: Sequence[tuple[Layout, Tensor]], count: int) -> Tensor:
    """Return matrices (count, groups, p, q) as columns (n, count)."""
    if space.shards is not None:
        return scattered(space, parts, count)
    leaves: list[Tensor | None] = [None] * len(space.sizes)
    for layout, matrices in parts:
        layout.scatter(matrices, leaves)
    return torch.cat([leaf for leaf in leaves if leaf is not None], dim=1).t()


def _noise(values: Tensor) -> Tensor:
    """Return the magnitude below which eigenvalues are rounding errors of the largest."""
    return max(values.shape[-2:]) * torch.finfo(values.dtype).eps * values.abs().max()


def _damping(caller: str, options: dict[str, Any]) -> float:
    """Return `damping`, the only option of closed forms."""
    unknown = sorted(options.keys() - {"damping"})
    if unknown:
        raise InputError(
            f"{caller}: {unknown[0]}: expected only damping for a closed form, got {options[unknown[0]]!r}; omit it, "
            "or pass an iterative method."
        )
    damping = options.get("damping", 0.0)
    require_amount(caller, "damping", damping)
    return float(damping)


def _require_options_of(estimator: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise a TypeError for options that an estimator does not have."""
    inspect.signature(estimator).bind(None, **options)


def _exactly(number: Tensor) -> Estimate:
    return Estimate(float(number), 0.0, 0, CLOSED_FORM)
