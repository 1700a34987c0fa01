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
from hodiff.distributed.layouts import require_ordinary
from hodiff.errors import InputError
from hodiff.implicit.ode_adjoint import solution
from hodiff.implicit.runge_kutta import METHODS, Problem, State, by_checkpoints, integrate, stack
from hodiff.recompute.checkpoint import CallProgram
from hodiff.recompute.programs import Checkpoint
from hodiff.rules.any_order import outside_graphs
from hodiff.taylor.ode.field import require_like_state, require_times

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
    r"""Solve y' = f(t, y)."""
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
        found: Sequence[Tensor] = _by_adjoint(problem, field, times, y0, args)
    else:
        run = integrate(problem, times, leaves, args, record=memory == "steps")
        found = stack(run.states) if memory == "steps" else by_checkpoints(problem, run, times, leaves, args)
    return unflatten(list(found), spec)


def _rates(f: Callable[..., Any], spec: Any, state: RandomState, t: Tensor, y: State, args: tuple[Any, ...]) -> State:
    """Slope of each leaf; random numbers are the same in each call."""
    state.rewind()
    return _slopes(f(t, unflatten(list(y), spec), *args), spec, y)


def _slopes(result: PyTree, spec: Any, y: State) -> State:
    found, found_spec = flatten(result)
    require_like_state(_CALLER, spec, y, found, found_spec)
    return found


def _by_adjoint(
    problem: Problem, f: Callable[..., Any], times: Tensor, y0: PyTree, args: tuple[Any, ...]
) -> Sequence[Tensor]:
    """Solve with all tensors that f depends on as operands."""
    program = CallProgram(_CALLER, f, (times[0], y0, *args), {})
    operands = program.take_inputs()
    spec = pytree.tree_structure(y0)

    def rates(t: Tensor, y: State, params: Sequence[Tensor]) -> State:
        return _slopes(program.structured(program.run(t, *y, *params)), spec, y)

    # The first run raises for other tensors that f depends on, outside of all transforms.
    Checkpoint.call(program, *operands)
    found = solution(replace(problem, rates=rates, held=program.held), [times, *operands[1:]])
    if program.leaves_tensors and program.leaves_what_is_differentiated(operands):
        raise InputError(
            f"{_CALLER}: f: expected f to return all tensors that are differentiated, got a tensor that it stores in "
            "an attribute, a list or a variable; store it detached, or pass memory='steps'."
        )
    return found
