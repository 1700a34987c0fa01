"""Implicit function theorem as a rule: derivatives of solutions of equations, including linear ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.custom_function import RuleCall
from hodiff.authoring.custom_rule import CustomRule
from hodiff.authoring.rule_checks import require_linear
from hodiff.authoring.rule_trees import TreeLayout, differentiable, flatten
from hodiff.common.trees import PyTree
from hodiff.derivatives.products_by_route import pull
from hodiff.implicit.linear_maps import Pair
from hodiff.implicit.linear_systems import LinearJob, LinearOptions
from hodiff.implicit.solver_call import Tensors, call_solver


@dataclass(frozen=True)
class Equation:
    """Equation `residual(x, *params) = 0` with as many unknowns as equations."""

    residual: Callable[..., PyTree]
    jacobian: Pair
    # Maps x and params to the parameters of the Jacobian's maps.
    parameters: Callable[[PyTree, tuple[Any, ...]], tuple[Any, ...]]
    options: LinearOptions


class Implicit(CustomRule):
    """Known solution as a function of the parameters; derivatives never run the solver again."""

    def __init__(self) -> None:
        super().__init__(_known, 0, "implicit", "rule")
        self.ready = True

    def _call(self, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool) -> RuleCall:
        return ImplicitCall(self.signature, static, layout, transformed)

    def _check(self, call: Any, leaves: list[Tensor], seed: int) -> None:
        call.forward(leaves)
        require_linear("implicit: pushforward", lambda tangents: call.pushforward(leaves, tangents), leaves, seed)


def _known(equation: Equation, x: PyTree, params: tuple[Any, ...]) -> PyTree:
    del equation, params
    return x


attach = Implicit()


class ImplicitCall(RuleCall):
    """Implicit function theorem at one solution, for tangents and cotangents, with one linear solve each.

    The rules attach the solution to the parameters again, so that higher derivatives are correct.
    """

    __slots__ = ()
    # Other parameters have another solution, which is among the arguments.
    holds_anywhere = False

    def forward(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Return the solution."""
        return tuple(self.take_output(_known(*self.all_arguments(leaves))))

    def pushforward(self, leaves: Tensors, tangents: Sequence[Any]) -> list[Tensor | None]:
        r"""Compute $\dot x = -J^{-1} \, \partial_p r \, \dot p$; the tangent of the solver's result is ignored."""
        equation, x, params, at = self._at_solution(leaves)
        moving = [i for i in range(len(self.like), len(leaves)) if tangents[i] is not None]
        if not moving:
            return [None] * len(self.like)

        def pulled(u: PyTree) -> Any:
            return self._pullback(at, leaves, moving, u)

        # Reverse mode twice is the route that is correct most often in torch.
        _, transposed, _ = pull(lambda u: (pulled(u), ()), pytree.tree_map(torch.zeros_like, x))
        (change,) = transposed(tuple(tangents[i] for i in moving))
        rhs = pytree.tree_map(torch.neg, change)
        return pytree.tree_leaves(solve(equation.jacobian, equation.options, rhs, *equation.parameters(x, params)))

    def pullback(
        self, leaves: Tensors, kept: Sequence[Any] | None, needed: Sequence[bool], cotangents: Sequence[Any]
    ) -> list[Tensor | None]:
        r"""Compute $\bar p = -\partial_p r^\top J^{-\top} \bar x$."""
        del kept
        equation, x, params, at = self._at_solution(leaves)
        found: list[Tensor | None] = [None] * len(leaves)
        moving = [i for i in range(len(self.like), len(leaves)) if needed[i] and differentiable(leaves[i])]
        if not moving:
            return found
        rhs = self.give_output([
            torch.zeros_like(leaf) if each is None else each for each, leaf in zip(cotangents, leaves, strict=False)
        ])
        adjoint = solve(equation.jacobian.T, equation.options, rhs, *equation.parameters(x, params))
        return _replaced(found, moving, self._pullback(at, leaves, moving, pytree.tree_map(torch.neg, adjoint)))

    def _at_solution(self, leaves: Tensors) -> tuple[Equation, PyTree, tuple[Any, ...], Callable[..., PyTree]]:
        layout = self.layout
        assert layout is not None  # params is a tuple
        (equation,) = self.static
        x, params = layout.fill(leaves)
        solution = attach(equation, x, params)
        return equation, solution, params, lambda leaves: equation.residual(solution, *layout.fill(leaves)[1])

    @staticmethod
    def _pullback(at: Callable[..., PyTree], leaves: Tensors, moving: Sequence[int], cotangent: PyTree) -> Any:
        some = [leaves[i] for i in moving]
        _, pullback, _ = pull(lambda *some: (at(_replaced(leaves, moving, some)), ()), *some)
        return pullback(cotangent)


def solve(pair: Pair, options: LinearOptions, rhs: PyTree, *params: Any) -> PyTree:
    """Solve a linear system, differentiably in its right-hand side and parameters.

    Args:
        pair: The map and its transpose.
        options: Options of the linear solver.
        rhs: Right-hand side.
        *params: Parameters of the map.

    Returns:
        Solution, of the structure of `rhs`.
    """
    sides, rhs_layout = flatten(rhs)
    others, layout = flatten(params)
    job = LinearJob(pair, options, rhs_layout, layout, len(sides), 0)
    x = rhs_layout.fill(call_solver(job, [*sides, *others]))

    def residual(x: PyTree, rhs: PyTree, *params: Any) -> PyTree:
        return pytree.tree_map(torch.sub, pair.forward.apply(x, *params), rhs)

    return attach(Equation(residual, pair, lambda _, params: params[1:], options), x, (rhs, *params))


def _replaced(values: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    result = list(values)
    for i, each in zip(positions, others, strict=True):
        result[i] = each
    return result
