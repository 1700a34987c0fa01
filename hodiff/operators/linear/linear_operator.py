"""Linear operators: a subclass defines the product with a block of vectors; shapes and forms of vectors follow.

The most common estimators, as methods of operators.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hodiff import estimators
from hodiff.common.options import require_bool, require_chunk_size
from hodiff.common.trees import describe
from hodiff.displays import element, facts, page, table
from hodiff.errors import InputError
from hodiff.estimators import DiagonalEstimate, Eigenpairs, Estimate, Solution
from hodiff.operators.linear.arithmetic import Arithmetic
from hodiff.operators.linear.linear_product import multiply
from hodiff.operators.linear.other_forms import Forms
from hodiff.operators.linear.spaces import Space
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

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

        over examples n and columns s, at most one for each output of an example, from the gradients of the examples.
        A column costs about a gradient of the batch. If examples depend on each other, as in batch norm in training
        mode, or the loss couples them, they take one gradient for each output of the whole batch. A `HessianOperator`
        multiplies with n unit vectors. All models are supported, with any sharing of weights.

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


BLOCKS = 12  # parameters that are listed


def operator_html(
    name: str, domain: Space, codomain: Space, symmetric: bool, told: Iterable[tuple[str, object]]
) -> str:
    """Return kind, size, dtype, further facts, and a table of the parameters."""
    m, n = codomain.size, domain.size
    known = [
        ("shape", f"{m:,} × {n:,}"),
        ("numbers", f"{str(domain.dtype).removeprefix('torch.')} on {domain.device}"),
        ("symmetric", "yes" if symmetric else "not known to be"),
        *told,
    ]
    parts = [element("b", name), facts(known)]
    if domain.names != ("",):
        leaves = zip(domain.labels, domain.shapes, domain.sizes, strict=True)
        rows = [(label, str(tuple(shape)), f"{size:,}") for label, shape, size in leaves]
        parts.append(table(("parameter", "shape", "columns"), rows, most=BLOCKS))
    return page(*parts)


class LinearOperator(Arithmetic, Forms, Estimates, ABC):
    r"""A linear map $A$ that is given by its products, $v \mapsto A v$.

    A vector may be a pytree like the one that the operator was made for, one flat vector `(n,)`, or a block `(n, k)`
    whose columns are multiplied together; the product has the same form. Operators add, subtract, multiply with numbers
    and with each other, transpose, and convert to a dense matrix and to SciPy. A product is differentiable in the
    vector. The operator is a constant, unless its `multiply` consists of torch's functions and it sets `composed`.

    A subclass defines the spaces and `multiply`; if it is not symmetric, also `multiply_transposed` where possible.

    Args:
        domain: The space of vectors, n numbers.
        codomain: The space of products, m numbers; the domain by default.
        symmetric: Whether the operator is its own transpose.

    Example:
        >>> import torch
        >>> class Doubled(LinearOperator):
        ...     def multiply(self, block):
        ...         return 2 * block
        >>> A = Doubled(Space.flat(3, torch.float32), symmetric=True)
        >>> (A + 0.5 * A) @ torch.ones(3)
        tensor([3., 3., 3.])
    """

    # NumPy scalars then leave a product with an operator to the operator.
    __array_ufunc__ = None
    # Whether `multiply` consists of torch's functions and products of other operators, which are differentiable.
    composed = False
    # Whether construction has checked that all data are constants, so that products need no check.
    made_of_constants = False

    def __init__(self, domain: Space, codomain: Space | None = None, *, symmetric: bool = False):
        self.domain = domain
        self.codomain = domain if codomain is None else codomain
        self.symmetric = symmetric

    @abstractmethod
    def multiply(self, block: Tensor) -> Tensor:
        """Multiply each column of `block`, (n, k) to (m, k)."""

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Multiply each column of `block` by the transpose, (m, k) to (n, k).

        Args:
            block: The columns.

        Returns:
            The products.

        Raises:
            InputError: If the operator does not define products of its transpose.
        """
        if self.symmetric:
            return self.multiply(block)
        raise InputError(
            f"{self}: products of the transpose are not defined: expected an operator that is symmetric or implements "
            "multiply_transposed; define that method."
        )

    def __matmul__(self, v: Any) -> Any:
        """Multiply a pytree, a flat vector (n,), a block (n, k), or compose with another operator.

        Flat vectors and blocks may be NumPy arrays; the product is then an array too, and a constant for torch.

        Args:
            v: The vector, block or operator.

        Returns:
            The product in the form of `v`.

        Raises:
            InputError: If `v` does not fit.
        """
        if isinstance(v, LinearOperator):
            return self._after(v)
        if isinstance(v, np.ndarray):
            return self._array_product(v)
        if not self.domain.is_tree(v):
            return self._flat_product(v)
        vector = self.domain.flatten(v, f"{type(self).__name__} @ v")
        return self.codomain.unflatten(multiply(self, vector[:, None])[:, 0])

    def _array_product(self, v: np.ndarray) -> np.ndarray:
        if v.dtype.kind != "f" or v.dtype.itemsize > 8:
            raise InputError(
                f"{type(self).__name__} @ v: v: expected an array of float64 or float32, got dtype {v.dtype}; "
                "convert it with v.astype(float)."
            )
        product = self._flat_product(torch.from_numpy(np.array(v, v.dtype.newbyteorder("="))))
        if product.requires_grad or is_observed(product):
            raise InputError(
                f"{type(self).__name__} @ v: v: expected a tensor, because the product is differentiable with respect "
                "to the operator's elements, got an array; pass torch.from_numpy(v)."
            )
        return numbers_in(product)

    def _flat_product(self, v: Tensor) -> Tensor:
        n = self.domain.size
        strided = v.layout is torch.strided
        if v.dim() not in (1, 2) or v.shape[0] != n or not v.is_floating_point() or not strided:
            raise InputError(
                f"{type(self).__name__} @ v: v: expected a floating-point tensor ({n},) or ({n}, k), or a pytree like "
                f"the operator's parameters, got {describe(v)}; "
                + ("flatten the leaves in pytree order." if strided else "pass v.to_dense().")
            )
        # A product in the vector's own dtype would hide that the operator computes in another dtype.
        block = (v[:, None] if v.dim() == 1 else v).to(self.domain.device, self.domain.dtype)
        result = multiply(self, block)
        return result[:, 0] if v.dim() == 1 else result

    def __repr__(self) -> str:
        m, n = self.shape
        return f"{type(self).__name__}({m}, {n}, {str(self.dtype).removeprefix('torch.')}, {self.device})"

    def _repr_html_(self) -> str:
        return operator_html(type(self).__name__, self.domain, self.codomain, self.symmetric, self._told())

    def _told(self) -> list[tuple[str, object]]:
        """Return further labels and values for display in a notebook."""
        return []


def require_operator(value: Any, caller: str, argument: str) -> None:
    """Raise if a value is not an operator."""
    if not isinstance(value, LinearOperator):
        raise InputError(
            f"{caller}: {argument}: expected a hodiff LinearOperator, got {describe(value)}; "
            "wrap a matrix in hodiff.operators.MatrixOperator."
        )
