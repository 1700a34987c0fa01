"""Linear operators: a subclass says how it multiplies a block of vectors; shapes, algebra and conversions follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.chunks import require_chunk_size, resolve_chunk_size, spans
from hodiff.common.options import require_bool
from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.operators.conversion import Conversion, conversion_to
from hodiff.operators.estimates import Estimates
from hodiff.operators.linear_product import multiply
from hodiff.operators.spaces import Space
from hodiff.torch_internals.differentiation import is_observed
from hodiff.torch_internals.wrapped_tensors import numbers_in

if TYPE_CHECKING:
    from hodiff.operators.algebra import InverseOperator, ScaledOperator, SumOperator

A = TypeVar("A", bound="LinearOperator")


class LinearOperator(Estimates, ABC):
    r"""A linear map $A$ that is known by its products, $v \mapsto A v$.

    A vector may be a pytree like the one that the operator was made for, one flat vector `(n,)`, or a block `(n, k)`
    whose columns are multiplied together; the product has the same form. Operators add, subtract, multiply with numbers
    and with each other, transpose, and convert to a dense matrix and to SciPy. A product is differentiable in the
    vector; the operator is a constant, unless its `multiply` is made of torch's functions and says so by `composed`.

    A subclass gives the spaces and `multiply`; one that is not symmetric gives `multiply_transposed` too where it can.

    Args:
        domain: Where vectors come from, n numbers.
        codomain: Where products go to, m numbers; the domain by default.
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

    # So that NumPy's scalars leave a product with an operator to the operator.
    __array_ufunc__ = None
    # Whether `multiply` is made of torch's functions and products of other operators, which differentiate themselves.
    composed = False
    # Whether that was made sure of when the operator was made, so that products need not.
    made_of_constants = False

    def __init__(self, domain: Space, codomain: Space | None = None, *, symmetric: bool = False):
        self.domain = domain
        self.codomain = domain if codomain is None else codomain
        self.symmetric = symmetric

    @abstractmethod
    def multiply(self, block: Tensor) -> Tensor:
        """The product with each column of `block`, (n, k) to (m, k)."""

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The transpose's product with each column of `block`, (m, k) to (n, k).

        Args:
            block: The columns.

        Returns:
            The products.

        Raises:
            InputError: If the operator knows no products of its transpose.
        """
        if self.symmetric:
            return self.multiply(block)
        raise InputError(
            f"{self}: products of the transpose are unknown: expected an operator that is symmetric or implements "
            "multiply_transposed; define it."
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n): numbers in a product, numbers in a vector."""
        return self.codomain.size, self.domain.size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of flat products; float32 where the parameters have 16 bits."""
        return torch.promote_types(self.domain.dtype, self.codomain.dtype)

    @property
    def device(self) -> torch.device:
        """Where flat products live."""
        return self.codomain.device

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - the name that every matrix has
        """The transpose."""
        return self if self.symmetric else _algebra().TransposedOperator(self)

    def __matmul__(self, v: Any) -> Any:
        """Multiply a pytree, a flat vector (n,), a block (n, k), or compose with another operator.

        Flat vectors and blocks may be NumPy arrays; so is then the product, a constant for torch.

        Args:
            v: What to multiply.

        Returns:
            The product in the form of `v`.

        Raises:
            InputError: If `v` does not fit.
        """
        if isinstance(v, LinearOperator):
            return _algebra().product(self, v)
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
                f"{type(self).__name__} @ v: v: expected a tensor, as the product has a derivative in the operator's "
                "numbers, which an array would lose, got an array; pass torch.from_numpy(v)."
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
        # A product in the vector's own dtype would hide that the operator computes in another one.
        block = (v[:, None] if v.dim() == 1 else v).to(self.domain.device, self.domain.dtype)
        result = multiply(self, block)
        return result[:, 0] if v.dim() == 1 else result

    def to(self: A, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> A:
        """The operator on another device, or of another floating-point dtype, in which its products are computed.

        Matrices, the point, further arguments, batches as they come, and a copy of a module in the place of a model are
        converted. What functions close over stays as it is: torch's error says so where it does not fit.

        Args:
            device: Where to; None for where it is.
            dtype: Of what is floating-point; None for what it has.

        Returns:
            A new operator.

        Raises:
            InputError: If the device or dtype is none, or the operator is a block or an inverse: convert before.

        Example:
            >>> import torch, hodiff
            >>> A = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.ones(2))
            >>> A.to(dtype=torch.float64) @ torch.ones(2)
            tensor([6., 6.], dtype=torch.float64)
        """
        other: A = self.converted(conversion_to(device, dtype))
        return other

    def converted(self, conversion: Conversion) -> Any:
        """See `to`."""
        raise InputError(
            f"to: A: expected an operator that knows how it is converted, got {self}; convert what it is made of, and "
            "make it anew."
        )

    def to_tree(self, vectors: Tensor) -> PyTree:
        """A flat vector as a pytree like the operator's vectors, such as an eigenvector or a solution.

        Args:
            vectors: Tensor (n,), or (n, k) for k of them.

        Returns:
            The pytree; for a block the list of those of its columns.

        Raises:
            InputError: If it is no such tensor.

        Example:
            >>> import torch, hodiff
            >>> x = {"w": torch.ones(2), "b": torch.ones(1)}
            >>> A = hodiff.HessianOperator(lambda x: (x["w"] ** 2).sum() + 2 * x["b"].square().sum(), x)
            >>> A.to_tree(A.eigsh(1).eigenvectors.abs())
            [{'w': tensor([0., 0.]), 'b': tensor([1.])}]
        """
        n = self.domain.size
        if not isinstance(vectors, Tensor) or vectors.dim() not in (1, 2) or vectors.shape[0] != n:
            raise InputError(f"to_tree: vectors: expected a tensor ({n},) or ({n}, k), got {describe(vectors)}.")
        if vectors.dim() == 1:
            return self.domain.unflatten(vectors)
        return [self.domain.unflatten(column) for column in vectors.unbind(1)]

    def __add__(self, other: LinearOperator) -> SumOperator:
        if not isinstance(other, LinearOperator):
            return NotImplemented
        return _algebra().add(self, other)

    def __sub__(self, other: LinearOperator) -> SumOperator:
        if not isinstance(other, LinearOperator):
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
        r"""The operator $A + \lambda I$."""
        algebra = _algebra()
        return algebra.add(self, algebra.scale(algebra.IdentityOperator(self.domain), damping))

    def inverse(self, method: str = "cg", **options: Any) -> InverseOperator:
        """The inverse, whose products are solutions of linear systems.

        Args:
            method: How they are solved: "cg", "minres", "gmres", "lsmr", "neumann" or "dense".
            **options: As `hodiff.operators.InverseOperator` takes them: `damping`, `preconditioner`, `tol`, ...

        Returns:
            The operator.

        Raises:
            InputError: If an argument does not fit.
        """
        return _algebra().InverseOperator(self, method, **options)

    def block(self, names: str | Sequence[str]) -> LinearOperator:
        """The principal block of some leaves of the parameters, all others held constant.

        Args:
            names: Keys of a dict of parameters, or leading parts of them: "0" picks "0.weight" and "0.bias". Levels of
                nested containers are joined by dots.

        Returns:
            An operator on a dict with these leaves, under their names.

        Raises:
            InputError: If a name picks nothing.
        """
        return _algebra().block(self, names)

    def to_dense(self, *, chunk_size: int | str | None = "auto", progress: bool = False) -> Tensor:
        r"""The matrix, from its products with the unit vectors.

        Args:
            chunk_size: Unit vectors a product: a positive int, None for all at once, or "auto" for as many as keep the
                group and its products within the memory budget of `hodiff.hessian`.
            progress: Whether to show a progress bar.

        Returns:
            Tensor (m, n).

        Raises:
            InputError: If `chunk_size` is not one of these.
        """
        require_chunk_size("to_dense", "chunk_size", chunk_size)
        require_bool("to_dense", "progress", progress)
        return self._by_columns(self.multiply, chunk_size, progress)

    def _by_columns(self, multiply: Callable[[Tensor], Tensor], chunk_size: int | str | None, progress: bool) -> Tensor:
        m, n = self.shape
        dense = torch.empty(m, n, dtype=self.dtype, device=self.device)
        count = resolve_chunk_size(chunk_size, n, self._bytes_each(), self.device)
        with tqdm(total=n, unit=" columns", disable=not progress) as bar:
            for start, stop in spans(n, count):
                block = torch.zeros(n, stop - start, dtype=self.domain.dtype, device=self.domain.device)
                block.diagonal(offset=-start).fill_(1)
                dense[:, start:stop] = multiply(block)
                bar.update(stop - start)
        return dense

    def _bytes_each(self) -> int:
        """Bytes that one more column of a block takes."""
        return sum(self.shape) * self.dtype.itemsize

    def to_scipy(self) -> ScipyOperator:
        """The operator for SciPy: NumPy vectors go to the operator's device and their products come back.

        Returns:
            A `scipy.sparse.linalg.LinearOperator` of the same shape, in float32 or float64.
        """

        def multiplies(multiply: Any, space: Space) -> Any:
            def run(columns: np.ndarray) -> np.ndarray:
                block = torch.from_numpy(np.ascontiguousarray(columns)).to(space.device, space.dtype)
                with torch.no_grad():
                    result = multiply(block.reshape(space.size, -1))
                return result.cpu().numpy().reshape(-1, *columns.shape[1:])

            return run

        forward = multiplies(self.multiply, self.domain)
        backward = multiplies(self.multiply_transposed, self.codomain)
        dtype = np.dtype(str(self.dtype).removeprefix("torch."))
        return ScipyOperator(
            self.shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=dtype
        )

    def __repr__(self) -> str:
        m, n = self.shape
        return f"{type(self).__name__}({m}, {n}, {str(self.dtype).removeprefix('torch.')}, {self.device})"


def _algebra() -> Any:
    """The operators made of operators, which are subclasses and so imported late."""
    from hodiff.operators import algebra

    return algebra


def require_operator(value: Any, caller: str, argument: str) -> None:
    """Refuse what is no operator."""
    if not isinstance(value, LinearOperator):
        raise InputError(
            f"{caller}: {argument}: expected a hodiff LinearOperator, got {describe(value)}; "
            "wrap a matrix in hodiff.operators.MatrixOperator."
        )
