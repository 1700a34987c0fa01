"""Arithmetic of operators: sums, multiples, compositions, transposes, inverses and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space

if TYPE_CHECKING:
    from hodiff.operators.linear.algebra import ScaledOperator, SumOperator
    from hodiff.operators.linear.inverse import InverseOperator


class Arithmetic:
    """Signs and methods that compose linear operators; the resulting classes are in other files."""

    domain: Space
    symmetric: bool

    @property
    def T(self) -> Any:  # noqa: N802 - the name that every matrix has
        """The transpose of the operator."""
        return self if self.symmetric else _algebra().TransposedOperator(self)

    def _after(self, other: Arithmetic) -> Any:
        """Return the composition with another operator, as `@` does."""
        return _algebra().product(self, other)

    def __add__(self, other: Arithmetic) -> SumOperator:
        if not isinstance(other, Arithmetic):
            return NotImplemented
        return _algebra().add(self, other)

    def __sub__(self, other: Arithmetic) -> SumOperator:
        if not isinstance(other, Arithmetic):
            return NotImplemented
        return _algebra().add(self, -other)

    def __mul__(self, factor: float | Tensor) -> ScaledOperator:
        return _algebra().scale(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> ScaledOperator:
        return _algebra().divide(self, divisor)

    def __neg__(self) -> ScaledOperator:
        return _algebra().scale(self, -1.0)

    def damped(self, damping: float) -> SumOperator:
        r"""Return the operator $A + \lambda I$."""
        algebra = _algebra()
        return algebra.add(self, algebra.scale(algebra.IdentityOperator(self.domain), damping))

    def inverse(self, method: str = "cg", **options: Any) -> InverseOperator:
        """Return the inverse, whose products are solutions of linear systems.

        Args:
            method: The solver: "cg", "minres", "gmres", "lsmr", "neumann" or "dense".
            **options: Options of `hodiff.operators.InverseOperator`: `damping`, `preconditioner`, `tol`, ...

        Returns:
            The operator.

        Raises:
            InputError: If an argument does not fit.
        """
        from hodiff.operators.linear import inverse

        # Every operator has this mixin, and is the operator that is inverted.
        found: InverseOperator = inverse.InverseOperator(self, method, **options)  # type: ignore[arg-type]
        return found

    def at(self, x: Any) -> Any:
        """Return the operator at another point, if it is composed of operators with a point.

        Matrices in it, such as diagonals and low-rank approximations, stay as they are.

        Args:
            x: The point, with the structure, shapes, dtypes and devices of the old point.

        Returns:
            A new operator.

        Raises:
            InputError: If `x` has another form, or the operator has no point or cannot be moved.

        Example:
            >>> import torch, hodiff
            >>> A = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.ones(2))
            >>> (2 * A).damped(1.0).at(torch.zeros(2)) @ torch.ones(2)
            tensor([1., 1.])
        """  # noqa: DOC202 - subclasses return the operator
        raise InputError(
            f"{type(self).__name__}.at: A: expected an operator with a point, or sums, multiples, products and "
            f"iterative inverses of such operators, got {self}; move the operator that it was computed from, and "
            "compute it again."
        )

    def block(self, names: str | Sequence[str]) -> Any:
        """Return the principal block of some leaves of the parameters, with all other leaves held constant.

        Args:
            names: Keys of a dict of parameters, or leading parts of them: "0" picks "0.weight" and "0.bias". Levels of
                nested containers are joined by dots.

        Returns:
            An operator on a dict with these leaves, under their names.

        Raises:
            InputError: If a name selects nothing.
        """
        from hodiff.operators.linear import restriction

        return restriction.block(self, names)  # type: ignore[arg-type] # each subclass of this base is a LinearOperator


def _algebra() -> Any:
    """Import the composed operators late, because they are subclasses."""
    from hodiff.operators.linear import algebra

    return algebra
