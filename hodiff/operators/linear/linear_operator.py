"""Linear operators: a subclass defines the product with a block of vectors; shapes and forms of vectors follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.displays import element, facts, page, table
from hodiff.errors import InputError
from hodiff.operators.linear.arithmetic import Arithmetic
from hodiff.operators.linear.estimates import Estimates
from hodiff.operators.linear.linear_product import multiply
from hodiff.operators.linear.other_forms import Forms
from hodiff.operators.linear.spaces import Space
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

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
        return self.codomain.unflatten(multiply(self, vector.unsqueeze(1)).select(1, 0))

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
        # `unsqueeze` and `select` take a third of the time of the same indexing.
        block = (v.unsqueeze(1) if v.dim() == 1 else v).to(self.domain.device, self.domain.dtype)
        result = multiply(self, block)
        return result.select(1, 0) if v.dim() == 1 else result

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
