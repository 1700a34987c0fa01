"""Minimisation of a scalar function of a pytree, with exact derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import scipy
from tqdm.auto import tqdm

from hodiff.common.options import require_bool, require_callable, require_number
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.gradient_comparison import compared_within
from hodiff.errors import InputError
from hodiff.operators.linear.constant_points import require_constant
from hodiff.optimize.arguments_of_scipy import OF_MINIMIZE, refusing
from hodiff.optimize.batched.batch import InDims
from hodiff.optimize.batched.batched_methods import minimize_all
from hodiff.optimize.bounds import bounds_of, constraints_of
from hodiff.optimize.display import OptimizeResult, describe_end, in_own_structure, report_flat_curvature
from hodiff.optimize.iterations import Iterations, finished
from hodiff.optimize.method_options import options_of
from hodiff.optimize.methods import (
    METHODS,
    Method,
    is_empty,
    require_method,
    require_options_of_scipy,
    require_takes_sparse,
)
from hodiff.optimize.objective import Objective
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse import Coloring

# Advice in the error of a call inside a transform.
DIFFERENTIABLE = (
    "a minimiser takes them as constants. Pass them as parameters of "
    "hodiff.implicit.argmin(f, hodiff.optimize.minimize), "
    "through whose minimum transforms see."
)


@outside_graphs
@refusing(OF_MINIMIZE)
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
    r"""Minimise a scalar function, with the exact gradients, Hessian-vector products or Hessians that the method needs.

    $$ \min_x f(x) \quad\text{with}\quad l \le x \le u, \quad c_l \le c(x) \le c_u $$

    `scipy.optimize.minimize` on tensors, with the iterates that SciPy computes from hand-written derivatives. SciPy
    computes in float64 on the CPU. hodiff's own methods "newton", "newton-krylov", "ssbroyden" and "ssbfgs" compute
    in float64 on the device of `x0`. `f` is evaluated in the dtype and on the device of `x0`; value, gradient and
    products at a point share one evaluation and its graph. A method that returns to an earlier point evaluates it
    again. If `f` leaves the graph, as by `detach`, the first run evaluates it seven more times, to compare its
    gradient with differences.

    With bounds, a start outside is moved to the nearest point within them, and `f` and the constraints are evaluated
    within them. Only "trust-constr" may step outside, unless `scipy.optimize.Bounds` has `keep_feasible=True`. Trust
    regions shrink after NaN, unlike SciPy's, and end if no step changed x in 100 iterations.

    | method | uses | bounds | constraints |
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

    With `sparse=True` the Hessian is a sparse matrix that `hodiff.sparse.hessian` computes from a few products at each
    point, with one coloring for all points. "newton" factorises it, on the CPU, by CHOLMOD if scikit-sparse is
    installed and by SuperLU otherwise. "trust-ncg", "trust-krylov" and "newton-cg" multiply with it. "trust-constr"
    uses sparse Jacobians and Hessians of the constraints, too.

    With `batched=True`, hodiff's own "trust-exact", "bfgs" or "l-bfgs-b" solves many small problems at once. `f` is
    still the function of one problem, and `torch.func.vmap` maps it over the first dimension of all leaves of `x0`.
    The problems take separate steps and end separately.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape ().
        x0: Start: a tensor or a pytree of floating-point tensors, n numbers in all. Complex numbers count as two.
        *args: Further arguments of `f`, taken as constants.
        method: A method of the table; None is "trust-ncg", and with `batched` "trust-exact", or "l-bfgs-b" with bounds.
        bounds: A tuple `(lower, upper)`, each None, a number, n numbers or a pytree like `x0`; or as in SciPy, a list
            of pairs, one for each element of x in pytree order, or `scipy.optimize.Bounds`. For n = 2, two pairs of
            numbers could mean both, so they raise, unless they are a list of tuples. With `batched`, bounds of one
            problem that apply to all, or pytrees with the shapes of `x0`.
        constraints: As in SciPy, one or a list of `scipy.optimize.NonlinearConstraint(fun, lb, ub)` or
            `{"type": "eq" or "ineq", "fun": fun}`. `fun(x)` uses torch functions and returns a tensor or a pytree of
            tensors; hodiff computes its derivatives. `scipy.optimize.LinearConstraint` applies to x in pytree order.
        tol: Tolerance for termination, as in SciPy; by default that of the method.
        options: Further options of the method, as in SciPy, such as `{"maxiter": 100}`. The options of hodiff's own
            methods are listed below.
        callback: Function called after each iteration with a `scipy.optimize.OptimizeResult` of `x`, in the structure
            of `x0`, and `fun`; it may raise `StopIteration` to end the run. Not supported with `batched`.
        progress: Whether to show a progress bar with the value and the gradient's norm, or with `batched` the number of
            problems that ended.
        sparse: Whether the Hessian is sparse; or its coloring, `hodiff.sparse.color(pattern)`, if you have one.
            Supported by "newton", "newton-cg", "trust-constr", "trust-krylov" and "trust-ncg".
        batched: Whether `x0` holds the starts of many problems: leaves (B, ...).
        in_dims: With `batched`, the dimension of the tensors in each of `args` that indexes the problems, as in
            `torch.func.vmap`: an int, or None for arguments that all problems share; one value for all of `args`, or a
            tuple.

    Returns:
        SciPy's `OptimizeResult`. `x` and `jac`, the gradient at x, have the structure, dtypes and devices of `x0`;
        `fun` is a float. Further fields are `success`, `status`, `message`, the number `nit` of iterations, and SciPy's
        fields of the method, such as `hess_inv`, in pytree order. "trust-constr" also returns `constr_jac`, the
        Jacobians of the constraints, which SciPy calls `jac`. `nfev`, `njev`, `nhvp` and `nhev` count values,
        gradients, Hessian-vector products and Hessians. `success` is False if the value or the gradient at x is not
        finite, or if "newton-cg" made a step of length zero because the curvature is zero. Ctrl-C ends the run with the
        best point so far and status 99, after the gradient there is computed if necessary; before the first value, it
        is raised. With `batched` all fields have a row for each problem: `fun`,
        `success`, `status` and the counts are tensors (B,), "trust-exact" returns `hess` and "bfgs" `hess_inv`, (B, n,
        n), and `message` is a list.

    Options of hodiff's own methods, with SciPy's names where SciPy has them:

    | option | methods | default | meaning |
    |---|---|---|---|
    | `maxiter` | all | 200 n | maximum number of iterations |
    | `gtol` | all | 1e-5, "newton-krylov" 1e-4 | norm of the gradient at which the run ends; `tol` sets it |
    | `norm` | "newton", "ss..." | inf | order of that norm; always 2 for "newton-krylov" |
    | `xrtol` | "ss..." | 0 | length of a step, relative to x, at which the run ends |
    | `c1`, `c2` | "newton", "ss..." | 1e-4 ("ss...": 0.1), 0.9 | Wolfe constants: sufficient decrease and curvature |
    | `hess_inv0` | "ss..." | the identity | initial inverse Hessian, (n, n); the result's `hess_inv` is the last one |
    | `initial_scale` | "ss..." | True | whether the identity is scaled to the curvature of the first step |
    | `initial_trust_radius`, `max_trust_radius`, `eta` | "newton-krylov" | 1, 1000, 0.15 | as for "trust-ncg" |
    | `forcing` | "newton-krylov" | "superlinear" | accuracy of the linear solves; "eisenstat-walker" ignores units |
    | `preconditioner` | "newton-krylov" | None | approximate inverse Hessian: a diagonal (n,) or a function of (n,) |
    | `inner_maxiter` | "newton-krylov" | 20 n | maximum number of products in an iteration |

    With `batched`, options have SciPy's names and defaults. "trust-exact" has `maxiter`, `gtol`,
    `initial_trust_radius`, `max_trust_radius` and `eta`. "bfgs" and "l-bfgs-b" have `maxiter`, `gtol`, `c1`, `c2` and
    `ftol`, the relative decrease of the value in a step at which the run ends. "l-bfgs-b" also has `maxcor`, the
    number of stored steps.

    Raises:
        InputError: If an argument is invalid, or `f` does not return one real number or does not depend on `x0`.
        RouteError: If torch does not implement a derivative that the method needs.

    Example:
        >>> import torch, hodiff
        >>> rosenbrock = lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
        >>> found = hodiff.optimize.minimize(rosenbrock, torch.zeros(3, dtype=torch.float64))
        >>> found.x, found.success
        (tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64), True)
        >>> starts, roots = torch.ones(2, dtype=torch.float64), torch.tensor([2.0, 9.0], dtype=torch.float64)
        >>> hodiff.optimize.minimize(lambda x, p: (x * x - p) ** 2, starts, roots, batched=True).x
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
            raise InputError(
                "minimize: callback: expected None with batched=True, because problems end at different iterations."
            )
        return OptimizeResult(minimize_all(f, x0, args, in_dims, name, bounds, tol, options or {}, progress=progress))
    takes = METHODS[name]
    if takes.solver is None:
        require_options_of_scipy(name, options or {})
    objective = Objective("minimize", f, x0, args, curved=takes.curvature == "products", sparse=sparse)
    with tqdm(unit=" iterations", disable=not progress) as bar:
        iterations = Iterations(objective, callback, bar, name)
        if takes.solver is None:
            scipy_method = partial(
                scipy.optimize.minimize,
                objective.ranked_value if takes.trust_region else objective.value,
                method=name,
                tol=tol,
                # SciPy is to convert all Jacobians, also those of bounds and linear constraints, to sparse matrices.
                options=({"sparse_jacobian": True} if sparse is not False and takes.constraints else {})
                | dict(options or {}),
                callback=iterations,
                **_for_scipy(takes, objective, bounds, constraints, sparse is not False),
            )
            run = partial(_to_the_end, scipy_method, objective)
        else:
            run = partial(
                takes.solver, objective, options_of(takes.options, name, options or {}, tol), iterations.after
            )
        found = finished(run, objective, iterations)
    if "status" not in found:
        # SciPy returns fewer fields if the bounds fix all unknowns.
        found.update(status=0, nit=0)
    if takes.constraints and isinstance(found.get("jac"), list):
        found.constr_jac = found.jac
    if takes.solver is None or "jac" not in found:
        # Some methods return the gradient of an earlier point, or none.
        found.jac = objective.gradient(found.x)
    if name == "newton-cg" and found.success and iterations.unchanged:
        report_flat_curvature(found)
    describe_end(found, objective)
    return OptimizeResult(in_own_structure(found, objective))


