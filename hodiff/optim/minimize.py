"""Minimise a scalar function of a pytree by SciPy's methods, with exact derivatives."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import scipy
from tqdm.auto import tqdm

from hodiff.common.options import require_bool, require_callable, require_number
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import HodiffWarning, InputError
from hodiff.operators.linear.constants import require_constant
from hodiff.optim.batched.arguments import InDims
from hodiff.optim.batched.methods import minimize_all
from hodiff.optim.bounds import bounds_of, constraints_of
from hodiff.optim.display import OptimizeResult
from hodiff.optim.method_choice import is_empty, require_method, require_takes_sparse
from hodiff.optim.methods import METHODS, Method
from hodiff.optim.objective import Objective
from hodiff.optim.own_options import options_of
from hodiff.optim.point import Point
from hodiff.optim.result import describe_end, in_own_structure
from hodiff.optim.scipy_options import require_options_of_scipy
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse import Coloring

# What a call inside a transform is told.
DIFFERENTIABLE = (
    "a minimiser takes them as constants. Pass them as parameters of hodiff.implicit.argmin(f, hodiff.optim.minimize), "
    "through whose minimum transforms see."
)

# Seconds after which a run without a progress bar says what an iteration takes.
SLOW = 60.0


@outside_graphs
@leave_inference_mode
def minimize(
    f: Callable[..., Any],
    x0: PyTree,
    *args: Any,
    method: str | None = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
    callback: Callable[[scipy.optimize.OptimizeResult], Any] | None = None,
    progress: bool = False,
    sparse: bool | Coloring = False,
    batched: bool = False,
    in_dims: InDims = 0,
) -> OptimizeResult:
    r"""Minimise a scalar function, with exact gradients, Hessian-vector products or Hessians, as the method takes them.

    $$ \min_x f(x) \quad\text{with}\quad l \le x \le u, \quad c_l \le c(x) \le c_u $$

    It is `scipy.optimize.minimize` on tensors: the same iterates as SciPy makes with derivatives written by hand. SciPy
    computes in float64 on the CPU; "newton", "newton-krylov", "ssbroyden" and "ssbfgs" are our own, and compute in
    float64 on the device of `x0`. `f` is evaluated in the dtype and on the device of `x0`, once at each point, whose
    gradient and products share what was recorded.

    | method | takes | bounds | constraints |
    |---|---|---|---|
    | "trust-ncg", "trust-krylov", "newton-cg" | products with the Hessian | | |
    | "newton-krylov" | products with the Hessian, fewer than "trust-ncg" | | |
    | "newton" | the Hessian, sparse for up to some hundred thousand unknowns | | |
    | "trust-exact", "dogleg" | the Hessian, for up to some hundred unknowns | | |
    | "bfgs", "cg" | gradients | | |
    | "ssbroyden", "ssbfgs" | gradients; for up to some thousand unknowns and many digits | | |
    | "l-bfgs-b", "tnc" | gradients | yes | |
    | "slsqp" | gradients | yes | yes |
    | "trust-constr" | products with the Hessian, and with those of the constraints | yes | yes |

    With `sparse=True` the Hessian is a sparse matrix, made by `hodiff.sparse.hessian` of a few products at each point,
    with one coloring for all: "newton" factorises it (on the CPU, by CHOLMOD if scikit-sparse is installed, else by
    SuperLU), "trust-ncg", "trust-krylov" and "newton-cg" multiply with it, and "trust-constr" takes it with sparse
    Jacobians and Hessians of the constraints.

    With `batched=True` many small problems are solved at once, by "trust-exact", "bfgs" or "l-bfgs-b" of our own. `f`
    is still the function of one problem, and `torch.func.vmap` maps it over the first dimension of all leaves of `x0`;
    each problem takes steps of its own, and ends on its own.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape ().
        x0: Where to begin: a tensor or a pytree of floating-point tensors, n numbers in all. Complex ones count as two.
        *args: Further arguments of `f`, taken as constants.
        method: One of the table; None for "trust-ncg", and with `batched` for "trust-exact", or "l-bfgs-b" with bounds.
        bounds: `(lower, upper)`, each None, a number or a pytree like `x0`; or as for SciPy, a pair for each element
            of x in pytree order, or `scipy.optimize.Bounds`. With `batched` those of one problem, for all, or pytrees
            of the shapes of `x0`, for each.
        constraints: As for SciPy, one or a list of `scipy.optimize.NonlinearConstraint(fun, lb, ub)` or
            `{"type": "eq" or "ineq", "fun": fun}`, with `fun(x)` made of torch's functions, which returns a tensor or a
            pytree of them; Jacobians and Hessians are hodiff's. `scipy.optimize.LinearConstraint` is for x in pytree
            order.
        tol: As for SciPy, for termination; by default that of the method.
        options: As for SciPy, further options of the method, such as `{"maxiter": 100}`; those of our own methods are
            listed below.
        callback: Called after each iteration with a `scipy.optimize.OptimizeResult` of `x`, in the structure of `x0`,
            and `fun`; it may raise `StopIteration` to end. Not with `batched`.
        progress: Whether to show a progress bar with value and norm of the gradient, or with `batched` with the number
            of problems that ended.
        sparse: Whether the Hessian is sparse; or its coloring, `hodiff.sparse.color(pattern)`, where that is there. For
            "newton", "newton-cg", "trust-constr", "trust-krylov" and "trust-ncg".
        batched: Whether `x0` holds the starts of many problems: leaves (B, ...).
        in_dims: With `batched`, which dimension of the tensors in each of `args` is that of the problems, as for
            `torch.func.vmap`: an int, or None for what all problems share; one for all of `args`, or a tuple.

    Returns:
        SciPy's `OptimizeResult`: `x` and `jac`, the gradient, in the structure, dtypes and devices of `x0`; `fun`, a
        float; `success`, `status`, `message`; `nit` iterations; `nfev`, `njev`, `nhvp` and `nhev`, how many values,
        gradients, products with the Hessian and Hessians were computed; and what else the method tells. Ctrl-C ends
        with the best point so far. With `batched` all have a row for each problem: `fun`, `success`, `status` and the
        counts are tensors (B,), "trust-exact" tells `hess` and "bfgs" `hess_inv`, (B, n, n), and `message` is a list.

    Options of our own methods, with SciPy's names where it has them:

    | option | of | default | what it is |
    |---|---|---|---|
    | `maxiter` | all | 200 n | most iterations |
    | `gtol` | all | 1e-5, "newton-krylov" 1e-4 | the norm of the gradient at which it ends; `tol` sets it |
    | `norm` | "newton", "ss..." | inf | the order of that norm; 2 for "newton-krylov" |
    | `xrtol` | "ss..." | 0 | ends where a step is shorter, by the length of x |
    | `c1`, `c2` | "newton", "ss..." | 0.1 (1e-4), 0.9 | the part of the slope by which f falls, and that is left |
    | `hess_inv0` | "ss..." | the identity | the inverse Hessian to begin with, (n, n); the last one is `hess_inv` |
    | `initial_scale` | "ss..." | True | whether the identity takes the curvature of the first step |
    | `initial_trust_radius`, `max_trust_radius`, `eta` | "newton-krylov" | 1, 1000, 0.15 | as for "trust-ncg" |
    | `forcing` | "newton-krylov" | "superlinear" | how far systems are solved; "eisenstat-walker" ignores units |
    | `preconditioner` | "newton-krylov" | None | nearly the inverse Hessian: a diagonal (n,) or a function of (n,) |
    | `inner_maxiter` | "newton-krylov" | 20 n | most products in an iteration |

    With `batched`, options have the names and defaults of SciPy's: `maxiter`, `gtol`, `initial_trust_radius`,
    `max_trust_radius` and `eta` of "trust-exact"; `maxiter`, `gtol`, `c1` and `c2` of "bfgs" and "l-bfgs-b", both of
    which take `ftol`, by which the value is still to fall in a step, and the latter `maxcor`, how many steps it keeps.

    Raises:
        InputError: If an argument is not what it should be, or `f` does not return one real number or does not depend
            on `x0`.
        RouteError: If torch implements no derivative that the method takes.

    Example:
        >>> import torch, hodiff
        >>> rosenbrock = lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
        >>> found = hodiff.optim.minimize(rosenbrock, torch.zeros(3, dtype=torch.float64))
        >>> found.x, found.success
        (tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64), True)
        >>> starts, roots = torch.ones(2, dtype=torch.float64), torch.tensor([2.0, 9.0], dtype=torch.float64)
        >>> hodiff.optim.minimize(lambda x, p: (x * x - p) ** 2, starts, roots, batched=True).x
        tensor([1.4142, 3.0000], dtype=torch.float64)

    Source: `scipy.optimize.minimize`; J. Nocedal & S. J. Wright, *Numerical Optimization*, 2nd ed., chapters 4 to 7,
    16 and 18. Of our own, M. Al-Baali, E. Spedicato & F. Maggioni, Optim. Methods Softw. 29 (2014), and J. Urbán,
    P. Stefanou & J. Pons, J. Comput. Phys. 523 (2025), for "ssbfgs" and "ssbroyden", with the line search of W. Hager &
    H. Zhang, ACM Trans. Math. Softw. 32 (2006), which "newton" has, too, after
    algorithm 3.3 of Nocedal & Wright; T. Steihaug, SIAM J. Numer. Anal.
    20 (1983), for "newton-krylov".
    """
    require_bool("minimize", "batched", batched)
    if in_dims != 0 and not batched:
        raise InputError(f"minimize: in_dims: expected 0 without batched=True, got {in_dims!r}; pass batched=True.")
    name = require_method(method, bounds, constraints, batched=batched)
    require_takes_sparse(name, sparse, batched=batched)
    require_number("minimize", "tol", tol, nonnegative=True, optional=True)
    require_bool("minimize", "progress", progress)
    if callback is not None:
        require_callable("minimize", callback=callback)
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"minimize: options: expected a dict or None, got {describe(options)}.")
    require_constant("minimize", x0, f, args, constraints, advice=DIFFERENTIABLE)
    if batched:
        if callback is not None:
            raise InputError("minimize: callback: expected None with batched=True, whose problems end one by one.")
        return OptimizeResult(minimize_all(f, x0, args, in_dims, name, bounds, tol, options or {}, progress=progress))
    takes = METHODS[name]
    if takes.solver is None:
        require_options_of_scipy(name, options or {})
    objective = Objective("minimize", f, x0, args, curved=takes.curvature == "products", sparse=sparse)
    with tqdm(unit=" iterations", disable=not progress) as bar:
        iterations = _Iterations(objective, callback, bar, name)
        if takes.solver is None:
            run = partial(
                scipy.optimize.minimize,
                objective.value,
                objective.variables.start,
                method=name,
                tol=tol,
                options=_sparse_jacobians(takes, sparse) | dict(options or {}),
                callback=iterations,
                **_for_scipy(takes, objective, bounds, constraints, sparse is not False),
            )
        else:
            run = partial(
                takes.solver, objective, options_of(takes.options, name, options or {}, tol), iterations.after
            )
        found = _run(run, objective, iterations)
    describe_end(found, objective)
    if "status" not in found:
        # SciPy minimises nothing where bounds leave nothing to move, and says less than elsewhere.
        found.update(status=0, nit=0, jac=objective.gradient(found.x))
    return OptimizeResult(in_own_structure(found, objective))


def _for_scipy(takes: Method, objective: Objective, bounds: Any, constraints: Any, sparse: bool) -> dict[str, Any]:
    """Derivatives, bounds and constraints as SciPy takes them."""
    curved = takes.curvature == "products"
    given: dict[str, Any] = {"jac": objective.gradient}
    # Of a sparse matrix the products cost next to nothing, which most of SciPy's methods prefer to the matrix itself.
    whole = takes.curvature == "hessian" or (sparse and takes.constraints)
    if whole:
        given["hess"] = objective.hessian
    elif curved:
        given["hessp"] = objective.product
    if bounds is not None:
        given["bounds"] = bounds_of("minimize", bounds, objective.variables)
    if takes.constraints and not is_empty(constraints):
        given["constraints"] = constraints_of(
            "minimize", constraints, objective.variables, curved=curved, sparse=sparse
        )
    return given


def _sparse_jacobians(takes: Method, sparse: bool | Coloring) -> dict[str, Any]:
    """What brings all Jacobians, those of bounds and linear constraints too, to the one form that SciPy wants."""
    return {"sparse_jacobian": True} if sparse is not False and takes.constraints else {}


def _run(
    run: Callable[[], scipy.optimize.OptimizeResult], objective: Objective, iterations: _Iterations
) -> scipy.optimize.OptimizeResult:
    """What the run finds, or the best point where it came to no end of its own."""
    try:
        with np.errstate(all="ignore"):
            return run()
    except KeyboardInterrupt:
        return iterations.ended("Interrupted")
    except StopIteration:
        # Of a callback; some of SciPy's methods do not take it.
        return iterations.ended("`callback` raised `StopIteration`")
    except (ValueError, np.linalg.LinAlgError):
        # SciPy's linear algebra refuses what is not finite, and some methods do not look before.
        if not objective.strayed:
            raise
        return iterations.ended("A value or derivative is not finite")


class _Iterations:
    """The callback of methods: shows progress, and calls the user's."""

    def __init__(self, objective: Objective, callback: Callable[..., Any] | None, bar: Any, method: str):
        self._objective, self._callback, self._bar, self._method = objective, callback, bar, method
        self.count = 0
        self._start = time.monotonic()
        self._silent = bar.disable

    def __call__(self, x: np.ndarray, state: Any = None) -> None:
        gradient = None if self._bar.disable else self._objective.gradient(x)
        self._tell(x, self._objective.value, gradient)

    def after(self, point: Point) -> None:
        """What our own methods call after each iteration."""
        gradient = None if self._bar.disable else self._objective.variables.array(point.slope)
        self._tell(point.x, lambda _: point.value, gradient)

    def _tell(self, x: Any, value: Callable[[Any], float], gradient: np.ndarray | None) -> None:
        self.count += 1
        seconds = time.monotonic() - self._start
        if self._silent and seconds > SLOW:
            self._silent = False
            counts = self._objective.counts
            curved = METHODS[self._method].curvature
            cheaper = "; 'l-bfgs-b' takes one gradient an iteration, and more iterations" if curved else ""
            warnings.warn(
                f"minimize: {self.count} iterations of {self._method!r} took {seconds:.0f} s: {counts.gradients} "
                f"gradients, {counts.products} products with the Hessian and {counts.hessians} Hessians, "
                f"{seconds / self.count:.2g} s an iteration{cheaper}. progress=True shows how far it is, and "
                "options={'maxiter': ...} bounds it.",
                HodiffWarning,
                stacklevel=2,
            )
        if gradient is not None:
            slope = np.linalg.norm(gradient)
            self._bar.set_postfix(value=f"{value(x):.6g}", gradient=f"{slope:.2g}", refresh=False)
            self._bar.update()
        if self._callback is not None:
            self._callback(scipy.optimize.OptimizeResult(x=self._objective.variables.tree(x), fun=value(x)))

    def ended(self, reason: str) -> scipy.optimize.OptimizeResult:
        """The best point so far, for a run that came to no end of its own."""
        value, x = self._objective.best or (math.nan, self._objective.variables.start)
        x = x if isinstance(x, np.ndarray) else self._objective.variables.array(x)
        return scipy.optimize.OptimizeResult(
            x=x, fun=value, nit=self.count, success=False, status=99, message=f"{reason}; x is the best point so far."
        )
