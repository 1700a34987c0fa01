"""Common part of `root`, `fixed_point` and `argmin`: the solver's run, diagnosis, and the differentiable solution."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.closures import refuse_captured_by
from hodiff.authoring.rule_trees import TreeLayout, flatten
from hodiff.common.module_state import at_another_point
from hodiff.common.options import require_bools, require_int, require_number
from hodiff.common.trees import PyTree, flatten_primals, recordable
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import at_the_boundary
from hodiff.distributed.layouts import require_ordinary
from hodiff.errors import InputError
from hodiff.implicit.diagnostics import Reporter, rounding
from hodiff.implicit.implicit_function import Equation, attach
from hodiff.implicit.linear_maps import jacobian_of
from hodiff.implicit.linear_methods import METHODS
from hodiff.implicit.linear_systems import LinearOptions, evaluate
from hodiff.implicit.solver_call import Ravel, Tensors, call_solver
from hodiff.rules.any_order import outside_graphs
from hodiff.torch_internals.autograd.transforms import in_transform


@dataclass(frozen=True)
class Settings:
    """Options of a public function, as the user passed them."""

    linear_solver: Any
    tol: float | None
    max_iterations: int | None
    residual_tol: float | None
    has_aux: bool
    check: bool
    throw: bool
    correct: bool


def linear_options(
    caller: str,
    argument: str,
    method: Any,
    symmetric: bool,
    tol: float | None,
    max_iterations: int | None,
    report: Reporter,
) -> LinearOptions:
    """Validate the options of the linear solver; `argument` is the caller's name of the method."""
    if not callable(method) and method not in {*METHODS, "auto"}:
        raise InputError(
            f"{caller}: {argument}: expected one of {['auto', *METHODS]} or a function (matvec, rhs) -> x, "
            f"got {method!r}."
        )
    require_positive(caller, tol=tol)
    require_int(caller, "max_iterations", max_iterations, 1, optional=True)
    return LinearOptions(method, symmetric, tol, max_iterations, report)


def require_positive(caller: str, **numbers: Any) -> None:
    """Raise on tolerances and step sizes that are not positive numbers; None is a default."""
    for name, each in numbers.items():
        require_number(caller, name, each, positive=True, optional=True)


def implicit_function(
    caller: str,
    given: Callable[..., Any],
    solver: Callable[..., Any],
    residual_of: Callable[[Callable[..., Any]], Callable[..., PyTree]],
    settings: Settings,
    *,
    symmetric: bool = False,
) -> Callable[..., Any]:
    """Return the function `(x0, *params) -> x`; `symmetric` is whether the residual's Jacobian is symmetric."""
    switches = {"has_aux": settings.has_aux, "check": settings.check, "symmetric": symmetric}
    require_bools(caller, **switches, throw=settings.throw, correct=settings.correct)
    report = Reporter(caller, settings.check, settings.throw)
    options = linear_options(
        caller, "linear_solver", settings.linear_solver, symmetric, settings.tol, settings.max_iterations, report
    )
    require_positive(caller, residual_tol=settings.residual_tol)
    pair = at_another_point(Corrections()(given) if settings.correct else given)
    target = _first(caller, pair) if settings.has_aux else pair
    residual = residual_of(target)
    equation = Equation(residual, jacobian_of(residual, symmetric), lambda x, params: (x, *params), options)

    @at_the_boundary
    @outside_graphs
    def solution(x0: PyTree, *params: Any) -> Any:
        x0, params = pytree.tree_map_only(Tensor, recordable, (x0, params))
        flatten_primals(x0, caller, "x0")
        require_ordinary(caller, x0=x0, params=params)
        if in_transform():
            refuse_captured_by(caller, given)
        leaves, layout = flatten((x0, params))
        job = SolverJob(
            caller, solver, given, target, equation, layout, settings.residual_tol, report, torch.is_grad_enabled()
        )
        found = pytree.tree_structure(x0).unflatten(list(call_solver(job, leaves)))
        x = attach(equation, found, params)
        return (x, pair(x, *params)[1]) if settings.has_aux else x

    return solution


@dataclass(frozen=True)
class SolverJob:
    """Run of the user's solver on plain tensors."""

    caller: str
    solver: Callable[..., PyTree]
    # User's definition of the problem, and its version without aux.
    given: Callable[..., Any]
    target: Callable[..., Any]
    equation: Equation
    # Structure of (x0, params).
    layout: TreeLayout
    residual_tol: float | None
    report: Reporter
    # Whether to raise on tensors with a derivative that the residual closes over.
    refuse: bool

    def batched(self, in_dims: Sequence[int | None], size: int, leaves: Tensors) -> None:
        """Return None, as every element converges separately."""
        del in_dims, size, leaves

    def run(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Solve, and check the result."""
        x0, params = self.layout.fill(leaves)
        ravel = Ravel(x0)
        x = _solution(self.solver(self.target, x0, *params))
        remedy = "return the solution with the structure, shapes and dtypes of x0"
        found = [each.detach().clone() for each in ravel.require_same(x, f"{self.caller}: solver: result", remedy)]
        tree = ravel.spec.unflatten(found)
        r = evaluate(self.caller, self.equation.residual, self.given, (tree, *params), self.refuse)
        remedy = "there must be as many equations as unknowns, in the structure of x0"
        ravel.require_same(r, f"{self.caller}: residual: result", remedy)
        if self.report.check:
            self._inspect(ravel, tree, params, ravel.vector(r))
        return tuple(found)

    def _inspect(self, ravel: Ravel, x: PyTree, params: tuple[Any, ...], residual: Tensor) -> None:
        norm, size = residual.norm().item(), ravel.vector(x).norm().item()
        if norm == 0:
            return
        # The residual is compared with the Jacobian's change of it, not with one: equations may have any units.
        cotangent = torch.randn(
            ravel.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu"
        )
        pullback = self.equation.jacobian.transposed.prepare(x, x, *params)
        scale = ravel.vector(pullback(ravel.tree((cotangent / cotangent.norm()).to(residual)))).norm().item()
        tol = rounding(ravel.dtype, 0.5) if self.residual_tol is None else self.residual_tol
        allowed = tol * scale * max(1.0, size)
        if not norm <= allowed:
            self.report(
                f"the solver's result does not solve the equation: norm of the residual {norm:.1e}, expected at most "
                f"{allowed:.1e}, residual_tol times max(1, norm of x) times the size of the Jacobian, {scale:.1e}; "
                "derivatives are taken at a point that is not a solution; let the solver run longer, or raise "
                "residual_tol."
            )


def _first(caller: str, f: Callable[..., Any]) -> Callable[..., Any]:
    def value(*args: Any) -> Any:
        result = f(*args)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(
                f"{caller}: has_aux: expected a function that returns (value, aux), got {type(result).__name__}; "
                "return a pair, or drop has_aux."
            )
        return result[0]

    return value


def _solution(found: Any) -> PyTree:
    """Extract x from a SciPy result, such as that of `hodiff.optimize.minimize`; return anything else unchanged."""
    optimize = sys.modules.get("scipy.optimize")
    return found.x if optimize is not None and isinstance(found, optimize.OptimizeResult) else found
