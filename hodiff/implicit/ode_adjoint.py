"""Derivatives of solutions of differential equations by further differential equations, to every order.

Source: L. S. Pontryagin et al., *The Mathematical Theory of Optimal Processes*, 1962; R. T. Q. Chen et al., "Neural
ordinary differential equations", NeurIPS 2018, appendix B (gradients of all arguments).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hodiff.authoring.custom_function import RuleCall, apply
from hodiff.authoring.rule_trees import differentiable
from hodiff.authoring.signatures import Signature
from hodiff.derivatives.products_by_route import pull, push
from hodiff.errors import ConvergenceError
from hodiff.implicit.runge_kutta import Problem, State, integrate, stack
from hodiff.implicit.solver_call import Job, Tensors, call_solver
from hodiff.recompute.recording import Recording
from hodiff.rules.any_order import uncompiled
from hodiff.torch_internals.autograd.differentiation import are_differentiated, autograd_records
from hodiff.torch_internals.autograd.grad_mode import in_dual_level, in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

# Largest distance of a state from itself after integration forth and back, in tolerances of one step.
_RETRACED = 1e3


@dataclass(frozen=True)
class _Solve:
    """Run of a solver: times, leaves of the state, parameters -> states at all times."""

    problem: Problem
    caller = "odeint"

    def run(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Solve on plain tensors."""
        count = len(self.problem.scales)
        times, y, params = leaves[0], leaves[1 : 1 + count], leaves[1 + count :]
        run = integrate(self.problem, times, y, params, record=False, steps_are_differentiated=False)
        return tuple(stack(run.states))

    def batched(self, in_dims: Sequence[int | None], size: int, leaves: Tensors) -> tuple[Job, Tensors]:
        """Solve for the whole batch, which shares its steps."""
        del size
        return _Batch(self, tuple(in_dims)), leaves


