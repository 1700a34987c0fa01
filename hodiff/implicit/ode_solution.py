"""Solutions of ordinary differential equations as differentiable functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_bools, require_callable, require_choice, require_int, require_number
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, flatten, flatten_primals, recordable, unflatten
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import at_the_boundary
from hodiff.distributed.fully_sharded import require_no_training
from hodiff.distributed.layouts import require_ordinary
from hodiff.errors import InputError
from hodiff.implicit.ode_adjoint import solution
from hodiff.implicit.runge_kutta import METHODS, Problem, State, by_checkpoints, integrate, stack
from hodiff.recompute.checkpoint import CallProgram
from hodiff.recompute.programs import Checkpoint
from hodiff.recompute.reachable import modules_in
from hodiff.rules.any_order import outside_graphs
from hodiff.taylor.ode.field import require_like_state, require_times
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import version_of
from hodiff.torch_internals.threads import one_thread_at_a_time

_CALLER = "odeint"
_MEMORIES = ("steps", "checkpoints", "adjoint")


@at_the_boundary
@outside_graphs
def odeint(
    f: Callable[..., Any],
    y0: PyTree,
    t: Tensor,
    *args: Any,
    method: str = "dopri5",
    rtol: float = 1e-7,
    atol: float = 1e-9,
    step_size: float | None = None,
    max_steps: int = 10_000,
    memory: str = "steps",
    correct: bool = True,
) -> PyTree:
    r"""Solve $y' = f(t, y)$ by a Runge-Kutta method, in the manner of torchdiffeq's `odeint(func, y0, t)`.

    $$ k_i = f\Bigl(t + c_i h,\; y + h \sum_{j < i} a_{ij} k_j\Bigr), \quad y \leftarrow y + h \sum_i b_i k_i, \quad
       \max \frac{\lvert h \sum_i e_i k_i \rvert}{\text{atol} + \text{rtol} \lvert y \rvert} \le 1 $$

    Steps end at the times `t`. Derivatives of every order, by reverse and forward mode and `torch.func`, with respect
    to y0, t, `args` and tensors that f closes over, are computed in one of three ways:

    - `memory="steps"` differentiates the accepted steps. Each step keeps its share of the interval between two times
      as a constant, so the result is the exact derivative of the computed solution on this mesh. Sizes of steps as
      functions of the state would add noise of the size of the tolerance, with large derivatives. The tolerance limits
      the error of the solution, and at a state of rest, where that error is 0, that of a solution which begins nearby.
      Where only a part of the state rests, bound the steps by more times in `t`, or use "adjoint".
    - `memory="checkpoints"` is the same derivative. It stores the states after each $\sqrt n$ of n steps, and runs the
      steps between them again.
    - `memory="adjoint"` stores only the returned states. A gradient with the cotangents $\bar y_k$ of these states
      solves the adjoint equation backwards, together with y itself, by the same method and tolerances:

    $$ \dot a = -(\partial_y f)^\top a, \quad a(t_k) \leftarrow a(t_k) + \bar y_k, \quad
       \bar\theta = \int (\partial_\theta f)^\top a \,\mathrm dt, \quad \bar y_0 = a(t_0), \quad
       \bar t_k = \bar y_k \cdot f(t_k, y_k), \quad \bar t_0 = -a(t_0) \cdot f(t_0, y_0) $$

    (in the last term, a without the jump at t₀). A forward derivative solves $\dot v = \partial_y f \, v +
    \partial_\theta f \, \dot\theta$. Both equations have these derivatives in turn. They equal the derivatives of the
    equation up to the tolerance, in which atol is relative to the largest cotangent or tangent.

    Args:
        f: Function `f(t, y, *args)` that returns the derivative of y in the structure and shapes of y; `t` is a tensor
            of shape `()`. Its random draws are the same in each call.
        y0: The state at `t[0]`: a tensor, or a pytree of floating-point or complex tensors. Several initial values, in
            a dimension of y0 or by `torch.func.vmap`, share their steps; the largest error counts.
        t: Times at which the state is wanted, (T,), increasing, or decreasing to integrate backwards.
        *args: Further arguments of `f`, pytrees.
        method: "dopri5" (Dormand-Prince 5(4)), "dop853" (of order 8, for small tolerances) or "bosh3"
            (Bogacki-Shampine 3(2)).
        rtol: Error of a step relative to each element of the state.
        atol: Absolute error of a step.
        step_size: Largest size of steps, which are equal between two times; ignores the tolerances. Not with "adjoint".
        max_steps: Maximum number of steps, including rejected steps.
        memory: "steps", "checkpoints" or "adjoint". The last two find and replace the tensors that f closes over as
            `hodiff.functions.checkpoint` does, with the same restrictions, and raise for those that cannot be found.
        correct: As in `hodiff.hvp`.

    Returns:
        The states at `t` in the structure of y0, each leaf with a leading dimension T.

    Raises:
        InputError: If `t` is not increasing or decreasing, an option is unknown, y0 cannot be differentiated or is not
            finite, the output of `f` does not match y0, or `f` depends on a tensor that cannot be found.
        ConvergenceError: If steps become too short, as at a singularity, or too many; its `result` has the states
            reached so far. In backward, if the solution of "adjoint" backwards is not the one forwards.

    Example:
        >>> import torch, hodiff
        >>> t, y0 = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
        >>> end = lambda rate: hodiff.odeint(lambda t, y: rate * y, y0, t, memory="adjoint")[-1]  # y0 exp(rate)
        >>> rate = torch.tensor(1.0, dtype=torch.float64)
        >>> torch.func.grad(torch.func.grad(end))(rate).round(decimals=5)
        tensor(1.3591, dtype=torch.float64)

    Source: E. Hairer, S. P. Nørsett & G. Wanner, *Solving Ordinary Differential Equations I*, 2nd ed., sections II.4
    and II.5; the adjoint with respect to all arguments: R. T. Q. Chen et al., "Neural ordinary differential equations",
    NeurIPS 2018, appendix B.
    """
    require_callable(_CALLER, f=f)
    require_choice(_CALLER, "method", method, tuple(METHODS))
    require_number(_CALLER, "rtol", rtol, positive=True, finite=True)
    require_number(_CALLER, "atol", atol, positive=True, finite=True)
    require_number(_CALLER, "step_size", step_size, positive=True, finite=True, optional=True)
    require_int(_CALLER, "max_steps", max_steps, 1)
    require_choice(_CALLER, "memory", memory, _MEMORIES)
    require_bools(_CALLER, correct=correct)
    if memory == "adjoint" and step_size is not None:
        raise InputError(
            f"{_CALLER}: step_size: expected None with memory='adjoint', whose equations need steps of their own, got "
            f"{step_size}; pass tolerances, or memory='checkpoints'."
        )
    y0, args = pytree.tree_map_only(Tensor, recordable, (y0, args))
    leaves, spec = flatten_primals(y0, _CALLER, "y0", complex_too=True)
    require_ordinary(_CALLER, y0=y0, args=args)
    leaves = tuple(leaf.clone() for leaf in leaves)  # a function that changes its argument leaves y0 alone
    times, _ = require_times(_CALLER, t, leaves)
    field = Corrections()(f) if correct else f
    problem = Problem(
        rates=partial(_rates, field, spec, RandomState(leaves)),
        method=method,
        rtol=rtol,
        atol=atol,
        step_size=step_size,
        max_steps=max_steps,
        scales=(1.0,) * len(leaves),
        finish=lambda states: unflatten(stack(states), spec),
    )
    if memory == "adjoint":
        found: Sequence[Tensor] = _by_adjoint(problem, field, times, unflatten(list(leaves), spec), args)
    else:
        run = integrate(problem, times, leaves, args, record=memory == "steps")
        found = stack(run.states) if memory == "steps" else by_checkpoints(problem, run, times, leaves, args)
    return unflatten(list(found), spec)


def _rates(f: Callable[..., Any], spec: Any, state: RandomState, t: Tensor, y: State, args: tuple[Any, ...]) -> State:
    """Slope of each leaf; random numbers are the same in each call."""
    state.rewind()
    return _slopes(lambda: f(t, unflatten(list(y), spec), *args), spec, y)


def _slopes(call: Callable[[], PyTree], spec: Any, y: State) -> State:
    """Call f, which may change no tensor that the steps need later: neither the state nor an earlier result."""
    before = _versions(y)
    found, found_spec = flatten(call())
    require_like_state(_CALLER, spec, y, found, found_spec)
    if _versions(y) != before:
        raise InputError(f"{_CALLER}: f: expected a function that does not change y in place; copy it, y = y.clone().")
    # A function may return one buffer in every call, and nothing has a graph in that case.
    return [x if x.requires_grad or is_wrapped(x) else x.clone() for x in found]


def _versions(tensors: State) -> list[int]:
    return [version_of(x) for x in tensors if not x.is_inference()]


def _by_adjoint(
    problem: Problem, f: Callable[..., Any], times: Tensor, y0: PyTree, args: tuple[Any, ...]
) -> Sequence[Tensor]:
    """Solve with all tensors that f depends on as operands."""
    require_no_training(_CALLER, partial(modules_in, f, *args))
    # Other threads may replace closed-over tensors.
    with one_thread_at_a_time():
        program = CallProgram(_CALLER, f, (times[0], y0, *args), {})
        operands = program.take_inputs()
    spec = pytree.tree_structure(y0)

    def rates(t: Tensor, y: State, params: Sequence[Tensor]) -> State:
        return _slopes(lambda: program.structured(program.run(t, *y, *params)), spec, y)

    # The first run raises for other tensors that f depends on, outside of all transforms.
    Checkpoint.call(program, *operands)
    found = solution(replace(problem, rates=rates, held=program.held), [times, *operands[1:]])
    if program.leaves_tensors and program.leaves_what_is_differentiated(operands):
        raise InputError(
            f"{_CALLER}: f: expected f to return all tensors that are differentiated, got a tensor that it stores in "
            "an attribute, a list or a variable; store it detached, or pass memory='steps'."
        )
    return found
