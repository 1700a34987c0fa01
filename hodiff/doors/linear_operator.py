"""Operators of hodiff as operators of the package linear_operator, on which GPyTorch is built."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import linear_operator
import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
)
from linear_operator.utils.generic import _to_helper
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, flatten_primals
from hodiff.derivatives import hvp
from hodiff.errors import InputError
from hodiff.operators import (
    DiagonalOperator,
    HessianOperator,
    IdentityOperator,
    LinearOperator,
    MatrixOperator,
    Space,
)
from hodiff.operators.linear.algebra import ProductOperator, ScaledOperator, SumOperator, TransposedOperator
from hodiff.operators.linear.linear_operator import require_operator
from hodiff.operators.linear.linear_product import multiply
from hodiff.torch_internals.autograd.differentiation import carry_derivatives


def to_linear_operator(A: LinearOperator, *, x: PyTree = None) -> linear_operator.LinearOperator:
    r"""Convert an operator for linear_operator: `logdet`, `solve` with preconditioners, `diagonalization`, GPyTorch.

    | hodiff | linear_operator |
    |---|---|
    | matrix, diagonal, identity | dense, diagonal, identity |
    | sum, multiple, product, transpose | sum, multiple, product, transpose |
    | $A + \lambda I$, `A.damped(...)` | added diagonal, with its pivoted Cholesky preconditioner |
    | any other operator | `Products`, which calls the operator's products |

    A matrix, diagonal or factor that requires a gradient has one, and so have further arguments of a `HessianOperator`
    without data. Its point is a constant unless it is passed again as `x`. With $H(x) = \nabla^2 f(x)$, gradients are

    $$ \nabla_x \sum_i u_i^\top H(x)\, v_i, $$

    third derivatives of f, and have derivatives in turn. A gradient with respect to the point or arguments of any
    other operator raises, within `hodiff.doors.gpytorch.higher_order` already a product.

    linear_operator assumes positive definite matrices: sums set negative eigenvalues to 0, and conjugate gradients do
    not notice them. Above `linear_operator.settings.max_cholesky_size`, 800, it solves by conjugate gradients, whose
    `cg_tolerance` is coarse by default.

    Args:
        A: An operator of hodiff, on one process.
        x: The point of the operator's Hessians, with a graph, for a gradient; None for constants.

    Returns:
        A `linear_operator.LinearOperator` of shape (m, n) on flat vectors, with leaves in pytree order.

    Raises:
        InputError: If `A` is no such operator, or `x` is not its point; on use, if a gradient is not available.

    Example:
        >>> import torch, hodiff
        >>> f = lambda x: x.square().sum() + x.prod()
        >>> x = torch.tensor([1.0, 0.5], requires_grad=True)
        >>> H = to_linear_operator(hodiff.HessianOperator(f, x), x=x)
        >>> H.logdet(), H.solve(torch.tensor([5.0, 4.0])).detach()  # the matrix [[2, 1], [1, 2]]
        (tensor(1.0986, grad_fn=<...>), tensor([2.0000, 1.0000]))

    Source: J. R. Gardner, G. Pleiss, D. Bindel, K. Q. Weinberger & A. G. Wilson, "GPyTorch: blackbox matrix-matrix
    Gaussian process inference with GPU acceleration", NeurIPS 2018, section 4.
    """
    require_operator(A, "to_linear_operator", "A")
    A.domain.require_whole("to_linear_operator", "hodiff.estimators")
    return _converted(A, x)


def _converted(A: LinearOperator, x: PyTree) -> linear_operator.LinearOperator:
    if isinstance(A, SumOperator):
        # A diagonal that is added last gives the sum a preconditioner.
        terms = sorted((_converted(each, x) for each in A.terms), key=lambda term: isinstance(term, DiagLinearOperator))
        return reduce(lambda one, other: one + other, terms)
    if isinstance(A, ScaledOperator):
        factor = torch.as_tensor(A.factor, dtype=A.dtype, device=A.device)
        if isinstance(A.operator, IdentityOperator):
            return ConstantDiagLinearOperator(factor[None], A.shape[0])
        return _converted(A.operator, x) * factor
    if isinstance(A, ProductOperator):
        return reduce(lambda one, other: one @ other, (_converted(each, x) for each in A.factors))
    if isinstance(A, TransposedOperator):
        return _converted(A.operator, x).mT
    if isinstance(A, DiagonalOperator):
        return DiagLinearOperator(A.entries)
    if isinstance(A, IdentityOperator):
        return IdentityLinearOperator(A.shape[0], dtype=A.dtype, device=A.device)
    if isinstance(A, MatrixOperator) and A.matrix.layout is torch.strided and A.matrix.dtype == A.dtype:
        return DenseLinearOperator(A.matrix)
    given, arguments = _dependencies(A)
    leaves = [] if x is None else [leaf for point in given for leaf in _leaves(A, point, x)]
    return Products(*leaves, *arguments, operator=A, points=len(leaves), batch_shape=torch.Size())


def _dependencies(A: Any) -> tuple[list[Any], list[Tensor]]:
    """Return the operators at a point, and tensors among further arguments and factors that require a gradient."""
    inner = [
        getattr(A, name) for name in ("operator", "jacobian") if isinstance(getattr(A, name, None), LinearOperator)
    ]
    inner += [*getattr(A, "terms", ()), *getattr(A, "factors", ())]
    own = [getattr(A, name, ()) for name in ("args", "matrix", "entries", "factor")]
    tensors = [each for each in pytree.tree_leaves(own) if isinstance(each, Tensor) and each.requires_grad]
    points = [A] if hasattr(A, "x") else []
    for points_inside, tensors_inside in map(_dependencies, inner):
        points, tensors = points + points_inside, tensors + tensors_inside
    return points, tensors


def _leaves(A: LinearOperator, at: Any, x: PyTree) -> list[Tensor]:
    """Return the leaves of a point with a graph; raise if it is another one."""
    leaves, own = flatten_primals(x, "to_linear_operator", "x")[0], pytree.tree_leaves(at.x)
    if not at.domain.same(Space.of(x)) or not all(map(torch.equal, leaves, own)):
        raise InputError(
            f"to_linear_operator: x: expected the point of {A}, got other numbers or another structure; pass the x "
            "from which the operator was created."
        )
    return list(leaves)


class Products(linear_operator.LinearOperator):
    """An operator of hodiff, by its products; `to_linear_operator` creates it.

    Args:
        *moving: The leaves of the operator's point, if it may require a gradient, and other tensors that require one.
        operator: The operator.
        points: Number of the leaves of the point.
        batch_shape: The shape of a batch of equal operators.
    """

    def __init__(self, *moving: Tensor, operator: LinearOperator, points: int, batch_shape: torch.Size):
        super().__init__(*moving, operator=operator, points=points, batch_shape=batch_shape)
        self._operator, self._points, self._batch, self._moving = operator, points, batch_shape, moving

    def _with(self, operator: LinearOperator, batch_shape: Sequence[int]) -> Products:
        return Products(*self._args, operator=operator, points=self._points, batch_shape=torch.Size(batch_shape))

    def _size(self) -> torch.Size:
        return torch.Size([*self._batch, *self._operator.shape])

    def _transpose_nonbatch(self) -> Products:
        return self._with(self._operator.T, self._batch)

    def _matmul(self, rhs: Tensor) -> Tensor:
        block = rhs[:, None] if rhs.dim() == 1 else rhs
        n, m = block.shape[-2], self._operator.shape[0]
        # All columns of a batch are multiplied together.
        rows = block.movedim(-2, 0)
        columns = rows.reshape(n, -1)
        if carry_derivatives(self._moving):
            product = _product_with_a_graph(self._operator, self._moving, self._points, columns)
        else:
            product = multiply(self._operator, columns)
        product = product.reshape(m, *rows.shape[1:]).movedim(0, -2)
        product = product.expand(*torch.broadcast_shapes(self._batch, product.shape[:-2]), *product.shape[-2:])
        return product.squeeze(-1) if rhs.dim() == 1 else product

    def _diagonal(self) -> Tensor:
        if carry_derivatives(self._moving):
            return self.to_dense().diagonal(dim1=-2, dim2=-1)
        found: Tensor = self._operator.diagonal(exact=True).value
        return found.expand(*self._batch, -1)

    def _symeig(self, eigenvectors: bool = False, return_evals_as_lazy: bool | None = False) -> Any:
        """Decompose the matrix; unlike the package's own, negative eigenvalues stay negative."""
        if not self._operator.symmetric:
            raise InputError(
                f"{self._operator}: eigenvalues: expected a symmetric operator, got one that is not known to be; "
                "declare a symmetric matrix by MatrixOperator(matrix, symmetric=True), or use to_dense()."
            )
        values, vectors = torch.linalg.eigh(self.to_dense())
        return values, DenseLinearOperator(vectors) if eigenvectors else None

    def _unsqueeze_batch(self, dim: int) -> Products:
        return self._with(self._operator, [*self._batch[:dim], 1, *self._batch[dim:]])

    def _permute_batch(self, *dims: int) -> Products:
        return self._with(self._operator, [self._batch[dim] for dim in dims])

    def _expand_batch(self, batch_shape: Any) -> Products:
        return self._with(self._operator, torch.broadcast_shapes(self._batch, torch.Size(batch_shape)))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Any:
        if batch_indices and row_index == slice(None) and col_index == slice(None):
            kept = torch.empty(self._batch, device="meta")[batch_indices]
            return self._with(self._operator, kept.shape)
        return super()._getitem(row_index, col_index, *batch_indices)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return _form_gradients(self._operator, self._moving, self._points, left_vecs, right_vecs)

    def type(self, dtype: torch.dtype) -> Any:
        """Return the operator in another dtype."""
        return self.to(dtype=dtype)

    def cpu(self) -> Any:
        """Return the operator on the CPU."""
        return self.to(device=torch.device("cpu"))

    def cuda(self, device_id: Any = None) -> Any:
        """Return the operator on a GPU."""
        return self.to(device=torch.device("cuda", device_id))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the operator, but no tensors that its function closes over: see `hodiff.LinearOperator.to`."""
        device, dtype = _to_helper(*args, **kwargs)
        if dtype in (None, self.dtype) and device in (None, self.device):
            return self
        if carry_derivatives(self._moving):
            raise InputError(
                f"{self._operator}: to: expected a constant, got an operator at a point that requires a gradient; "
                "convert the point, and create a new operator."
            )
        return to_linear_operator(self._operator.to(device, dtype)).expand(*self._batch, -1, -1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of products."""
        return self._operator.dtype

    @property
    def device(self) -> torch.device:
        """Device of products."""
        return self._operator.device


