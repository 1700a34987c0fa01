"""Linear systems with an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import (
    require_amount,
    require_bools,
    require_callable,
    require_choice,
    require_int,
    require_number,
)
from hodiff.common.trees import describe
from hodiff.displays import badge, element, facts, numbers, page
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.checkpoints import Checkpoint, Stages
from hodiff.estimators.dense_matrix import matrix_of
from hodiff.estimators.results import cost_of, not_converged, precise
from hodiff.estimators.systems import conjugate_gradients, neumann, scipy_krylov
from hodiff.estimators.systems.damped_systems import DampedSystem, Increment, Solver, refine
from hodiff.estimators.view import View, require_constant


@dataclass(frozen=True, eq=False)
class Solution:
    r"""Solution of a linear system, with its residual and cost.

    Attributes:
        value: The x, in the shape of b; a pytree like the operator's vectors if b is a pytree like its products.
        converged: Whether every column meets the tolerance.
        iterations: Iterations of the slowest column; for "minres", "gmres" and "lsmr" products with A.
        residual: $\|b - (A + \lambda I) x\|$ of each column, () or (k,), computed from x.
        products: Number of products with the operator and its transpose.
        reason: "converged", or the reason of failure for each column.
        method: Method of the solution.
    """

    value: Any
    converged: bool
    iterations: int
    residual: Tensor
    products: int
    reason: str
    method: str

    def _repr_html_(self) -> str:
        end = badge("converged", "ok") if self.converged else badge(self.reason, "error")
        known = [("residual", numbers(self.residual, 2)), ("iterations", f"{self.iterations:,}"), *cost_of(self)]
        return page(element("p", element("b", "solution of a linear system"), " ", end), facts(known))


def solve(
    A: Any,
    b: Any,
    *,
    method: str = "cg",
    damping: float = 0.0,
    preconditioner: Any = None,
    x0: Any = None,
    tol: float | None = None,
    atol: float = 0.0,
    max_iterations: int | None = None,
    restart: int | None = None,
    step_size: float | None = None,
    throw: bool = True,
    callback: Callable[[int, Tensor], None] | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
) -> Solution:
    r"""Solve a linear system, from products with the operator.

    $$ (A + \lambda I)\, x = b $$

    | method | A | products an iteration | device |
    |---|---|---|---|
    | "cg" | symmetric positive definite | 1, all columns together | the operator's device |
    | "minres" | symmetric | 1 | SciPy, on the host |
    | "gmres" | square | 1, keeps `restart` vectors | SciPy, on the host |
    | "lsmr" | any shape: least squares | 1, and 1 with `A.T` | SciPy, on the host |
    | "neumann" | positive definite, well conditioned | 1, all columns together | the operator's device |
    | "dense" | square | n products once | the operator's device |

    A column is solved if $\|b - (A + \lambda I) x\| \le \max(\mathrm{tol} \|b\|, \mathrm{atol})$, with the residual
    computed from x, not the algorithm's own. For "lsmr" the condition applies to $A^T$ times the residual and $A^T b$.
    If the two residuals differ by rounding, a correction is solved for.

    Args:
        A: An operator (n, n), as for `trace`; for "lsmr" (m, n).
        b: Right-hand side, (m,), or (m, k) for k systems; for hodiff's operators also a pytree like their products.
        method: A method of the table.
        damping: The $\lambda$, 0 or more.
        preconditioner: A positive definite approximation of the inverse of $A + \lambda I$: a callable or an operator
            for blocks (n, k), or a tensor (n,) for a diagonal. For "cg", "minres" and "gmres".
        x0: Start in the shape of x, such as the solution of a similar system; zeros by default.
        tol: Relative tolerance, by default 1e-6 in float64, 1e-4 in float32, and six times the rounding of
            16-bit operators.
        atol: Absolute tolerance.
        max_iterations: Maximum number of iterations, by default 10 n, but at most 10,000; 1000 terms for "neumann".
        restart: Number of vectors that "gmres" keeps, 50 by default.
        step_size: The $\alpha$ of "neumann", below $2 / \|A + \lambda I\|$; by default half of this limit, estimated by
            10 products.
        throw: Whether missing the tolerance raises an error instead of a warning.
        callback: Called as `callback(iterations, residual_norms)`. "cg" and "neumann" call it after each iteration with
            the open columns; the other methods after each correction.
        checkpoint: A folder, or a `Checkpoint`, in which "cg" saves its state, and from which it resumes. The state has
            b, `damping` and the tolerances; pass the same preconditioner again.
        progress: Whether to show a progress bar.

    Returns:
        A `Solution`.

    Raises:
        InputError: If A is no real operator of a fitting shape, an argument does not match it, an option is out of
            range or not supported by the method, or a product is not finite.
        ConvergenceError: If the tolerance is missed and `throw`; the message has the reason, `result` is the
            `Solution`.

    Example:
        >>> import torch
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> solution = solve(A, torch.tensor([3.0, 4.0]))
        >>> solution.value, solution.iterations
        (tensor([1.0000, 1.0000]), 2)

    Source: Hestenes, Stiefel, J. Res. NBS 49 (1952); Paige, Saunders, SIAM J. Numer. Anal. 12 (1975); Saad, Schultz,
    SIAM J. Sci. Stat. Comput. 7 (1986); Fong, Saunders, SIAM J. Sci. Comput. 33 (2011); Lorraine, Vicol, Duvenaud,
    AISTATS 2020.
    """
    require_choice("solve", "method", method, METHODS)
    view = view_of(A, "solve", square=method != "lsmr", sharded_too=True)
    if method != "cg":
        view.require_whole(f"method={method!r}", 'use method="cg"')
    m, n = view.shape
    tree = view.codomain is not None and view.codomain.is_tree(b)
    b = _flat(view.codomain, b, "b")
    x0 = _flat(view.domain, x0, "x0")
    right = _block(view, b, "b", m)
    start = None if x0 is None else _block(view, x0, "x0", n)
    if start is not None and x0 is not None and (x0.ndim != b.ndim or start.shape[1] != right.shape[1]):
        raise InputError(f"solve: x0: expected as many columns as b, got shapes {tuple(x0.shape)}, {tuple(b.shape)}.")
    require_options(
        "solve",
        method,
        m == n,
        damping,
        preconditioner,
        restart,
        step_size,
        tol,
        atol,
        max_iterations,
        throw,
        callback,
        progress,
    )
    if max_iterations is None:
        max_iterations = 1000 if method == "neumann" else min(10 * view.total, 10_000)
    if checkpoint is not None and method != "cg":
        raise InputError(f'solve: checkpoint: expected None for method={method!r}; it is for "cg".')
    default = tol is None
    tol = view.default_tolerance(1e-6) if tol is None else tol

    inverse = _inverse(view, preconditioner)
    measure = scipy_krylov.normal_residual if method == "lsmr" else _residual
    with view.counting(None, progress):
        call = {"damping": damping, "tol": tol, "atol": atol}
        given = {"b": right} if start is None else {"b": right, "x0": start}
        stages = Stages(view, checkpoint, call, given)
        system = DampedSystem(view, damping, inverse, max_iterations, callback, restart, step_size, stages)
        sizes = measure(system, right)
        targets = (tol * sizes).clamp(min=atol)
        if start is not None:
            # A tolerance relative to zero is out of reach of other starts.
            start = torch.where(sizes == 0, 0, start)
        outcome = refine(system, right, start, targets, METHODS[method], measure)
        if any(outcome.reasons) and view.finds_coarser() and default:
            tol = view.default_tolerance(1e-6)
            targets = (tol * measure(system, right)).clamp(min=atol)
            outcome = refine(system, right, outcome.solution, targets, METHODS[method], measure)
    single = b.ndim == 1
    value, norms = outcome.solution[:, 0] if single else outcome.solution, view.norms(outcome.residual)
    reason = _summary(outcome.reasons)
    solution = Solution(
        view.domain.unflatten(value) if tree else value,
        reason == "converged",
        system.iterations,
        norms[0] if single else norms,
        view.products,
        reason,
        method,
    )
    if not solution.converged:
        worst = (norms / view.norms(right).clamp(min=torch.finfo(norms.dtype).tiny)).max().item()
        message = f"solve: {method}: {reason}. Relative residual {worst:.2g}, tol={tol:g}.{view.precision}"
        not_converged(message, solution, throw=throw)
    return solution


def _residual(system: DampedSystem, residual: Tensor) -> Tensor:
    return system.view.norms(residual)


def _dense(system: DampedSystem, residual: Tensor, targets: Tensor) -> Increment:
    """Solve for an increment by a factorization of the matrix in high precision."""
    matrix = precise(matrix_of(system.view))
    matrix.diagonal().add_(system.damping)
    system.advance_to(system.view.n)
    step, failed = torch.linalg.solve_ex(matrix, precise(residual))
    if bool(failed) or not bool(torch.isfinite(step).all()):
        reason = 'A + damping I is singular; raise damping or use method="lsmr"'
        return Increment(torch.zeros_like(residual), [reason] * residual.shape[1])
    return Increment(step.to(residual.dtype), [None] * residual.shape[1])


METHODS: dict[str, Solver] = {
    "cg": conjugate_gradients.increment,
    **scipy_krylov.SOLVERS,
    "neumann": neumann.increment,
    "dense": _dense,
}


def _summary(reasons: list[str | None]) -> str:
    failed = {reason: [k for k, each in enumerate(reasons) if each == reason] for reason in reasons if reason}
    if not failed:
        return "converged"
    if len(reasons) == 1:
        return next(iter(failed))
    return "; ".join(f"column {', '.join(map(str, columns))}: {reason}" for reason, columns in failed.items())


def _flat(space: Any, vector: Any, argument: str) -> Any:
    """Flatten a pytree of a space to a vector; return anything else unchanged."""
    if vector is None or space is None or not space.is_tree(vector):
        return vector
    return space.flatten(vector, f"solve: {argument}")


def _block(view: View, vector: Any, argument: str, rows: int) -> Tensor:
    """Convert a right-hand side or start to a block of the view's dtype, on its device."""
    tensor = torch.from_numpy(vector) if isinstance(vector, np.ndarray) and vector.dtype.kind == "f" else vector
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() not in (1, 2):
        got = describe(vector)
        raise InputError(f"solve: {argument}: expected a floating-point tensor ({rows},) or ({rows}, k), got {got}.")
    if tensor.shape[0] != rows or 0 in tensor.shape:
        raise InputError(f"solve: {argument}: expected shape ({rows},) or ({rows}, k), got {tuple(tensor.shape)}.")
    require_constant("solve", argument, tensor)
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"solve: {argument}: expected finite numbers, got inf or nan among them.")
    return tensor.detach().reshape(rows, -1).to(view.device, view.dtype)


