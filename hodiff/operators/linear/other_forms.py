"""Other forms of an operator: dense and sparse matrices, a SciPy operator, another dtype; its size, and pytrees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.options import require_bool, require_choice, require_chunk_size
from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.operators.linear.conversion import Conversion, conversion_to
from hodiff.operators.linear.spaces import Space

A = TypeVar("A", bound="Forms")


class Forms:
    """Size and conversions of a linear operator, computed from its spaces and products."""

    domain: Space
    codomain: Space
    symmetric: bool

    @abstractmethod
    def multiply(self, block: Tensor) -> Tensor:
        """See `LinearOperator.multiply`."""

    @abstractmethod
    def multiply_transposed(self, block: Tensor) -> Tensor:
        """See `LinearOperator.multiply_transposed`."""

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n): numbers in a product, numbers in a vector."""
        return self.codomain.size, self.domain.size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of flat products; float32 if the parameters have 16 bits."""
        return torch.promote_types(self.domain.dtype, self.codomain.dtype)

    @property
    def device(self) -> torch.device:
        """Device of flat products."""
        return self.codomain.device

    def to(self: A, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | None = None) -> A:
        """Return the operator on another device, or in another floating-point dtype, in which products are computed.

        Matrices, the point, further arguments, batches during iteration, and a copy of the model, if it is a module,
        are converted. Tensors that functions close over are not: torch raises if they do not fit.

        Args:
            device: The new device; None to keep it. A dtype alone may be passed here, as for tensors.
            dtype: The new dtype of floating-point tensors; None to keep it.

        Returns:
            A new operator.

        Raises:
            InputError: If the device or dtype is invalid, or the operator is a block or an inverse: convert before.

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
            f"to: A: expected an operator that supports conversion, got {self}; convert its parts, and create a new "
            "operator."
        )

    def to_tree(self, vectors: Tensor) -> PyTree:
        """Convert a flat vector, such as an eigenvector or a solution, to a pytree like the operator's vectors.

        Args:
            vectors: Tensor (n,), or (n, k) for k vectors.

        Returns:
            The pytree; for a block, the list of the pytrees of its columns.

        Raises:
            InputError: If `vectors` is not such a tensor.

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

    def to_dense(self, *, chunk_size: int | str | None = "auto", progress: bool = False) -> Tensor:
        r"""Compute the matrix, from products with the unit vectors.

        Args:
            chunk_size: Unit vectors in a product: a positive int, None for all at once, or "auto" for as many as keep
                the group and its products within the memory budget of `hodiff.hessian`.
            progress: Whether to show a progress bar.

        Returns:
            Tensor (m, n).

        Raises:
            InputError: If `chunk_size` is invalid.
        """
        require_chunk_size("to_dense", "chunk_size", chunk_size)
        require_bool("to_dense", "progress", progress)
        self.domain.require_whole("to_dense", "products A @ v, or hodiff.estimators")
        return self._by_columns(self.multiply, chunk_size, progress)

    def to_sparse(self, coloring: Any, format: str = "csr") -> Any:
        r"""Compute the matrix as a sparse one, from one product for each color.

        Args:
            coloring: A `hodiff.sparse.Coloring` of the matrix's pattern.
            format: "csr" or "coo", a sparse tensor; "scipy", a `csr_array`; or "values", only the entries, by rows.

        Returns:
            The matrix (m, n). Entries outside of the pattern would be added to others: `hodiff.sparse.hessian` checks
            for them by one more product.

        Raises:
            InputError: If the coloring is invalid or has another shape; if it is for symmetric matrices, "star" or
                "acyclic", and the operator is not known to be symmetric; or if the format is unknown.
        """
        if not hasattr(coloring, "column_colors"):
            raise InputError(
                f"to_sparse: coloring: expected a Coloring, got {describe(coloring)}; hodiff.sparse.color(pattern) "
                "creates one."
            )
        self.domain.require_whole("to_sparse", "products A @ v, or hodiff.estimators")
        if coloring.shape != self.shape:
            raise InputError(
                f"to_sparse: coloring: expected one of shape {self.shape}, got {coloring!r}; flat vectors have leaves "
                f"in pytree order."
            )
        if coloring.method in ("star", "acyclic") and not self.symmetric:
            raise InputError(
                f"to_sparse: coloring: expected a coloring for matrices that are not symmetric, because {self} is not "
                f"known to be symmetric, got {coloring!r}; hodiff.sparse.color(pattern, 'columns') creates one."
            )
        require_choice("to_sparse", "format", format, ("csr", "coo", "scipy", "values"))
        multiply = {"columns": self.multiply, "rows": self.multiply_transposed}
        vectors = {side: coloring.vectors(side, self.dtype, self.device) for side in coloring.sides}
        products = {side: multiply[side](rows.mT).mT for side, rows in vectors.items()}
        return coloring.matrix(coloring.entries(products), format)

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
        """Return the bytes of one more column of a block."""
        return sum(self.shape) * self.dtype.itemsize

    def to_scipy(self) -> ScipyOperator:
        """Convert the operator for SciPy: NumPy vectors are copied to the operator's device, and products back.

        Returns:
            A `scipy.sparse.linalg.LinearOperator` of the same shape, in float32 or float64.

        Raises:
            InputError: If parameters are sharded over ranks.
        """
        self.domain.require_whole("to_scipy", "hodiff.estimators")

        def multiplies(multiply: Any, space: Space) -> Any:
            def run(columns: np.ndarray) -> np.ndarray:
                if np.iscomplexobj(columns):
                    return run(columns.real) + 1j * run(columns.imag)
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
