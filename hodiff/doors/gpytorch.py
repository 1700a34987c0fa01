"""Derivatives of every order of GPyTorch's kernels and of linear_operator's solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from gpytorch.functions._log_normal_cdf import LogNormalCDF
from gpytorch.functions.matern_covariance import MaternCovariance
from gpytorch.functions.rbf_covariance import RBFCovariance
from gpytorch.kernels import (
    GridInterpolationKernel,
    InducingPointKernel,
    Kernel,
    LinearKernel,
    Matern52KernelGrad,
    MaternKernel,
    PiecewisePolynomialKernel,
    RFFKernel,
    SpectralDeltaKernel,
)
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.settings import detach_test_caches, sgpr_diagonal_correction
from gpytorch.variational.large_batch_variational_strategy import QuadFormDiagonal
from gpytorch.variational.variational_strategy import ComputePredictiveUpdates
from linear_operator import settings
from linear_operator.functions._inv_quad import InvQuad
from linear_operator.functions._matmul import Matmul
from linear_operator.functions._solve import Solve
from linear_operator.operators import CholLinearOperator, MatmulLinearOperator, TriangularLinearOperator
from linear_operator.utils import linear_cg
from torch import Tensor

from hodiff.common.running_pass import running_pass
from hodiff.corrections import corrected
from hodiff.errors import InputError
from hodiff.implicit import linear_solve
from hodiff.torch_internals.autograd.differentiation import carry_derivatives

_points_are_constant = ContextVar("points_are_constant", default=False)
# Factor between the tolerances of conjugate gradients and of the solution.
FINER = 0.1


@contextmanager
def higher_order() -> Iterator[None]:
    """Compute kernels and solutions of GPyTorch and linear_operator with derivatives of every order.

    Several `autograd.Function`s of these packages have a first derivative only: hodiff refuses most of them, and torch
    computes wrong second derivatives. Inside the context, they are compositions of operators instead:

    | package's own | inside the context |
    |---|---|
    | `RBFKernel`, `MaternKernel` by lengthscale | the formula |
    | distances that are cut off at 1e-15 | distances, also of equal points (`hodiff.corrected()`) |
    | distances of equal points by several lengthscales | constants, if points are |
    | equal points as of a single variable, in kernels of features [1] | the function of both points |
    | `A @ v`, `A.inv_quad(b)` | the product, and $b^T A^{-1} b$ |
    | `A.solve(b)`, Cholesky or conjugate gradients | the same method, by `hodiff.implicit.linear_solve` if iterative |
    | `A.logdet()`, `A.inv_quad_logdet(b)` by random vectors | always by a Cholesky factor |
    | `log_normal_cdf` of `BernoulliLikelihood`, to 2e-3 | `torch.special.log_ndtr` |
    | `VariationalStrategy`, `LargeBatchVariationalStrategy` in training mode | the formulas |
    | test caches that are detached | caches with a graph |

    [1] `LinearKernel`, `RFFKernel`, `SpectralDeltaKernel`, `GridInterpolationKernel` and `InducingPointKernel`. In
    evaluation mode, `InducingPointKernel` adds variances at equal points and then has no derivative there; that is
    refused unless `gpytorch.settings.sgpr_diagonal_correction` is off.

    Conjugate gradients use the preconditioner of the operator, and stop at the tolerance of `linear_solve` instead of
    `cg_tolerance`. Lanczos methods (`root_decomposition`, `sqrt_inv_matmul`, `pivoted_cholesky`) keep their own rules,
    whose second derivatives hodiff refuses.

    The replacements hold for all threads while any context is open.

    Yields:
        None.

    Raises:
        InputError: If an `InducingPointKernel` has no derivative, in a call inside the context.

    Example:
        >>> import gpytorch, hodiff, torch
        >>> kernel = gpytorch.kernels.MaternKernel(nu=2.5).double().requires_grad_(False)
        >>> kernel.lengthscale = 1.0
        >>> center = torch.zeros(1, 2, dtype=torch.float64)
        >>> with higher_order():
        ...     hodiff.hessian_matrix(lambda x: kernel(x, center).to_dense().sum(), center)
        tensor([[-1.6667,  0.0000],
                [ 0.0000, -1.6667]], dtype=torch.float64)

    Source: J. R. Gardner, G. Pleiss, D. Bindel, K. Q. Weinberger & A. G. Wilson, "GPyTorch: blackbox matrix-matrix
    Gaussian process inference with GPU acceleration", NeurIPS 2018, sections 2 and 4.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced())
        stack.enter_context(settings.fast_computations.log_prob(False))
        stack.enter_context(detach_test_caches(False))
        stack.enter_context(corrected())
        yield