def require_options(
    caller: str,
    method: str,
    square: bool,
    damping: Any,
    preconditioner: Any,
    restart: Any,
    step_size: Any,
    tol: Any,
    atol: Any,
    max_iterations: Any,
    throw: Any,
    callback: Any,
    progress: Any,
) -> None:
    """Raise if an option is invalid, or is not one of the method's."""
    require_amount(caller, "damping", damping)
    if damping and not square:
        raise InputError(f'{caller}: damping: expected 0 for an operator that is not square; solve A.T @ A by "cg".')
    given = {"preconditioner": preconditioner, "restart": restart, "step_size": step_size}
    takes = {"preconditioner": ("cg", "minres", "gmres"), "restart": ("gmres",), "step_size": ("neumann",)}
    for name, value in given.items():
        if value is not None and method not in takes[name]:
            raise InputError(
                f"{caller}: {name}: expected None for method={method!r}, got {describe(value)}; it is for "
                f"{', '.join(takes[name])}."
            )
    require_int(caller, "restart", restart, 1, optional=True)
    require_number(caller, "step_size", step_size, positive=True, finite=True, optional=True)
    require_int(caller, "max_iterations", max_iterations, 1, optional=True)
    require_bools(caller, throw=throw, progress=progress)
    require_number(caller, "tol", tol, nonnegative=True, finite=True, optional=True)
    require_amount(caller, "atol", atol)
    if callback is not None:
        require_callable(caller, callback=callback)


