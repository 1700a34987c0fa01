"""Differentiable solutions of linear systems that are given by products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.closures import refuse_captured_by
from hodiff.common.options import require_bools, require_callable
from hodiff.common.trees import PyTree, flatten_primals, recordable
from hodiff.derivatives.bound_function import at_the_boundary
from hodiff.distributed.layouts import require_ordinary
from hodiff.implicit.diagnostics import Reporter
from hodiff.implicit.implicit_function import solve
from hodiff.implicit.implicit_solution import linear_options
from hodiff.implicit.linear_maps import map_of
from hodiff.implicit.solver_call import Ravel
from hodiff.rules.any_order import outside_graphs
from hodiff.torch_internals.autograd.transforms import in_transform


@at_the_boundary
@outside_graphs
def linear_solve(
    matvec: Callable[..., PyTree],
    b: PyTree,
    *params: Any,
    method: str | Callable[..., PyTree] = "auto",
    symmetric: bool = False,
    tol: float | None = None,
    max_iterations: int | None = None,
    check: bool = True,
    throw: bool = False,
) -> PyTree:
    r"""Solve $A(p)\, x = b$ for a matrix given by its products, differentiably in $b$ and $p$.

    $$ \dot x = A^{-1} (\dot b - \dot A x), \qquad \bar b = A^{-\top} \bar x, \qquad
       \bar p = -\partial_p (A(p)\, x)^\top \bar b $$

    Args:
        matvec: `matvec(x, *params)`, linear in `x`, of the structure, shapes and dtypes of `b`.
        b: Right-hand side: a tensor or a pytree of real floating-point tensors.
        *params: Tensors, pytrees and constants on which the matrix depends. Tensors that need a derivative must be
            in `params`.
        method: Linear solver; see `linear_solver` of `hodiff.implicit.root`. Transposed systems, in derivatives, use
            the same method.
        symmetric: Whether $A$ is symmetric, so that its transpose is not needed.
        tol: Relative residual $\lVert b - A x \rVert / \lVert b \rVert$ of the solution; by default $\varepsilon^{2/3}$
            of the dtype.
        max_iterations: Maximum number of iterations; by default ten times the unknowns, and 1000 for "neumann".
        check: Whether to report if the method fails or the matrix is singular.
        throw: Whether a report is a `ConvergenceError` instead of a `HodiffWarning`.

    Returns:
        $x$, of the structure of `b`.

    Raises:
        InputError: If `matvec` returns another structure than that of `b` or closes over a tensor with a derivative, or
            if an option is invalid.

    Example:
        >>> import torch
        >>> from hodiff.implicit import linear_solve
        >>> b, shift = torch.tensor([2.0, 6.0]), torch.tensor(1.0)
        >>> solve = lambda shift: linear_solve(lambda x, shift: x + shift * x, b, shift, method="cg", symmetric=True)
        >>> solve(shift), torch.func.jacrev(solve)(shift)
        (tensor([1., 3.]), tensor([-0.5000, -1.5000]))

    Source: M. Giles, "An extended collection of matrix derivative results for forward and reverse mode algorithmic
    differentiation", 2008, section 2.3.1.
    """
    require_callable("linear_solve", matvec=matvec)
    require_bools("linear_solve", symmetric=symmetric, check=check, throw=throw)
    report = Reporter("linear_solve", check, throw)
    options = linear_options("linear_solve", "method", method, symmetric, tol, max_iterations, report)
    b, params = pytree.tree_map_only(Tensor, recordable, (b, params))
    flatten_primals(b, "linear_solve", "b")
    require_ordinary("linear_solve", b=b, params=params)
    if in_transform():
        refuse_captured_by("linear_solve", matvec)

    def checked(x: PyTree, *params: Any) -> PyTree:
        product = matvec(x, *params)
        remedy = "return the structure, shapes and dtypes of b"
        Ravel(x).require_same(product, "linear_solve: matvec: result", remedy)
        return product

    if torch.is_grad_enabled():
        options = dataclasses.replace(options, given=matvec)
    return solve(map_of(checked, symmetric), options, b, *params)
