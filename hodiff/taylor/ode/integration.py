"""Integration of ordinary differential equations by Taylor series of high order, and the series of a solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from hodiff.common.options import require_bools, require_int, require_number
from hodiff.common.trees import PyTree, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, tensor_of
from hodiff.taylor.ode.field import bound_field, require_times, time_like
from hodiff.taylor.ode.solution import OdeSolution
from hodiff.taylor.ode.step_size import Tolerance
from hodiff.taylor.ode.stepping import Integration
from hodiff.torch_internals.autograd.transforms import in_transform


@leave_inference_mode
def ode_coefficients(
    f: Callable[..., Any], t0: Any, y0: PyTree, order: int, *args: Any, correct: bool = True
) -> tuple[PyTree, ...]:
    r"""Taylor coefficients of the solution of a differential equation, from its value at one time.

    $$ y' = f(t, y), \quad y(t_0 + s) = \sum_{k=0}^K y_k s^k + O(s^{K+1}), \qquad
       y_{k+1} = \frac{1}{k + 1} \left[ f\Bigl(t_0 + s, \sum_{j \le k} y_j s^j\Bigr) \right]_k $$

    Coefficient k of f depends only on the coefficients of y up to k. So f is called K times, each time with series that
    are longer by one. A call continues from the results of the previous call. All calls together cost about as much as
    one with the longest series, which is K² operations for each product in f. Doubling the length by Newton's
    method would take log K calls, but also the series of f's Jacobian.

    Args:
        f: Function `f(t, y, *args)` that returns the derivative of y in the structure and shapes of y; `t` is a tensor
            of shape `()`. Its random draws are the same in each call.
        t0: The time, a number or a tensor of shape `()`.
        y0: The state there: a tensor, or a pytree of floating-point or complex tensors.
        order: K, 1 or more.
        *args: Further arguments of `f`.
        correct: As in `hodiff.hvp`.

    Returns:
        The K + 1 coefficients, $y_k = y^{(k)}(t_0) / k!$, each in the structure of y0. They can be differentiated
        with respect to y0, t0 and parameters of `f`.

    Raises:
        InputError: If the order is not a positive int, `y0` cannot be differentiated, or the output of `f` does not
            match y0.

    Example:
        >>> import torch, hodiff
        >>> hodiff.taylor.ode_coefficients(lambda t, y: y, 0.0, torch.tensor(1.0), 3)  # exp
        (tensor(1.), tensor(1.), tensor(0.5000), tensor(0.1667))

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 13.4 (differential equations, and
    coefficient doubling).
    """
    require_int("ode_coefficients", "order", order, 1)
    require_bools("ode_coefficients", correct=correct)
    field, leaves = bound_field("ode_coefficients", f, y0, args, correct)
    t = time_like(t0, leaves)
    columns = field.growing(t, leaves, field.value(t, leaves), order)
    return tuple(
        unflatten(
            [torch.zeros_like(column[0]) if column[k] is None else column[k] for column in columns],
            field.spec,
        )
        for k in range(order + 1)
    )


_CALLER = "odeint_taylor"


@overload
def odeint_taylor(
    f: Callable[..., Any],
    y0: PyTree,
    t: Tensor,
    *args: Any,
    rtol: float = ...,
    atol: float = ...,
    order: int | None = ...,
    step_size: float | None = ...,
    max_steps: int = ...,
    full_output: Literal[True],
    checkpoint: Literal[False] = ...,
    correct: bool = ...,
) -> OdeSolution: ...


@overload
def odeint_taylor(
    f: Callable[..., Any],
    y0: PyTree,
    t: Tensor,
    *args: Any,
    rtol: float = ...,
    atol: float = ...,
    order: int | None = ...,
    step_size: float | None = ...,
    max_steps: int = ...,
    full_output: Literal[False] = ...,
    checkpoint: bool = ...,
    correct: bool = ...,
) -> PyTree: ...


@leave_inference_mode
def odeint_taylor(
    f: Callable[..., Any],
    y0: PyTree,
    t: Tensor,
    *args: Any,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    order: int | None = None,
    step_size: float | None = None,
    max_steps: int = 10_000,
    full_output: bool = False,
    checkpoint: bool = False,
    correct: bool = True,
) -> PyTree | OdeSolution:
    r"""Solve $y' = f(t, y)$ by Taylor series of any order, in the manner of torchdiffeq's `odeint(func, y0, t)`.

    In each step the series of the solution, `hodiff.taylor.ode_coefficients`, is evaluated at

    $$ h = \min_{j = p-1,\, p} \left(\frac{\varepsilon}{\lVert y_j \rVert_\infty}\right)^{1/j} e^{-0.7 / (p - 1)},
       \qquad p = \left\lceil 1 - \tfrac12 \ln \varepsilon \right\rceil, \qquad
       \varepsilon = \max(\text{atol}, \text{rtol} \lVert y \rVert_\infty) $$

    (in p, ε is the one of atol and rtol that is in force). Tight tolerances cost little, because a higher order gives
    more digits. A step is shortened where the polynomial does not satisfy the equation at its end. The series give the
    states between the ends of steps.

    Gradients of any order with respect to y0, parameters that `f` closes over, `args` and `t` go through the steps, by
    `backward` or `torch.func`. Step sizes count as constants. With `checkpoint`, derivatives by `backward` store one
    state for each step, instead of the graph of its series.

    Args:
        f: Function `f(t, y, *args)` that returns the derivative of y in the structure and shapes of y; `t` is a tensor
            of shape `()`. It should be smooth along the solution: steps become short at a kink.
        y0: The state at `t[0]`: a tensor, or a pytree of floating-point or complex tensors. Several initial values
            form a dimension that `f` does not mix; they share their steps.
        t: Times at which the state is wanted, (T,), increasing, or decreasing to integrate backwards.
        *args: Further arguments of `f`.
        rtol: Error of a step relative to the largest component of the state.
        atol: Absolute error of a step, for a small state.
        order: Order of the series; None to choose it by the tolerance.
        step_size: Fixed size of all steps but the last; requires `order`, and ignores the tolerances.
        max_steps: Maximum number of steps, including rejected steps.
        full_output: Whether to return the states with statistics, and with the series for other times.
        checkpoint: Whether derivatives compute the series of each step again, as `hodiff.functions.checkpoint` does,
            instead of storing what they need of all steps. The integration runs once more, and once more for each order
            of derivatives. Inside of `torch.func` transforms and of jets, nothing is computed again.
        correct: As in `hodiff.hvp`.

    Returns:
        The states at `t` in the structure of y0, each leaf with a leading dimension T; or an `OdeSolution`.

    Raises:
        InputError: If `t` is not increasing or decreasing, an option is unknown, y0 cannot be differentiated or is not
            finite, or the output of `f` does not match y0 or is not finite at the first time.
        ConvergenceError: If steps become too short, as at a singularity, or too many; its `result` has the solution
            reached so far.

    Example:
        >>> import torch, hodiff
        >>> y0, t = torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.pi])
        >>> hodiff.taylor.odeint_taylor(lambda t, y: torch.stack([y[1], -y[0]]), y0, t).round(decimals=4)[1]
        tensor([-1.,  0.])

    Source: A. Jorba & M. Zou, "A software package for the numerical integration of ODEs by means of high-order Taylor
    methods", Experimental Mathematics 14(1), 2005, section 3.
    """
    require_number(_CALLER, "rtol", rtol, positive=True, finite=True)
    require_number(_CALLER, "atol", atol, positive=True, finite=True)
    require_int(_CALLER, "order", order, 1, optional=True)
    require_number(_CALLER, "step_size", step_size, positive=True, finite=True, optional=True)
    require_int(_CALLER, "max_steps", max_steps, 1)
    require_bools(_CALLER, full_output=full_output, checkpoint=checkpoint, correct=correct)
    if checkpoint and full_output:
        raise InputError(
            f"{_CALLER}: full_output: expected False with checkpoint=True, which keeps no series, got True; pass the "
            "times of all states in t."
        )
    if step_size is not None and order is None:
        raise InputError(f"{_CALLER}: order: expected an int of 1 or more with a fixed step_size, got None.")
    field, leaves = bound_field(_CALLER, f, y0, args, correct)
    times, places = require_times(_CALLER, t, leaves)
    rounding = torch.finfo(tensor_of(leaves[0]).dtype).eps
    tolerance = Tolerance(rtol, atol, rounding)
    run = Integration(field, times, places, tolerance, order, step_size, max_steps, dense=full_output)
    # A checkpoint inside of a transform cannot tell the jets of a series from those of an outer pass.
    stores = not checkpoint or in_transform() or any(isinstance(each, Jet) for each in (times, *leaves))
    solution = run.solved(leaves) if stores else run.recomputed(leaves)
    return solution if full_output else solution.y
