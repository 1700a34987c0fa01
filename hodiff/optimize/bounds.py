"""Bounds and constraints on pytrees as SciPy takes them, with exact derivatives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy
from torch import Tensor

from hodiff.common.options import is_number
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives import hessian_matrix, jacobian
from hodiff.errors import InputError
from hodiff.operators import HessianOperator
from hodiff.optimize.objective import numbers_of, vector_function
from hodiff.optimize.sparse_derivatives import sparse_jacobian, sparse_weighted_hessian
from hodiff.optimize.variables import Variables

# Largest number of unknowns for which the Hessian of a constraint is a matrix; above it, it is an operator.
DENSE = 256
_KINDS = {"eq": (0.0, 0.0), "ineq": (0.0, np.inf)}


def bounds_of(caller: str, bounds: Any, variables: Variables, *, in_pairs: bool = True) -> Any:
    """Convert bounds to SciPy's, from SciPy's forms or a pair of pytrees; only `minimize` accepts pairs of numbers."""
    if bounds is None:
        return None
    n = variables.space.size
    keep_feasible: Any = False
    if in_pairs:
        _require_one_meaning(caller, bounds, n)
    if isinstance(bounds, scipy.optimize.Bounds):
        lower, upper, keep_feasible = bounds.lb, bounds.ub, bounds.keep_feasible
    elif _are_sides(bounds, in_pairs):
        lower, upper = (
            _limits(caller, each, empty, variables) for each, empty in zip(bounds, (-np.inf, np.inf), strict=True)
        )
    elif in_pairs and isinstance(bounds, Iterable) and all(map(_is_pair, pairs := list(bounds))) and len(pairs) == n:
        lower, upper = (
            np.array([empty if each[i] is None else each[i] for each in pairs], float)
            for i, empty in ((0, -np.inf), (1, np.inf))
        )
    else:
        raise _refused(caller, bounds, n, in_pairs)
    try:
        lower, upper = (np.broadcast_to(np.asarray(each, float), (n,)) for each in (lower, upper))
    except ValueError:
        raise _refused(caller, bounds, n, in_pairs) from None
    if np.isnan(lower).any() or np.isnan(upper).any():
        raise InputError(f"{caller}: bounds: expected numbers, got nan; use None or inf for no bound.")
    if (crossed := lower > upper).any():
        i = int(crossed.argmax())
        raise InputError(
            f"{caller}: bounds: expected lower bounds that are at most the upper bounds, got {lower[i]:g} and "
            f"{upper[i]:g} for element {i} of x0 in pytree order."
        )
    return scipy.optimize.Bounds(lower, upper, keep_feasible)


def _require_one_meaning(caller: str, bounds: Any, n: int) -> None:
    """Raise for two pairs of numbers that may be lower and upper bounds of two unknowns, unless a list of tuples."""
    if n != 2 or not isinstance(bounds, (tuple, list)) or len(bounds) != 2 or not all(map(_is_pair, bounds)):
        return
    if isinstance(bounds, list) and any(isinstance(each, tuple) for each in bounds):
        return
    # Lower and upper bounds contain no None.
    if any(each is None for pair in bounds for each in pair):
        return
    one, other = ([float(each) for each in pair] for pair in bounds)
    if one[1] != other[0]:
        raise InputError(
            f"{caller}: bounds: expected bounds with one meaning, got two pairs of numbers, which may be the lower "
            f"and the upper bounds of two unknowns, or the limits of each unknown; pass scipy.optimize.Bounds({one}, "
            f"{other}) or two tensors for lower and upper bounds, or a list of tuples, {[tuple(one), tuple(other)]}, "
            "for the limits of each unknown."
        )


def _are_sides(bounds: Any, in_pairs: bool) -> bool:
    """Whether the bounds are a pair of lower and upper bounds."""
    if in_pairs:
        return isinstance(bounds, tuple) and len(bounds) == 2 and not all(map(_is_pair, bounds))
    return isinstance(bounds, (tuple, list)) and len(bounds) == 2


def _is_pair(value: Any) -> bool:
    """Whether a value is SciPy's pair of limits of one element."""
    return (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(each is None or is_number(each) for each in value)
    )


def _limits(caller: str, tree: PyTree, empty: float, variables: Variables) -> Any:
    if tree is None:
        return empty
    if is_number(tree) or isinstance(tree, np.ndarray):
        return tree
    if isinstance(tree, Tensor) and not tree.dim():
        return tree.item()
    if isinstance(tree, (tuple, list)) and tree and all(map(is_number, tree)):
        return np.array(tree, float)
    return variables.array(variables.flatten(tree, caller, "bounds"))


