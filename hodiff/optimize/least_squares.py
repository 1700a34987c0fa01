"""Nonlinear least squares by SciPy's methods and geodesic Levenberg-Marquardt, with exact Jacobians."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import scipy
from torch import Tensor

from hodiff.common.module_state import at_another_point
from hodiff.common.options import require_bool, require_callable, require_choice, require_int, require_number
from hodiff.common.trees import PyTree, flatten_primals
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.gradient_comparison import compared_within
from hodiff.errors import HodiffWarning, InputError, levels_to_the_caller
from hodiff.operators import JacobianOperator
from hodiff.operators.linear.constant_points import require_constant
from hodiff.optimize.arguments_of_scipy import OF_LEAST_SQUARES, refusing
from hodiff.optimize.batched.batch import InDims
from hodiff.optimize.batched.batched_methods import least_squares_of_all
from hodiff.optimize.batched.levenberg_marquardt import Limits
from hodiff.optimize.bounds import bounds_of
from hodiff.optimize.display import OptimizeResult
from hodiff.optimize.geodesic import Problem, Rules, geodesic_least_squares
from hodiff.optimize.objective import vector_function
from hodiff.optimize.residual_function import ResidualFunction
from hodiff.optimize.terminations import INTERRUPTED
from hodiff.optimize.variables import Variables, require_some, scale_vector, scales_of
from hodiff.rules.any_order import outside_graphs

DIFFERENTIABLE = (
    "least squares take them as constants. Pass them as parameters of hodiff.implicit.argmin, with the sum of squares "
    "as its objective and a solver that calls hodiff.optimize.least_squares."
)
METHODS = ("trf", "dogbox", "lm", "lm-geodesic")
# These methods support no bounds, no robust losses and no matrix-free Jacobian.
PLAIN = ("lm", "lm-geodesic")
LOSSES = ("linear", "soft_l1", "huber", "cauchy", "arctan")
SOLVERS = ("exact", "lsmr")


@outside_graphs
@refusing(OF_LEAST_SQUARES)
@leave_inference_mode
@at_another_point
def least_squares(
    f: Callable[..., Any],
    x0: PyTree,
    *args: Any,
    method: str | None = None,
    bounds: Any = None,
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: float | str | PyTree | None = None,
    loss: str = "linear",
    f_scale: float = 1.0,
    tr_solver: str | None = None,
    max_nfev: int | None = None,
    acceleration: float = 0.75,
    batched: bool = False,
    in_dims: InDims = 0,
) -> OptimizeResult:
    r"""Minimise a sum of squares of residuals, with exact Jacobians.

    $$ \min_x \tfrac12 \sum_i \rho\big(f_i(x)^2\big) \quad\text{with}\quad l \le x \le u $$

    `scipy.optimize.least_squares` on tensors, with the additional method "lm-geodesic". SciPy computes in float64 on
    the CPU; `f` is evaluated in the dtype and on the device of `x0`.

    Args:
        f: Function `f(x, *args)` that returns the residuals: a tensor or a pytree of tensors, m numbers in all.
        x0: Start: a tensor or a pytree of floating-point tensors, n numbers in all. Complex numbers count as two.
        *args: Further arguments of `f`, taken as constants.
        method: "trf" (the default for None), "dogbox", "lm" or "lm-geodesic". "lm" is MINPACK's Levenberg-Marquardt
            method, without bounds, for m >= n. "lm-geodesic" is hodiff's own, without bounds, for any m, and computes
            on the device of `x0`. Its steps bend with the exact second derivative of the residuals along the step. The
            second derivative costs a few evaluations and saves Jacobians in narrow curved valleys.
        bounds: `(lower, upper)`, each None, a number, n numbers or a pytree like `x0`; or `scipy.optimize.Bounds`. `f`
            is evaluated within them.
        ftol: The run ends if the relative change of the cost is smaller; None disables the test.
        xtol: The run ends if the length of a step relative to x is smaller; None disables the test.
        gtol: The run ends if the gradient's largest element is smaller; None disables the test.
        x_scale: Characteristic sizes of the unknowns: a number, a pytree like `x0`, or "jac" for scales computed from
            the Jacobian's columns, which "lsmr" does not support. None is the default of the installed SciPy, which in
            1.17 is "jac" for "lm" and 1 for other methods; 1 for "lm-geodesic", and "jac" with `batched`.
        loss: $\rho$: "linear", "soft_l1", "huber", "cauchy" or "arctan". Losses other than "linear" limit outliers.
        f_scale: Size of a residual above which it counts as an outlier.
        tr_solver: "exact" for the Jacobian as a matrix, "lsmr" for products with the Jacobian only; None is "exact".
        max_nfev: Maximum number of evaluations; None for SciPy's limit, or 100 n for "lm-geodesic".
        acceleration: For "lm-geodesic", largest length of the acceleration relative to the velocity, the paper's
            $\alpha$; 0 disables the acceleration.
        batched: Whether `x0` holds the starts of many problems, leaves (B, ...), as in `hodiff.optimize.minimize`. `f`
            is the function of one problem. All problems are solved at once with separate steps, by the
            Levenberg-Marquardt method with projections to the bounds, "lm".
        in_dims: With `batched`, the dimension of each of `args` that indexes the problems, as in
            `hodiff.optimize.minimize`.

    Returns:
        SciPy's `OptimizeResult`. `x`, `grad` and `active_mask` have the structure of `x0`, and `x` and `grad` its
        dtypes and devices. `cost` is a float, and `fun` the residuals (m,). `jac` is the Jacobian at x: a tensor (m,
        n), or a `hodiff.JacobianOperator` with "lsmr". A robust loss does not scale its rows, unlike SciPy's. Further
        fields are `optimality`, `status`, `message`, `success`, `nfev`, `njev`, and with "lm-geodesic" `naev`, the
        number of second derivatives. Ctrl-C ends the run with the last accepted point and status 99, after its
        residuals and its Jacobian are computed if necessary; before the first one, it is raised. With `batched` all
        fields have a row for each problem, and `message` is a list; a start whose residuals are not finite has status
        -1.

    Raises:
        InputError: If an argument is invalid, such as a start outside its bounds, or `f` does not depend on `x0`.
        RouteError: If torch does not implement the Jacobian.

    Example:
        >>> import torch, hodiff
        >>> t = torch.linspace(0, 3, 20, dtype=torch.float64)
        >>> data = 2.5 * torch.exp(-1.3 * t)
        >>> start = {"height": torch.ones((), dtype=torch.float64), "rate": torch.ones((), dtype=torch.float64)}
        >>> found = hodiff.optimize.least_squares(lambda p: p["height"] * torch.exp(-p["rate"] * t) - data, start)
        >>> found.x["height"], found.x["rate"]
        (tensor(2.5000, dtype=torch.float64), tensor(1.3000, dtype=torch.float64))
        >>> x0, a = torch.ones(2, 1, dtype=torch.float64), torch.tensor([4.0, 9.0], dtype=torch.float64)
        >>> hodiff.optimize.least_squares(lambda x, a: x * x - a, x0, a, batched=True).x[:, 0]
        tensor([2.0000, 3.0000], dtype=torch.float64)

    Source: `scipy.optimize.least_squares`; M. Branch, T. Coleman & Y. Li, SIAM J. Sci. Comput. 21 (1999) for "trf";
    M. Transtrum & J. Sethna, arXiv:1201.5885, for "lm-geodesic"; K. Madsen, H. Nielsen & O. Tingleff, *Methods for
    Non-Linear Least Squares Problems*, 2nd ed. (2004), for `batched`.
    """
    require_bool("least_squares", "batched", batched)
    if in_dims != 0 and not batched:
        raise InputError(
            f"least_squares: in_dims: expected 0 without batched=True, got {in_dims!r}; pass batched=True."
        )
    method = method or ("lm" if batched else "trf")
    require_choice("least_squares", "method", method, METHODS)
    require_choice("least_squares", "loss", loss, LOSSES)
    require_choice("least_squares", "tr_solver", tr_solver, SOLVERS, optional=True)
    for name, tolerance in {"ftol": ftol, "xtol": xtol, "gtol": gtol}.items():
        require_number("least_squares", name, tolerance, nonnegative=True, optional=True)
    require_number("least_squares", "f_scale", f_scale, positive=True)
    require_int("least_squares", "max_nfev", max_nfev, 1, optional=True)
    _require_an_end(method, ftol, xtol, gtol)
    require_number("least_squares", "acceleration", acceleration, nonnegative=True)
    if batched and (method != "lm" or loss != "linear" or tr_solver is not None):
        raise InputError(
            f"least_squares: batched: expected method='lm', loss='linear' and no tr_solver with batched=True, got "
            f"method={method!r}, loss={loss!r} and tr_solver={tr_solver!r}."
        )
    if not batched and method in PLAIN and (bounds is not None or loss != "linear" or tr_solver == "lsmr"):
        raise InputError(
            f"least_squares: method: {method!r} supports no bounds, only loss='linear' and no tr_solver='lsmr'; pass "
            "method='trf'."
        )
    if tr_solver == "lsmr" and isinstance(x_scale, str) and x_scale == "jac":
        raise InputError(
            "least_squares: x_scale: expected a number or a pytree like x0 with tr_solver='lsmr', which computes no "
            "columns of the Jacobian, got 'jac'; pass sizes of the unknowns, or tr_solver='exact'."
        )
    flatten_primals(x0, "least_squares", "x0", complex_too=True)
    require_callable("least_squares", f=f)
    require_constant("least_squares", x0, f, args, advice=DIFFERENTIABLE)
    if batched:
        limits = Limits(ftol, xtol, gtol, max_nfev)
        return OptimizeResult(least_squares_of_all(f, x0, args, in_dims, bounds, x_scale, limits))
    variables = Variables(x0)
    require_some("least_squares", variables.space)
    residuals = vector_function("least_squares", "f", f, args, variables)

    box = bounds_of("least_squares", bounds, variables, in_pairs=False)
    if box is not None:
        _require_inside(variables.start, box, method)
    # SciPy's "trf" searches a plane in the space of the unknowns, which needs two of them.
    line = tr_solver == "lsmr" and method == "trf" and variables.space.size == 1
    problem = ResidualFunction(residuals, variables, products=tr_solver == "lsmr", dense=line)
    first = problem.value(variables.start)
    if not np.isfinite(first).all():
        raise InputError(
            f"least_squares: x0: expected a point with finite residuals, got {first[~np.isfinite(first)][0]} "
            "among them; choose another x0."
        )
    if method == "lm-geodesic":
        rules = Rules(ftol, xtol, gtol, max_nfev or 100 * variables.space.size, acceleration)
        scales = scale_vector(x_scale, variables)
        found = geodesic_least_squares(Problem(residuals, variables), variables.origin, scales, rules)
        return _in_own_structure(found, variables, residuals, products=False)
    if method == "lm" and len(first) < variables.space.size:
        raise InputError(
            f"least_squares: f: expected as many residuals as unknowns for method='lm', {variables.space.size}, got "
            f"{len(first)}; pass method='trf'."
        )
    given: dict[str, Any] = {}
    # The default depends on SciPy's version and on the method.
    if x_scale is not None:
        given["x_scale"] = scales_of(x_scale, variables)
    if box is not None:
        given["bounds"] = box
    solve = partial(
        scipy.optimize.least_squares,
        problem.value,
        jac=problem.jacobian,
        ftol=ftol,
        xtol=xtol,
        gtol=gtol,
        loss=loss,
        f_scale=f_scale,
        tr_solver=None if line else tr_solver,
        **given,
    )
    sides = None if box is None else (variables.vector(box.lb), variables.vector(box.ub))
    with np.errstate(all="ignore"), nullcontext() if sides is None else compared_within(*sides):
        try:
            found = solve(x0=variables.start, method=method, max_nfev=max_nfev)
        except KeyboardInterrupt:
            found = _interrupted(solve, problem, "trf" if method == "lm" else method)
    if loss != "linear" and isinstance(found.jac, np.ndarray):
        # A robust loss has scaled the rows of SciPy's Jacobian.
        found.jac = problem.jacobian(found.x)
    return _in_own_structure(found, variables, residuals, products=tr_solver == "lsmr")


def _interrupted(solve: partial[Any], problem: ResidualFunction, method: str) -> scipy.optimize.OptimizeResult:
    """Return the result at the last accepted point, which SciPy computes when it takes no step."""
    nfev, njev = problem.values, problem.jacobians
    found = solve(x0=problem.accepted, method=method, max_nfev=1)
    found.update(nfev=nfev, njev=njev, success=False, status=INTERRUPTED.status, message=INTERRUPTED.message)
    return found


def _require_an_end(method: str, *tolerances: float | None) -> None:
    """Raise if the tolerances are too small for any run to end."""
    met = [tolerance is not None and tolerance >= np.finfo(float).eps for tolerance in tolerances]
    if not any(met) or (method == "lm" and not all(met)):
        which = "all of ftol, xtol and gtol" if method == "lm" else "one of ftol, xtol and gtol"
        raise InputError(
            f"least_squares: ftol, xtol, gtol: expected {which} to be 2.3e-16 or more for method={method!r}, got "
            f"{', '.join(map(str, tolerances))}."
        )


def _require_inside(start: np.ndarray, bounds: scipy.optimize.Bounds, method: str) -> None:
    """Raise if the start is outside the bounds, and warn if "trf" would hardly move from it."""
    outside = (start < bounds.lb) | (start > bounds.ub)
    if outside.any() or (bounds.lb == bounds.ub).any():
        i = int((outside | (bounds.lb == bounds.ub)).argmax())
        what = "a start within them" if outside.any() else "lower bounds below the upper ones"
        remedy = "clamp x0" if outside.any() else "omit variables that are fixed"
        raise InputError(
            f"least_squares: bounds: expected {what}, got {start[i]:g} between {bounds.lb[i]:g} and {bounds.ub[i]:g} "
            f"for element {i} of x0 in pytree order; {remedy}."
        )
    if method == "trf" and ((start == bounds.lb) | (start == bounds.ub)).any():
        warnings.warn(
            "least_squares: x0: expected a point inside the bounds, got one on a bound, where SciPy's 'trf' takes "
            "steps of 1e-10 and may stop; choose a point inside, or pass method='dogbox'.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )


def _in_own_structure(
    found: scipy.optimize.OptimizeResult,
    variables: Variables,
    residuals: Callable[[Tensor], Tensor],
    *,
    products: bool,
) -> OptimizeResult:
    """Convert point, gradient and mask to pytrees, and residuals and Jacobian to tensors."""
    x = found.x
    found.x, found.grad, found.active_mask = (variables.tree(each) for each in (x, found.grad, found.active_mask))
    found.fun = variables.vector(found.fun)
    found.jac = JacobianOperator(residuals, variables.vector(x)) if products else variables.vector(found.jac)
    return OptimizeResult(found)