def _rbf(x1: Tensor, x2: Tensor, lengthscale: Tensor, squares: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return (-0.5 * squares(x1, x2) / lengthscale**2).exp()


def _matern(
    x1: Tensor, x2: Tensor, lengthscale: Tensor, nu: float, distances: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    # The points are constants, and so are distances of 0 at every lengthscale.
    a = math.sqrt(2 * nu) * distances(x1, x2) / lengthscale
    powers = {0.5: (1.0,), 1.5: (1.0, 1.0), 2.5: (1.0, 1.0, 1 / 3)}[nu]
    return (-a).exp() * sum(factor * a**n for n, factor in enumerate(powers))


def _predictive_updates(factor: Tensor, covariance: Tensor, middle: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute updates of a prior mean and variance by inducing values and their whitened covariance minus 1."""
    whitened = torch.linalg.solve_triangular(factor, covariance, upper=False)
    return (whitened.mT @ values.unsqueeze(-1)).squeeze(-1), _diagonal_of_form(middle, whitened)


def _diagonal_of_form(matrix: Tensor, columns: Tensor) -> Tensor:
    return (columns * (matrix @ columns)).sum(-2)


def _distances(
    kernel: Kernel,
    x1: Tensor,
    x2: Tensor,
    diag: bool = False,
    last_dim_is_batch: bool = False,
    square_dist: bool = False,
    **_: Any,
) -> Tensor:
    """Compute `Kernel.covar_dist` from differences, which are 0 at equal points without a cut-off."""
    if last_dim_is_batch:
        x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
    differences = x1 - x2 if diag else x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if square_dist:
        return differences.square().sum(-1)
    if not _points_are_constant.get():
        return torch.linalg.vector_norm(differences, dim=-1)
    apart = differences.detach().any(-1)
    return torch.linalg.vector_norm(torch.where(apart.unsqueeze(-1), differences, 1.0), dim=-1) * apart


def _may_vary(*points: Tensor) -> bool:
    """Whether points may be differentiated, also in Taylor mode, whose values do not show it."""
    return running_pass() is not None or carry_derivatives(points)


def _with_distances_of_points(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` of a kernel that divides points by lengthscales; equal points are so at every lengthscale."""

    def of_points(kernel: Kernel, x1: Tensor, x2: Tensor, *args: Any, **options: Any) -> Any:
        token = _points_are_constant.set(not _may_vary(x1, x2))
        try:
            return forward(kernel, x1, x2, *args, **options)
        finally:
            _points_are_constant.reset(token)

    return of_points


def _of_two_points(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` of a kernel without its shortcut, which takes equal points for the same variable."""

    def of_two_points(kernel: Kernel, x1: Tensor, x2: Tensor, diag: bool = False, *args: Any, **options: Any) -> Any:
        if x1 is x2 or x1.shape != x2.shape or not _may_vary(x1, x2):
            return forward(kernel, x1, x2, diag, *args, **options)
        # With a further point, x2 is not equal to x1.
        longer = torch.cat([x2, x2[..., :1, :]], -2)
        covariance = forward(kernel, x1, longer, False, *args, **options)[..., :-1]
        return covariance.diagonal(dim1=-1, dim2=-2) if diag else covariance

    return of_two_points


def _inducing_covariance(kernel: InducingPointKernel, x1: Tensor, x2: Tensor) -> Any:
    """Compute the covariance of `InducingPointKernel` without its shortcut, as in `_of_two_points`."""
    if x1 is x2 or x1.shape != x2.shape or not _may_vary(x1, x2) or not torch.equal(x1, x2):
        return _COVARIANCE(kernel, x1, x2)
    if not kernel.training and sgpr_diagonal_correction.on():
        raise InputError(
            "higher_order: InducingPointKernel: expected different points, as the kernel adds a variance where points "
            "are equal and has no derivative there, got equal points in evaluation mode; use "
            "gpytorch.settings.sgpr_diagonal_correction(False), or move the points apart."
        )
    first, second = (kernel.base_kernel(x, kernel.inducing_points).to_dense() for x in (x1, x2))
    root = kernel._inducing_inv_root
    return MatmulLinearOperator(first @ root, (second @ root).mT)


def _part(covariance: LazyEvaluatedKernelTensor, rows: Any, columns: Any, *batch: Any) -> Any:
    """Index the covariance of a single variable, so that equal rows and columns are of one variable, too."""
    part = _PART(covariance, rows, columns, *batch)
    is_single = covariance.x1 is covariance.x2 and isinstance(rows, slice) and rows == columns
    if not (is_single and isinstance(part, LazyEvaluatedKernelTensor)):
        return part
    options = {"kernel": part.kernel, "last_dim_is_batch": part.last_dim_is_batch, **part.params}
    return LazyEvaluatedKernelTensor(part.x1, part.x1, **options)


def _product(tree: Any, right: Tensor, *matrix: Tensor) -> Tensor:
    product: Tensor = tree(*matrix)._matmul(right[:, None] if right.dim() == 1 else right)
    return product.squeeze(-1) if right.dim() == 1 else product


def _solution(tree: Any, has_left: bool, *arguments: Tensor) -> Tensor:
    left, (right, *matrix) = (arguments[0], arguments[1:]) if has_left else (None, arguments)
    solution = _solved(tree, matrix, right[:, None] if right.dim() == 1 else right)
    solution = solution if left is None else left @ solution
    return solution.squeeze(-1) if right.dim() == 1 else solution


def _inverse_form(tree: Any, right: Tensor, *matrix: Tensor) -> Tensor:
    columns = right[:, None] if right.dim() == 1 else right
    return (columns * _solved(tree, matrix, columns)).sum(-2)


def _solved(tree: Any, matrix: Any, right: Tensor) -> Tensor:
    """Solve for columns (..., n, k) by the method that linear_operator chooses."""
    operator = tree(*matrix)
    if isinstance(operator, (CholLinearOperator, TriangularLinearOperator)):
        found: Tensor = operator.solve(right)
        return found
    if settings.fast_computations.solves.off() or operator.size(-1) <= settings.max_cholesky_size.value():
        factored: Tensor = operator.cholesky()._cholesky_solve(right)
        return factored
    tolerance = torch.finfo(right.dtype).eps ** (2 / 3)
    preconditioner = _without_graph(lambda: tree(*(each.detach() for each in matrix))._solve_preconditioner())

    def by_conjugate_gradients(multiply: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        x: Tensor = linear_cg(
            multiply,
            b,
            tolerance=FINER * tolerance,
            # By default, steps stop at a residual of 1e-5, whose square this is.
            eps=torch.finfo(b.dtype).tiny,
            stop_updating_after=FINER * tolerance,
            preconditioner=preconditioner,
        )
        return x

    batch = torch.broadcast_shapes(operator.batch_shape, right.shape[:-2])
    solution: Tensor = linear_solve(
        lambda x, *entries: tree(*entries)._matmul(x),
        right.expand(*batch, *right.shape[-2:]),
        *matrix,
        method=by_conjugate_gradients,
        symmetric=True,
        tol=tolerance,
    )
    return solution


def _without_graph(f: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return f()


RULES: dict[Any, Callable[..., Any]] = {
    RBFCovariance: _rbf,
    MaternCovariance: _matern,
    Matmul: _product,
    Solve: _solution,
    InvQuad: _inverse_form,
    LogNormalCDF: torch.special.log_ndtr,
    ComputePredictiveUpdates: _predictive_updates,
    QuadFormDiagonal: _diagonal_of_form,
}
_DISTANCES = Kernel.covar_dist
_FORWARDS = {
    **dict.fromkeys((LinearKernel, RFFKernel, SpectralDeltaKernel, GridInterpolationKernel), _of_two_points),
    **dict.fromkeys((MaternKernel, Matern52KernelGrad, PiecewisePolynomialKernel), _with_distances_of_points),
}
_OWN_FORWARDS = {kernel: kernel.forward for kernel in _FORWARDS}
_PART = LazyEvaluatedKernelTensor._getitem
_COVARIANCE = InducingPointKernel._get_covariance
_lock = Lock()
_open = 0


@contextmanager
def _replaced() -> Iterator[None]:
    """Replace the Functions while at least one context is open."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            for function, rule in RULES.items():
                function.apply = staticmethod(rule)
            Kernel.covar_dist = _distances
            InducingPointKernel._get_covariance = _inducing_covariance
            LazyEvaluatedKernelTensor._getitem = _part
            for kernel, rewritten in _FORWARDS.items():
                kernel.forward = rewritten(_OWN_FORWARDS[kernel])
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                for function in RULES:
                    del function.apply
                Kernel.covar_dist = _DISTANCES
                InducingPointKernel._get_covariance = _COVARIANCE
                LazyEvaluatedKernelTensor._getitem = _PART
                for kernel, forward in _OWN_FORWARDS.items():
                    kernel.forward = forward