def _refused(caller: str, bounds: Any, n: int, in_pairs: bool) -> InputError:
    pairs = f" or {n} pairs of numbers," if in_pairs else ""
    return InputError(
        f"{caller}: bounds: expected (lower, upper), each None, a number, {n} numbers or a pytree like x0,{pairs} or "
        f"scipy.optimize.Bounds, got {describe(bounds)}."
    )


def constraints_of(
    caller: str, constraints: Any, variables: Variables, start: np.ndarray, *, curved: bool, sparse: bool = False
) -> list[Any]:
    """Convert constraints to SciPy's: functions of vectors, with Jacobians and, if `curved`, Hessians."""
    given = constraints if isinstance(constraints, (tuple, list)) else (constraints,)
    return [_constraint(caller, each, variables, start, curved, sparse) for each in given]


def _require_values(caller: str, first: np.ndarray, lower: Any, upper: Any) -> None:
    """Raise if there are no values, if some are not finite, or if the limits do not fit."""
    if not first.size:
        raise InputError(f"{caller}: constraints: expected functions that return numbers, got one that returns None.")
    if not np.isfinite(first).all():
        raise InputError(
            f"{caller}: constraints: expected finite values at x0, got {first[~np.isfinite(first)][0]}; choose "
            "another x0."
        )
    try:
        lower, upper = (np.broadcast_to(np.asarray(each, float), first.shape) for each in (lower, upper))
    except ValueError:
        raise InputError(
            f"{caller}: constraints: expected limits for each value of the function, {len(first)}, got "
            f"{np.size(lower)} lower and {np.size(upper)} upper ones."
        ) from None
    if not (lower <= upper).all():
        i = int((~(lower <= upper)).argmax())
        raise InputError(
            f"{caller}: constraints: expected lower limits that are at most the upper limits, got {lower[i]:g} and "
            f"{upper[i]:g} for value {i}."
        )


def _constraint(
    caller: str, constraint: Any, variables: Variables, start: np.ndarray, curved: bool, sparse: bool
) -> Any:
    if isinstance(constraint, scipy.optimize.LinearConstraint):
        columns = np.atleast_2d(constraint.A).shape[1]
        if columns != variables.space.size:
            raise InputError(
                f"{caller}: constraints: expected a LinearConstraint with a column for each number of x0, "
                f"{variables.space.size}, got {columns}."
            )
        return constraint
    if isinstance(constraint, scipy.optimize.NonlinearConstraint):
        function, lower, upper, keep = constraint.fun, constraint.lb, constraint.ub, constraint.keep_feasible
        args: tuple[Any, ...] = ()
    elif isinstance(constraint, dict) and constraint.get("type") in _KINDS and callable(constraint.get("fun")):
        function, (lower, upper), keep = constraint["fun"], _KINDS[constraint["type"]], False
        args = tuple(constraint.get("args", ()))
    else:
        raise InputError(
            f"{caller}: constraints: expected scipy.optimize.NonlinearConstraint or LinearConstraint, or a dict with "
            f"'type' ('eq' or 'ineq') and 'fun', or a list of them, got {describe(constraint)}."
        )
    values = vector_function(caller, "constraints", function, args, variables)
    lower, upper = (variables.array(each) if isinstance(each, Tensor) else each for each in (lower, upper))
    _require_values(caller, numbers_of(values, start, variables), lower, upper)

    def slopes(x: np.ndarray) -> np.ndarray:
        try:
            return variables.array(jacobian(values)(variables.vector(x)))
        except InputError as error:
            raise InputError(str(error).replace("jacobian:", f"{caller}: constraints:", 1)) from None

    def weighted(x: Tensor, v: Tensor) -> Tensor:
        return values(x) @ v

    def hessian(x: np.ndarray, v: np.ndarray) -> Any:
        point, weights = variables.vector(x), variables.vector(v)
        if variables.space.size > DENSE:
            return HessianOperator(weighted, point, weights, check_deterministic=False).to_scipy()
        return variables.array(hessian_matrix(weighted, point, weights))

    if sparse:
        jacobians, hessians = sparse_jacobian(caller, values), sparse_weighted_hessian(caller, weighted)
        slopes = lambda x: jacobians(variables.vector(x))  # noqa: E731
        hessian = lambda x, v: hessians(variables.vector(x), variables.vector(v))  # noqa: E731

    return scipy.optimize.NonlinearConstraint(
        lambda x: numbers_of(values, x, variables),
        lower,
        upper,
        jac=slopes,
        # Methods without curvature warn about arguments that they ignore.
        **({"hess": hessian, "keep_feasible": keep} if curved else {}),
    )
