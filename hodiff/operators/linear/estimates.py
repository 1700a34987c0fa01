"""The most common estimators, as methods of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hodiff import estimators
from hodiff.common.options import require_bool, require_chunk_size
from hodiff.errors import InputError
from hodiff.estimators import DiagonalEstimate, Eigenpairs, Estimate, Solution

F = TypeVar("F", bound=Callable[..., Any])


def _forwards_to(estimator: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a method that forwards its arguments, so that its signature shows the estimator's options."""

    def decorate(method: F) -> F:
        (itself, *own), (_, *others) = (inspect.signature(each).parameters.values() for each in (method, estimator))
        # Positional parameters are the estimator's, keywords of the method are additional.
        others += [each for each in own if each.kind is each.KEYWORD_ONLY]
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
    def diagonal(self, *, exact: bool = False, **options: Any) -> DiagonalEstimate:
        r"""Estimate the diagonal, see `hodiff.estimators.diagonal`, or compute it exactly.

        With `exact=True`, Gauss-Newton and Fisher operators compute

        $$ \operatorname{diag}(J^\top M J) = \sum_{n,s} (J_n^\top s_n)^2, \qquad M_n = \sum_s s_n s_n^\top $$

        over examples n and columns s, at most one for each output of an example, from the gradients of the examples. A
        column takes one backward pass and squares the examples' gradients, in the time of one to three gradients of the
        batch. If examples depend on each other, as in batch norm in training mode, each output of the whole batch takes
        a backward pass, and two if the loss couples examples. A `HessianOperator` multiplies with n unit vectors. All
        models are supported, with any sharing of weights.

        Args:
            exact: Whether to compute the diagonal instead of estimating it.
            **options: `method`, `products`, `probes`, `generator`, `chunk_size`, `progress`; only the last two if
                `exact`.

        Returns:
            A `DiagonalEstimate`; if exact, `products` counts the vectors that were pulled back.

        Raises:
            InputError: If an option does not fit.

        Example:
            >>> import torch
            >>> from hodiff.operators import MatrixOperator
            >>> MatrixOperator(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).diagonal(exact=True).value
            tensor([1., 4.])

        Source: F. Dangel, F. Kunstner & P. Hennig, "BackPACK: packing more into backprop", ICLR 2020, section 2.3.
        """
        require_bool("diagonal", "exact", exact)
        if not exact:
            return estimators.diagonal(self, **options)
        for name in options:
            if name not in ("chunk_size", "progress"):
                raise InputError(
                    f"diagonal: {name}: expected only chunk_size and progress with exact=True, got {options[name]!r}; "
                    "omit it, or exact."
                )
        chunk_size, progress = options.get("chunk_size", "auto"), options.get("progress", False)
        require_chunk_size("diagonal", "chunk_size", chunk_size)
        require_bool("diagonal", "progress", progress)
        return self._exact_diagonal(chunk_size, progress)

    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        """Compute `diagonal(exact=True)`, here by products with all unit vectors."""
        return estimators.diagonal(self, method="exact", chunk_size=chunk_size, progress=progress)

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