def _for_scipy(takes: Method, objective: Objective, bounds: Any, constraints: Any, sparse: bool) -> dict[str, Any]:
    """Collect derivatives, bounds and constraints in SciPy's form."""
    curved = takes.curvature == "products"
    given: dict[str, Any] = {"jac": objective.gradient}
    # Products with a sparse matrix are cheap, and most of SciPy's methods prefer products to the matrix.
    whole = takes.curvature == "hessian" or (sparse and takes.constraints)
    if whole:
        given["hess"] = objective.hessian
    elif curved:
        given["hessp"] = objective.product
    start = objective.variables.start
    if bounds is not None:
        given["bounds"] = box = bounds_of("minimize", bounds, objective.variables)
        # SciPy's "trust-constr" would evaluate the function outside of the bounds.
        start = np.clip(start, box.lb, box.ub)
    if takes.constraints and not is_empty(constraints):
        given["constraints"] = constraints_of(
            "minimize", constraints, objective.variables, start, curved=curved, sparse=sparse
        )
    return given | {"x0": start}


def _to_the_end(method: partial[Any], objective: Objective) -> scipy.optimize.OptimizeResult:
    """Run SciPy's method, within the bounds also where hodiff compares values with gradients."""
    bounds = method.keywords.get("bounds")
    if bounds is None:
        return method()
    limits = (objective.variables.vector(side) for side in (bounds.lb, bounds.ub))
    with compared_within(*limits):
        return method() if method.keywords["method"] != "l-bfgs-b" else _beyond_stops(method, objective, bounds)


def _beyond_stops(method: partial[Any], objective: Objective, bounds: Any) -> scipy.optimize.OptimizeResult:
    """Run L-BFGS-B, and again from its result while it claims success with a large projected gradient."""

    def length(x: np.ndarray) -> float:
        return float(np.abs(x - np.clip(x - objective.gradient(x), bounds.lb, bounds.ub)).max(initial=0.0))

    # In about one of twenty problems with bounds, the line search returns the point where it began.
    first, found = length(method.keywords["x0"]), method()
    while found.success and length(found.x) > _STUCK * first:
        again = method(x0=found.x)
        if not again.fun < found.fun:
            break
        for count in ("nit", "nfev", "njev"):
            again[count] += found[count]
        found = again
    return found


# Part of the first projected gradient above which L-BFGS-B has not converged.
_STUCK = 1e-3
