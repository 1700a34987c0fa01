"""Extreme eigenvalues and eigenvectors of a symmetric operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_amount, require_bool, require_choice, require_int
from hodiff.common.trees import describe
from hodiff.displays import SHOWN, Cell, badge, element, facts, number, page, table
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.checkpoints import Checkpoint, Stages
from hodiff.estimators.probes import draw, generator_or_default
from hodiff.estimators.results import cost_of, not_converged, precise
from hodiff.estimators.spectra.eigensolvers import METHODS, UNAVAILABLE
from hodiff.estimators.spectra.lanczos_eigenpairs import SELECT, EigenProblem, SpentError, default_kept
from hodiff.estimators.view import View, require_constant

RESOLVED = 0.1  # largest residual, relative to the eigenvalue, at which its size and sign are known
COARSE = 1e-6  # from this tolerance on, small eigenvalues may be hidden
MOST_NOISE = 0.1  # largest share of noise in a start
INTERIOR = 1000  # up to this size, computing all eigenvalues takes fewer products than those nearest to zero


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    r"""Eigenvalues and eigenvectors, with residuals of $A v = \lambda v$.

    Attributes:
        eigenvalues: Ascending, (k,), in the working dtype on the operator's device.
        eigenvectors: Orthonormal columns, (n, k); `A.to_tree` of hodiff's operators converts them to pytrees.
        residual: $\|A v - \lambda v\|$ of each pair, (k,), from separate products.
        converged: Whether there are k eigenvalues and all residuals meet the tolerance.
        iterations: Lanczos steps for "lanczos", blocks of products for "lobpcg", products for other methods.
        products: Number of products, including those for the residuals.
        method: Method of computation; "dense", too, if a Krylov space would be the whole space.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    residual: Tensor
    converged: bool
    iterations: int
    products: int
    method: str

    @property
    def value(self) -> Tensor:
        """Eigenvalues (k,)."""
        return self.eigenvalues

    @property
    def resolved(self) -> Tensor:
        """Mask (k,) of eigenvalues with known sign and size: their residual is at most a tenth of the eigenvalue.

        For other eigenvalues, such as 0, there is an eigenvalue no farther away than the residual. If several lie so
        close together, a vector may be a mixture of theirs.
        """
        return self.residual <= RESOLVED * self.eigenvalues.abs()

    def _repr_html_(self) -> str:
        columns = (self.eigenvalues.tolist(), self.residual.tolist(), self.resolved.tolist())
        rows = [
            (number(value), number(residual, 2), Cell("yes") if resolved else Cell("no", "warning"))
            for value, residual, resolved in reversed(list(zip(*columns, strict=True)))
        ]
        end = badge("converged", "ok") if self.converged else badge("not converged", "error")
        n, k = self.eigenvectors.shape
        return page(
            element("p", element("b", f"{k:,} of {n:,} eigenvalues"), " ", end),
            table(("eigenvalue", "residual", "sign and size known"), rows, most=SHOWN),
            facts([*cost_of(self), ("iterations", f"{self.iterations:,}")]),
        )