@dataclass(frozen=True)
class _Batch:
    """Run of a solver for a batch."""

    inner: Job
    in_dims: tuple[int | None, ...]
    caller = "odeint"

    def run(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Solve with the batch in front of the states."""
        found: tuple[Tensor, ...] = torch.func.vmap(
            lambda *leaves: self.inner.run(leaves), in_dims=self.in_dims, randomness="same"
        )(*leaves)
        return found

    def batched(self, in_dims: Sequence[int | None], size: int, leaves: Tensors) -> tuple[Job, Tensors]:
        """Solve for a batch of batches."""
        del size
        return _Batch(self, tuple(in_dims)), leaves


def solution(problem: Problem, operands: Tensors) -> tuple[Tensor, ...]:
    """Solve an equation, differentiably in its operands.

    Args:
        problem: The equation, whose rates depend on nothing but their arguments.
        operands: Times, leaves of the first state, and parameters.

    Returns:
        The states at all times, leaf by leaf.
    """
    known = call_solver(_Solve(problem), operands)
    return _attached(problem, known, operands) if are_differentiated(operands) else known


def _attached(problem: Problem, known: Tensors, operands: Tensors) -> tuple[Tensor, ...]:
    """Make a known solution a differentiable function of its operands."""
    return apply(AdjointCall(problem), [*(each.detach() for each in known), *operands])


def odeint(*operands: Tensor) -> Any:
    """Stand for the rule in messages."""


_SIGNATURE = Signature(odeint, (), "odeint")


class AdjointCall(RuleCall):
    r"""The rules of a solution; each solves one more equation, which has these rules itself.

    $$ \dot v = \partial_y f\, v + \partial_\theta f\, \dot\theta, \qquad
       -\dot a = (\partial_y f)^\top a, \quad \bar\theta = \int (\partial_\theta f)^\top a \,\mathrm dt $$

    The adjoint a jumps by the cotangent of each returned state.
    """

    __slots__ = ("problem",)
    # Other operands have another solution, which is among the arguments.
    holds_anywhere = False

    def __init__(self, problem: Problem):
        super().__init__(_SIGNATURE, (), None, in_transform())
        self.problem = problem

    def forward(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Return the known solution."""
        return tuple(self.take_output(list(leaves[: len(self.problem.scales)])))

    def _at_solution(self, leaves: Tensors) -> tuple[Tensors, Tensor, Tensors, Tensors]:
        """Solution, as a function of the operands; times, first state and parameters."""
        count = len(self.problem.scales)
        operands = leaves[count:]
        solved = _attached(self.problem, leaves[:count], operands)
        return solved, operands[0], operands[1 : 1 + count], operands[1 + count :]

    @uncompiled
    def pushforward(self, leaves: Tensors, tangents: Sequence[Any]) -> list[Tensor | None]:
        """Solve the linearized equation along the solution."""
        problem, count = self.problem, len(self.problem.scales)
        solved, times, y0, params = self._at_solution(leaves)
        times_moving, *rest = tangents[count:]
        moving = [i for i, each in enumerate(rest[count:]) if each is not None]
        v0 = [torch.zeros_like(x) if v is None else v for v, x in zip(rest, y0, strict=False)]
        start = v0
        if times_moving is not None:
            slope = problem.rates(times[0], y0, params)
            start = [v - times_moving[0] * k for v, k in zip(v0, slope, strict=True)]
        directions = [rest[count + i] for i in moving]
        scale = _scale([*start, *directions])

        def rates(t: Any, state: State, given: Tensors) -> State:
            def at(*changing: Tensor) -> tuple[Any, Any]:
                filled = _replaced(given[: len(params)], moving, changing[count:])
                return tuple(problem.rates(t, changing[:count], filled)), ()

            primals = (*state[:count], *(given[i] for i in moving))
            return _value_and_tangents(at, primals, (*state[count:], *given[len(params) :]))

        scales = (*problem.scales, *(scale * each for each in problem.scales))
        linearized = replace(problem, rates=rates, scales=scales, passive=0, finish=_nothing)
        found = solution(linearized, [times, *y0, *start, *params, *directions])[count:]
        if times_moving is None:
            return list(found)
        ends = self._end_slopes(solved, times, params)
        columns = [
            [v, *(x + times_moving[k + 1] * end[i] for k, (x, end) in enumerate(zip(column[1:], ends, strict=True)))]
            for i, (v, column) in enumerate(zip(v0, found, strict=True))
        ]
        return [torch.stack(column) for column in columns]

    @uncompiled
    def pullback(
        self, leaves: Tensors, kept: Sequence[Any] | None, needed: Sequence[bool], cotangents: Sequence[Any]
    ) -> list[Tensor | None]:
        """Solve the adjoint equation backwards, from each returned state to the one before."""
        del kept
        count = len(self.problem.scales)
        results: list[Tensor | None] = [None] * len(leaves)
        wanted = needed[count:]
        if not any(wanted):
            return results
        solved, times, _, params = self._at_solution(leaves)
        seeds = [torch.zeros_like(x) if c is None else c for c, x in zip(cotangents, solved, strict=True)]
        moving = [i for i, each in enumerate(params) if wanted[1 + count + i] and differentiable(each)]
        adjoint = self._adjoint(moving, _scale(seeds))
        a: State = [each[-1] for each in seeds]
        gradients: State = [torch.zeros_like(params[i]) for i in moving]
        for k in range(len(times) - 1, 0, -1):
            y = [each[k] for each in solved]
            operands = [torch.stack([times[k], times[k - 1]]), *y, *a, *gradients, *params]
            found = [each[1] for each in solution(adjoint, operands)]
            self._require_retraced(times, k, found[:count], [each[k - 1] for each in solved], y)
            a = [x + seed[k - 1] for x, seed in zip(found[count : 2 * count], seeds, strict=True)]
            gradients = found[2 * count :]
        if wanted[0]:
            results[count] = self._gradient_by_times(solved, times, params, seeds, a)
        for i, each in enumerate(a):
            results[count + 1 + i] = each
        for i, each in zip(moving, gradients, strict=True):
            results[2 * count + 1 + i] = each
        return results

    def _adjoint(self, moving: Sequence[int], scale: float) -> Problem:
        """Equation of state, adjoint and gradients with respect to some parameters."""
        problem, count = self.problem, len(self.problem.scales)

        def rates(t: Any, state: State, params: Tensors) -> State:
            def at(*changing: Tensor) -> tuple[Tensor, ...]:
                filled = _replaced(params, moving, changing[count:])
                return tuple(problem.rates(t, changing[:count], filled))

            primals = [*state[:count], *(params[i] for i in moving)]
            value, gradients = _value_and_gradients(at, primals, state[count : 2 * count], params)
            return [*value, *(-each for each in gradients)]

        # Gradients are linear in the cotangents, so their tolerance must be, too.
        scales = (*problem.scales, *(scale / each for each in problem.scales), *(scale for _ in moving))
        return replace(problem, rates=rates, scales=scales, passive=len(moving), finish=_nothing, is_adjoint=True)

    def _end_slopes(self, solved: Tensors, times: Tensor, params: Tensors) -> list[State]:
        """Slopes at all times but the first."""
        return [self.problem.rates(times[k], [each[k] for each in solved], params) for k in range(1, len(times))]

    def _gradient_by_times(self, solved: Tensors, times: Tensor, params: Tensors, seeds: Tensors, a: State) -> Tensor:
        """Each state moves along its slope with its time; the first time moves the solution the other way."""
        first = self.problem.rates(times[0], [each[0] for each in solved], params)
        before = -_inner([x - seed[0] for x, seed in zip(a, seeds, strict=True)], first)
        ends = enumerate(self._end_slopes(solved, times, params), start=1)
        return torch.stack([before, *(_inner([seed[k] for seed in seeds], end) for k, end in ends)]).to(times.dtype)

    def _require_retraced(self, times: Tensor, k: int, found: State, expected: State, start: State) -> None:
        """Raise if the solution backwards has left the one forwards, where the adjoint would be wrong."""
        problem = self.problem
        apart = problem.size([x.detach() - y.detach() for x, y in zip(found, expected, strict=True)], expected, start)
        if not apart <= _RETRACED:
            places = numbers_in(times)
            raise ConvergenceError(
                f"odeint: the solution from t = {places[k]:g} back to {places[k - 1]:g} misses the state there "
                f"by {apart:.1e} tolerances, so the derivative would be wrong: the equation forgets its past or is "
                "chaotic; pass more times in t, or memory='checkpoints'."
            )


def _value_and_tangents(f: Callable[..., tuple[Any, Any]], primals: Tensors, tangents: Tensors) -> list[Tensor]:
    if not in_dual_level():
        value, tangent, _ = push(f, tuple(primals), tuple(tangents))
    else:  # torch.func.jvp refuses to run, so transpose the pullback
        value, pullback, _ = pull(f, *primals)
        (tangent,) = pull(lambda u: (pullback(u), ()), tuple(map(torch.zeros_like, value)))[1](tuple(tangents))
    return [*value, *tangent]


def _value_and_gradients(
    f: Callable[..., tuple[Tensor, ...]], primals: Tensors, cotangents: State, others: Tensors
) -> tuple[Tensors, Tensors]:
    if in_transform() or in_forward_mode() or not autograd_records():
        value, pullback, _ = pull(lambda *primals: (f(*primals), ()), *primals)
        return value, pullback(tuple(cotangents))
    recording = Recording(lambda operands: f(*operands), primals, (*cotangents, *others))
    value = recording.result
    found = recording.gradients(value, cotangents)
    value = value if recording.connected else tuple(each.detach() for each in value)
    return value, [torch.zeros_like(x) if g is None else g for x, g in zip(primals, found, strict=True)]


def _scale(tensors: Sequence[Tensor]) -> float:
    """Largest absolute value, as a number; 1 if all are 0."""
    sizes = [float(numbers_in(each.detach().abs().amax()).max()) for each in tensors if each.numel()]
    largest = max(sizes, default=0.0)
    return largest if largest > 0 and math.isfinite(largest) else 1.0


def _inner(a: State, b: State) -> Tensor:
    """Real part of the inner product."""
    parts = [(x.conj() * y).real.sum() if x.is_complex() else (x * y).sum() for x, y in zip(a, b, strict=True)]
    return torch.stack(parts).sum()


def _nothing(states: Sequence[State]) -> None:
    del states


def _replaced(values: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    result = list(values)
    for i, each in zip(positions, others, strict=True):
        result[i] = each
    return result
