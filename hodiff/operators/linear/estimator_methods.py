"""The most common estimators, as methods of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hodiff import estimators
from hodiff.estimators import DiagonalEstimate, Eigenpairs, Estimate, Solution

F = TypeVar("F", bound=Callable[..., Any])


def _forwards_to(estimator: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a method that forwards its arguments, so that its signature shows the estimator's options."""

    def decorate(method: F) -> F:
        (itself, *_), (_, *others) = (inspect.signature(each).parameters.values() for each in (method, estimator))
        # mypy does not know that functions may have a signature of their own.
        method.__signature__ = inspect.signature(estimator).replace(parameters=[itself, *others])  # type: ignore[attr-defined]
        return method

    return decorate


class Estimates:
    """Methods of square operators: `A.trace()` is `hodiff.estimators.trace(A)`, which explains the options, and so on.

    Like the functions they return dataclasses, with the number as `value`, its error and its cost.
    """

    @_forwards_to(estimators.trace)
    def trace(self, **options: Any) -> Estimate:
        """Estimate the trace; see `hodiff.estimators.trace`.

        Args:
            **options: `method`, `products`, `probes`, `generator`, `chunk_size`, `progress`.

        Returns:
            An `Estimate`.

        Example:
            >>> import torch
            >>> from hodiff.operators import DiagonalOperator
            >>> DiagonalOperator(torch.tensor([1.0, 2.0])).trace().value
            3.0
        """
        return estimators.trace(self, **options)

    @_forwards_to(estimators.diagonal)
    def diagonal(self, **options: Any) -> DiagonalEstimate:
        """Estimate the diagonal; see `hodiff.estimators.diagonal`.

        Args:
            **options: `method`, `products`, `probes`, `generator`, `chunk_size`, `progress`.

        Returns:
            A `DiagonalEstimate`.

        Example:
            >>> import torch
            >>> from hodiff.operators import MatrixOperator
            >>> MatrixOperator(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).diagonal().value
            tensor([1., 4.])
        """
        return estimators.diagonal(self, **options)

    @_forwards_to(estimators.eigsh)
    def eigsh(self, k: int = 6, **options: Any) -> Eigenpairs:
        """Compute eigenvalues at an end of the spectrum of a symmetric operator; see `hodiff.estimators.eigsh`.

        Args:
            k: The number of eigenvalues.
            **options: `which`, `method`, `start`, `tol`, `max_iterations`, `throw`, `generator`, `progress`.

        Returns:
            `Eigenpairs`; `to_tree` converts the eigenvectors to pytrees.

        Example:
            >>> import torch
            >>> from hodiff.operators import DiagonalOperator
            >>> DiagonalOperator(torch.tensor([1.0, 5.0, 2.0])).eigsh(1, which="LA").eigenvalues
            tensor([5.])
        """
        return estimators.eigsh(self, k, **options)

    @_forwards_to(estimators.logdet)
    def logdet(self, **options: Any) -> Estimate:
        """Estimate the log-determinant of a positive definite operator; see `hodiff.estimators.logdet`.

        Args:
            **options: `damping`, `method`, `samples`, `steps`, `generator`, `chunk_size`, `progress`.

        Returns:
            An `Estimate`.

        Example:
            >>> import torch
            >>> from hodiff.operators import DiagonalOperator
            >>> round(DiagonalOperator(torch.tensor([1.0, 2.0])).logdet(damping=1.0).value, 4)  # ln 6
            1.7918
        """
        return estimators.logdet(self, **options)

    @_forwards_to(estimators.solve)
    def solve(self, b: Any, **options: Any) -> Solution:
        """Solve a linear system; see `hodiff.estimators.solve`, and `inverse` for an operator that solves.

        Args:
            b: Right-hand side: (m,), (m, k), or a pytree like the operator's products.
            **options: `method`, `damping`, `preconditioner`, `x0`, `tol`, `max_iterations`, `throw` and others.

        Returns:
            A `Solution`, whose `value` has the form of b.

        Example:
            >>> import torch
            >>> from hodiff.operators import DiagonalOperator
            >>> A = DiagonalOperator({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])})
            >>> A.solve({"w": torch.ones(2), "b": torch.ones(1)}).value
            {'w': tensor([1.0000, 0.5000]), 'b': tensor([0.2500])}
        """
        return estimators.solve(self, b, **options)
