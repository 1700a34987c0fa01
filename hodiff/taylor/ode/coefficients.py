"""The Taylor series of a differential equation's solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.common.options import require_bools, require_int
from hodiff.common.trees import PyTree, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.taylor.ode.field import bound_field, time_like


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