def _form_gradients(
    A: LinearOperator, moving: Sequence[Tensor], points: int, left: Tensor, right: Tensor
) -> tuple[Tensor | None, ...]:
    r"""Return the gradients of $\sum_i u_i^\top A v_i$ with respect to tensors of an operator."""
    if not any(each.requires_grad for each in moving):
        return (None,) * len(moving)
    # With create_graph, the gradient is differentiated again.
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # The vectors may depend on the same tensors; here they are constants.
        placed = [each.view_as(each) if graph else each.detach().requires_grad_(each.requires_grad) for each in moving]
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        u, v = (each.expand(*batch, -1, -1).movedim(-2, 0).flatten(1) for each in (left, right))
        product = _product_with_a_graph(A, placed, points, v)
        wanted = [each for each in placed if each.requires_grad]
        found = iter(torch.autograd.grad(product, wanted, u, create_graph=graph, materialize_grads=True))
    return tuple(next(found) if each.requires_grad else None for each in placed)


def _product_with_a_graph(A: LinearOperator, moving: Sequence[Tensor], points: int, block: Tensor) -> Tensor:
    """Multiply a block (n, k) by an operator, with derivatives with respect to its tensors."""
    if (
        not isinstance(A, HessianOperator)
        or A.batches.data is not None
        or A.randomness == "fixed"
        or any(A.domain.joined)
    ):
        raise InputError(
            f"{A}: expected a HessianOperator of real numbers without data for a gradient with respect to its point, "
            "or its arguments, got another operator; omit x, and pass detached arguments."
        )
    x = A.domain.tree_of(moving[:points]) if points else A.x
    given = iter(moving[points:])
    args = pytree.tree_map_only(Tensor, lambda each: next(given) if each.requires_grad else each, A.args)
    products = [
        A.domain.flatten(hvp(A.f, x, A.domain.unflatten(v), *args, route=A.route, correct=A.correct))
        for v in block.unbind(1)
    ]
    return torch.stack(products, 1) if products else block.new_zeros(A.shape[0], 0)