def eigsh(
    A: Any,
    k: int = 6,
    *,
    which: str = "LM",
    method: str = "auto",
    start: Any = None,
    tol: float | None = None,
    max_iterations: int | None = None,
    restart: int | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    throw: bool = True,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Eigenpairs:
    r"""Eigenvalues of a symmetric operator at an end of its spectrum, and their eigenvectors.

    $$ A v_i = \lambda_i v_i $$

    "arpack" is SciPy's implicitly restarted Lanczos method: reliable and of bounded memory; vectors pass through the
    host. "lanczos" keeps `restart` vectors on the operator's device, with full re-orthogonalization and thick restarts,
    and suits a few large eigenvalues on a GPU. "lobpcg", SciPy's, multiplies blocks of k vectors. "dense" multiplies
    with all n unit vectors.
    From one start "arpack" and "lanczos" find a single copy of a multiple eigenvalue. If k > 1, or with `start`,
    they search the orthogonal complement for missed eigenvalues, which takes about as many products again. Final
    residuals from new products determine `converged` and `resolved`.

    Args:
        A: A symmetric operator (n, n), as for `trace`.
        k: Number of eigenvalues, 1 to n.
        which: "LM" or "SM", largest or smallest in absolute value; "LA" or "SA", largest or smallest. "SM" is computed
            densely up to n = 1000. Beyond, only "arpack" supports it, if eigenvalues have one sign. "lobpcg" does not
            support "LM".
        method: "arpack", "lanczos", "lobpcg" or "dense"; "auto" is "lanczos" with `restart` or `checkpoint`, and for
            parameters that are sharded over ranks, where it is the only method; "arpack" otherwise.
        start: Start: a vector (n,) or, for "lobpcg", a block (n, k), such as from an earlier call; for hodiff's
            operators also a pytree like their vectors. Random by default. As its products may never leave the span of
            some eigenvectors, noise is added: relative to the start the larger of `tol` and the square root of the
            operator's rounding (for "lobpcg" the fourth root), at most a tenth. "lanczos" then accepts eigenvalues from
            max(2 k + 1, 20) products on, also if `max_iterations` is less, and all methods search the orthogonal
            complement for missed eigenvalues: "lobpcg", too, by Lanczos steps, each of which keeps a vector.
        tol: Allowed residual relative to the largest $\|A v\|$, by default 1e-9 in float64, 1e-4 in float32 and six
            times the rounding of 16-bit operators. Below float64, eigenvalues smaller than ten times their residuals
            are refined by default: a second round, of at most twice as many products, has a hundredth of the tolerance.
            `resolved` marks the eigenvalues that are known in the end.
        max_iterations: Maximum number of restarts of "arpack" (1000 by default), steps of "lanczos" (ten times
            `restart`) or blocks of "lobpcg" (1000).
        restart: Number of vectors that "lanczos" keeps, k + 2 or more, by default the larger of 100 and 20 k. A few
            vectors beyond them are in memory: the results, and three of a step.
        checkpoint: A folder, or a `Checkpoint`, in which "lanczos" saves its state, and from which it resumes.
        throw: Whether missing the tolerance raises an error instead of a warning.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        progress: Whether to show a progress bar.

    Returns:
        `Eigenpairs`.

    Raises:
        InputError: If A is no symmetric real operator, or an option is out of range or does not fit the method.
        ConvergenceError: If the tolerance is missed; the message has the residuals, `result` the eigenpairs so far.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.arange(-50.0, 40.0, dtype=torch.float64))
        >>> eigsh(A, 2).eigenvalues
        tensor([-50.0000, -49.0000], dtype=torch.float64)
        >>> eigsh(A, 2, which="LA", method="lanczos").eigenvalues.round()
        tensor([38., 39.], dtype=torch.float64)

    Source: Lehoucq, Sorensen, Yang, "ARPACK users' guide" (SIAM 1998); A. V. Knyazev, "Toward the optimal
    preconditioned eigensolver", SIAM J. Sci. Comput. 23 (2001); Wu, Simon, "Thick-restart Lanczos method for large
    symmetric eigenvalue problems", SIAM J. Matrix Anal. Appl. 22 (2000); B. N. Parlett, "The symmetric
    eigenvalue problem", chapter 13.
    """
    view = view_of(A, "eigsh", sharded_too=True)
    require_int("eigsh", "k", k, 1)
    require_bool("eigsh", "throw", throw)
    if k > view.total:
        raise InputError(f"eigsh: k: expected at most n = {view.total} eigenvalues, got {k}.")
    require_choice("eigsh", "which", which, SELECT)
    require_choice("eigsh", "method", method, ["auto", *METHODS])
    if method == "auto":
        plain = view.shards is None and restart is None and checkpoint is None
        method = "arpack" if plain else "lanczos"
    if method != "lanczos":
        view.require_whole(f"method={method!r}", 'use method="lanczos"')
    if which in UNAVAILABLE.get(method, ()):
        raise InputError(f'eigsh: which: method={method!r} does not offer {which!r}; use method="arpack" or "dense".')
    if max_iterations is not None:
        require_int("eigsh", "max_iterations", max_iterations, 1)
    loose = tol is None and max_iterations is None
    tol = view.default_tolerance(1e-9) if tol is None else tol
    require_amount("eigsh", "tol", tol)
    require_int("eigsh", "restart", restart, min(k + 2, view.total), optional=True)
    for name, value in (("restart", restart), ("checkpoint", checkpoint)):
        if value is not None and method != "lanczos":
            raise InputError(
                f'eigsh: {name}: expected None for method={method!r}, got {describe(value)}; it is for "lanczos".'
            )
    kept = default_kept(k) if restart is None else restart
    generator = generator_or_default("eigsh", generator)
    begin = start_block(view, start, k if method == "lobpcg" else 1, generator)
    if start is not None:
        # LOBPCG loses digits on a long way from a nearly exact eigenvector.
        share = max(tol, view.rounding ** (0.25 if method == "lobpcg" else 0.5))
        begin = _with_noise(view, begin, min(MOST_NOISE, share), generator)
    # A Krylov space of ARPACK's size, or LOBPCG's blocks, would be the whole space.
    least = {"arpack": INTERIOR if which == "SM" else 0, "lobpcg": 5 * k}.get(method, 0)
    if view.shards is None and view.n <= max(2 * k + 1, 20, least):
        method = "dense"

    with view.counting(None, progress):
        call = {"k": k, "which": which, "restart": kept, "tol": tol}
        stages = Stages(view, checkpoint, call, {"start": begin}, generator)
        problem = EigenProblem(view, k, which, begin, tol, max_iterations, generator, kept, stages, start is not None)
        result = _solved(problem, method)
        if not result.converged and view.finds_coarser():
            problem.tol = max(problem.tol, 6 * view.rounding)
            result = replace(result, converged=_is_solved(problem, result.residual), products=view.products)
            if not result.converged:
                problem.label = "coarser "
                result = _solved(problem, method)
        if result.converged and loose and not bool(result.resolved.all()):
            result = _resolved(problem, result)
    if not result.converged:
        not_converged(_explanation(problem, result), result, throw=throw)
    return result


def _solved(problem: EigenProblem, method: str) -> Eigenpairs:
    values, vectors = METHODS[method](problem)
    order = values.argsort()
    return _judged(problem, values[order], vectors[:, order], method)


def _resolved(problem: EigenProblem, result: Eigenpairs) -> Eigenpairs:
    """Refine eigenvalues that are small beside the norm, with a finer tolerance."""
    view, vectors = problem.view, result.eigenvectors
    finer = replace(problem, tol=max(8 * view.rounding, problem.tol / 100), most=3 * view.products, label="finer ")
    finer.given = False
    finer.start = vectors if result.method == "lobpcg" else vectors.sum(1, keepdim=True)
    if problem.tol < COARSE or finer.tol >= problem.tol or result.residual.max() <= _allowed(finer):
        return result
    try:
        other = _solved(finer, result.method)
    except SpentError:
        return replace(result, products=view.products)
    better = len(other.residual) == problem.k and other.residual.max() < result.residual.max()
    # A result that met the tolerance stays converged, even if rounding prevents a finer one.
    return replace(other if better else result, converged=True, iterations=finer.iterations, products=view.products)


def _judged(problem: EigenProblem, values: Tensor, vectors: Tensor, method: str) -> Eigenpairs:
    iterations, view = problem.iterations, problem.view
    image = problem.matmat(vectors)
    residual = view.norms(precise(image) - precise(vectors) * precise(values))
    converged = _is_solved(problem, residual)
    return Eigenpairs(values, vectors, residual.to(view.dtype), converged, iterations, view.products, method)


def _is_solved(problem: EigenProblem, residual: Tensor) -> bool:
    return len(residual) == problem.k and bool((residual <= _allowed(problem)).all())


def _allowed(problem: EigenProblem) -> float:
    """Return the allowed residual; twice the tolerance, as algorithms miss it slightly by rounding."""
    return max(2 * problem.tol, 16 * problem.view.rounding) * problem.largest


def _explanation(problem: EigenProblem, result: Eigenpairs) -> str:
    found = int((result.residual <= _allowed(problem)).sum())
    residuals = ", ".join(f"{each:.2g}" for each in result.residual.tolist()) or "none"
    return (
        f"eigsh: {result.method} found {found} of {problem.k} eigenvalues ({problem.which}) to tol={problem.tol:g} in "
        f"{result.iterations} iterations; residuals: {residuals}, allowed {_allowed(problem):.2g}. Raise "
        'max_iterations or tol, use method="dense" for a small operator, and make sure that A is symmetric.'
        f"{problem.view.precision}"
    )


def start_block(view: View, start: Any, columns: int, generator: torch.Generator) -> Tensor:
    """Return the user's start as a block, filled up with random columns."""
    if start is None:
        return draw(view, "gaussian", columns, generator)
    if view.domain is not None and view.domain.is_tree(start):
        start = view.domain.flatten(start, f"{view.caller}: start")
    fits = isinstance(start, Tensor) and start.is_floating_point() and start.dim() in (1, 2)
    if not fits or len(start) != view.n or (start.dim() == 2 and not 1 <= start.shape[1] <= columns):
        shapes = f"({view.n},) or ({view.n}, {columns})" if columns > 1 else f"({view.n},)"
        raise InputError(f"{view.caller}: start: expected a floating-point tensor {shapes}, got {describe(start)}.")
    require_constant(view.caller, "start", start)
    block = start.detach().reshape(view.n, -1).to(view.device, view.dtype)
    norms = view.norms(block)
    if not bool(torch.isfinite(norms).all()) or not bool(norms.all()):
        raise InputError(f"{view.caller}: start: expected finite columns that are not zero; omit start.")
    return torch.cat([block, draw(view, "gaussian", columns - block.shape[1], generator)], 1)


def _with_noise(view: View, block: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Normalize a start and add noise, so that it has a share of every eigenvector."""
    noise = draw(view, "sphere", block.shape[1], generator) * (share / view.total**0.5)
    return (precise(block) / view.norms(block)).to(block.dtype) + noise