def _inverse(view: View, preconditioner: Any) -> Callable[[Tensor], Tensor] | None:
    """Convert a preconditioner of any kind to a function of blocks with checked results."""
    if preconditioner is None:
        return None
    apply: Callable[[Tensor], Tensor]
    if isinstance(preconditioner, Tensor) and preconditioner.shape == (view.n,):
        require_constant("solve", "preconditioner", preconditioner)
        scale = preconditioner.detach().to(view.device, view.dtype)[:, None]
        apply = lambda block: scale * block  # noqa: E731 - a branch of three
    elif callable(preconditioner) and not hasattr(preconditioner, "__matmul__"):
        apply = preconditioner
    else:
        other = view_of(preconditioner, "solve: preconditioner", sharded_too=view.shards is not None)
        if other.shape != view.shape:
            raise InputError(f"solve: preconditioner: expected an operator {view.shape}, got {other.shape}.")
        apply = other.matmat

    def checked(block: Tensor) -> Tensor:
        result = apply(block)
        if not isinstance(result, Tensor) or result.shape != block.shape:
            raise InputError(
                f"solve: preconditioner: expected {tuple(block.shape)} from a block of that shape, got "
                f"{describe(result)}; pass a tensor ({view.n},), an operator, or a callable of blocks (n, k)."
            )
        require_constant("solve", "preconditioner", result)
        return result.detach().to(block)

    return checked
