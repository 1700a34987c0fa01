"""Solvers: plain iteration and Anderson acceleration for fixed points, Newton's method for roots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_int
from hodiff.common.trees import PyTree
from hodiff.implicit.diagnostics import Reporter, rounding
from hodiff.implicit.implicit_function import solve
from hodiff.implicit.implicit_solution import linear_options, require_positive
from hodiff.implicit.linear_maps import jacobian_of
from hodiff.implicit.solver_call import Ravel

# A shorter step makes no progress: the residual's norm has a minimum that is no root.
_SHORTEST = 2.0**-20


def newton(
    *,
    tol: float | None = None,
    max_iterations: int = 50,
    linear_solver: str | Callable[..., Any] = "auto",
    symmetric: bool = False,
) -> Callable[..., Any]:
    r"""Newton's method with backtracking, as a solver for roots.

    $$ x \leftarrow x - t J^{-1} r(x), \qquad t = 1, \tfrac12, \tfrac14, \dots $$

    A step is accepted as soon as $\lVert r \rVert$ falls by the fraction $10^{-4} t$.

    Args:
        tol: Norm of the residual, relative to $\max(1, \lVert x \rVert)$ and to the size of $J$ along the last step
            $s$, $\lVert J s \rVert / \lVert s \rVert$; by default $\varepsilon^{2/3}$ of the dtype. The method stops
            earlier if no step makes progress; `hodiff.implicit.root` reports if the result is no root.
        max_iterations: Maximum number of steps.
        linear_solver: Solver of systems with $J$; see `hodiff.implicit.root`.
        symmetric: Whether $J$ is symmetric.

    Returns:
        Solver `(residual, x0, *params) -> x` for `root`; `hodiff.implicit.stationary` converts it for `argmin`.

    Example:
        >>> import torch
        >>> newton()(lambda x, p: x**3 - p, torch.tensor(1.0), torch.tensor(8.0)).round(decimals=4)
        tensor(2.)

    Source: J. Nocedal & S. Wright, "Numerical optimization", 2nd ed., 2006, algorithm 11.4.
    """
    require_positive("newton", tol=tol)
    require_int("newton", "max_iterations", max_iterations, 1)
    require_bool("newton", "symmetric", symmetric)
    options = linear_options(
        "newton", "linear_solver", linear_solver, symmetric, None, None, Reporter("newton", False, False)
    )

    def run(residual: Callable[..., PyTree], x0: PyTree, *params: Any) -> PyTree:
        ravel = Ravel(x0)
        jacobian = jacobian_of(residual, symmetric)
        bound = rounding(ravel.dtype, 2 / 3) if tol is None else tol
        x = ravel.vector(x0)

        def at(x: Any) -> Any:
            return ravel.residual(residual(ravel.tree(x), *params), "newton").detach()

        r, scale = at(x), 0.0
        for _ in range(max_iterations):
            norm = r.norm()
            if not norm > bound * scale * max(1.0, x.norm().item()):
                break
            step = ravel.vector(solve(jacobian, options, ravel.tree(r), ravel.tree(x), *params)).detach()
            scale = (norm / step.norm()).item()
            length = 1.0
            trial = at(x - step)
            while not trial.norm() <= (1 - 1e-4 * length) * norm and length > _SHORTEST:
                length /= 2
                trial = at(x - length * step)
            if not trial.norm() < norm:
                break
            x, r = x - length * step, trial
        return ravel.tree(x)

    return run


def picard(*, tol: float | None = None, max_iterations: int = 1000, damping: float = 1.0) -> Callable[..., Any]:
    r"""Iterate $x \leftarrow x + d \, (s(x) - x)$ until it converges.

    Args:
        tol: Norm of $s(x) - x$, relative to $\max(1, \lVert x \rVert)$; by default $\varepsilon^{2/3}$ of the dtype.
        max_iterations: Maximum number of steps; `hodiff.implicit.fixed_point` reports if they were too few.
        damping: The factor $d$.

    Returns:
        The solver `(step, x0, *params) -> x`, for `fixed_point`.

    Example:
        >>> import torch
        >>> picard()(lambda x, p: torch.cos(p * x), torch.tensor(1.0), torch.tensor(1.0))
        tensor(0.7391)

    Source: E. Picard, "Mémoire sur la théorie des équations aux dérivées partielles", 1890, chapter V.
    """
    require_positive("picard", tol=tol, damping=damping)
    require_int("picard", "max_iterations", max_iterations, 1)
    return _iterate(tol, max_iterations, lambda: lambda x, f: x + damping * f)


def anderson(
    *, tol: float | None = None, max_iterations: int = 1000, memory: int = 5, damping: float = 1.0
) -> Callable[..., Any]:
    r"""Anderson acceleration: a step from the affine combination of the last points with the smallest residual.

    If the residual grows, the iteration returns to the last point and restarts.

    With $f_k = s(x_k) - x_k$ and the columns $\Delta X, \Delta F$ of the last differences,

    $$ x_{k+1} = x_k + d f_k - (\Delta X + d \Delta F)\, \gamma,
       \qquad \gamma = \arg\min \lVert f_k - \Delta F \gamma \rVert. $$

    Args:
        tol: As for `picard`.
        max_iterations: As for `picard`.
        memory: Number of stored differences.
        damping: The factor $d$.

    Returns:
        The solver `(step, x0, *params) -> x`, for `fixed_point`.

    Example:
        >>> import torch
        >>> anderson()(lambda x, p: torch.cos(p * x), torch.tensor(1.0), torch.tensor(1.0))
        tensor(0.7391)

    Source: H. Walker & P. Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49 (2011),
    equation 2.2.
    """
    require_positive("anderson", tol=tol, damping=damping)
    require_int("anderson", "max_iterations", max_iterations, 1)
    require_int("anderson", "memory", memory, 1)

    def updates() -> Callable[[Tensor, Tensor], Tensor]:
        points: list[Tensor] = []
        steps: list[Tensor] = []

        def update(x: Tensor, f: Tensor) -> Tensor:
            if len(points) > 1 and f.norm() > steps[-1].norm():
                # Beyond a kink of the map earlier iterates are misleading, so return to the last point and restart.
                x, f = points[-1], steps[-1]
                points.clear()
                steps.clear()
            points.append(x)
            steps.append(f)
            del points[: -int(memory) - 1], steps[: -int(memory) - 1]
            plain = x + damping * f
            if len(points) == 1:
                return plain
            moves, changes = torch.stack(points, 1).diff(dim=1), torch.stack(steps, 1).diff(dim=1)
            # Differences become parallel near convergence; the pseudoinverse drops directions that are lost to
            # rounding.
            mixture = torch.linalg.pinv(changes, rtol=rounding(f.dtype, 0.75)) @ f
            return plain - (moves + damping * changes) @ mixture

        return update

    return _iterate(tol, max_iterations, updates)


def _iterate(
    tol: float | None, max_iterations: int, updates: Callable[[], Callable[[Tensor, Tensor], Tensor]]
) -> Callable[..., Any]:
    def run(step: Callable[..., PyTree], x0: PyTree, *params: Any) -> PyTree:
        ravel = Ravel(x0)
        bound = rounding(ravel.dtype, 2 / 3) if tol is None else tol
        remedy = "return the structure, shapes and dtypes of x"
        x, update = ravel.vector(x0), updates()
        with torch.no_grad():
            for _ in range(max_iterations):
                following = step(ravel.tree(x), *params)
                ravel.require_same(following, "fixed_point: step: result", remedy)
                f = ravel.vector(following) - x
                # The loop also stops on numbers that are not finite.
                if not f.norm() > bound * max(1.0, x.norm().item()):
                    break
                x = update(x, f)
        return ravel.tree(x)

    return run
