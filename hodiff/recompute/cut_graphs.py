"""Detection of custom Functions whose backward loses the graph of the gradient, while a gradient is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hodiff.errors import RouteError
from hodiff.graphs import lead_to, nodes_from
from hodiff.recompute.slope_differences import is_linear, loses_recorded
from hodiff.recompute.slopes import (
    SCHEDULE,
    form_of,
    has_derivatives,
    keeps_numbers,
    kept_tensors,
    materialized,
)
from hodiff.torch_internals.autograd.grad_mode import set_tangents
from hodiff.torch_internals.autograd.graph_nodes import backward_rules, described_backward, function_name, function_of
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_internals.wording import Wording, says

_HIGHER_ORDER = "call it within hodiff.doors.gpytorch.higher_order()"
_NATURAL = (
    "it returns natural gradients, which are derivatives of no function; use "
    "gpytorch.variational.CholeskyVariationalDistribution with VariationalStrategy"
)
# Replacements for Functions of other libraries that have no second derivatives, by name, or package and name.
_INSTEAD = {
    **{f"linear_operator.{name}": _HIGHER_ORDER for name in ("Matmul", "Solve", "InvQuad", "InvQuadLogdet")},
    **{f"gpytorch.{name}": _HIGHER_ORDER for name in ("RBFCovariance", "MaternCovariance", "LogNormalCDF")},
    **{f"gpytorch.{name}": _HIGHER_ORDER for name in ("ComputePredictiveUpdates", "QuadFormDiagonal")},
    **{f"gpytorch.{name}": _NATURAL for name in ("_NaturalToMuVarSqrt", "_TrilNaturalToMuVarSqrt", "_NgdInterpTerms")},
    "OdeintAdjointMethod": "call torchdiffeq.odeint instead of odeint_adjoint, or hodiff.odeint with memory='adjoint'",
    "ImplicitFnGradientRerouting": "torchdiffeq.odeint_event has first derivatives only: find the time of the event by "
    "hodiff.implicit.root, as a root of a function of the end of hodiff.odeint",
    "BacksolveFunction": "use torchode.AutoDiffAdjoint instead of BacksolveAdjoint, with "
    "backprop_through_step_size_control=False",
    "CheckpointFunction": "call hodiff.functions.checkpoint",
    # A Function within compiled code, as torch.compile rewrites it.
    "ApplyTemplate": "torch.compile has first derivatives only of a Function that it compiled: compile the product "
    "(torch.compile of a call of hodiff.hvp), or call the function without torch.compile",
}
# Functions whose backward takes solutions for constants. Their conjugate gradients do not converge at the points of a
# comparison, which would therefore miss it.
_SOLVERS = {f"linear_operator.functions.{name}" for name in ("_solve", "_inv_quad", "_inv_quad_logdet")}
# Functions whose backward is never recorded. It may return zeros, which look right: for the parameters that
# torch.func.functional_call replaces, as the module has its own again when backward calls it.
_UNRECORDED = {"torchdiffeq": "OdeintAdjointMethod", "torchode": "BacksolveFunction"}
_REMEDY = (
    "write it with torch operators or other Functions of ctx.saved_tensors, or use hodiff.custom_vjp; for a solver, "
    "use hodiff.implicit; for a recomputation, hodiff.functions.checkpoint; if you need no second derivative, mark it "
    "once_differentiable"
)


class UnrecordedGradientError(RouteError, NotImplementedError):
    """The backward of a Function computes outside of the graph, so further derivatives would be zero."""


class Suspect(NamedTuple):
    """A node of a Function whose backward may treat values that depend on the point as constants.

    Attributes:
        position: Index of the node among all watched nodes.
        node: The node.
        cotangents: The cotangents of its backward.
        linear: Whether the Function is linear according to its graph.
        constants: Whether it keeps tensors without a graph.
    """

    position: int
    node: Any
    cotangents: tuple[Any, ...]
    linear: bool
    constants: bool

    @property
    def parents(self) -> list[Any]:
        """The nodes that receive its gradients."""
        return [parent for parent, _ in self.node.next_functions]


@contextmanager
def refusing_cuts(nodes: Sequence[Any], operands: Sequence[Tensor], *, curved: bool = True) -> Iterator[list[Suspect]]:
    """Raise if a watched Function, run inside the context with recorded cotangents, loses them.

    A gradient is linear in its cotangent. If the cotangent requires a gradient, and backward returns a nonzero gradient
    that does not, the graph is cut, whatever the function is.

    Args:
        nodes: The nodes of a graph that belong to Functions.
        operands: The tensors to differentiate with respect to; other gradients are ignored.
        curved: Whether the gradient is differentiated with respect to the operands, not only its cotangents.

    Yields:
        A list that holds, after the context, the Functions that may have lost a part of their gradient's graph.

    Raises:
        UnrecordedGradientError: If a backward loses its cotangent, loses the dependence on tensors that it keeps, or
            is not linear.
        RuntimeError: Other errors of torch.
    """
    cut: list[tuple[Any, list[Any]]] = []
    zeros: list[tuple[Any, list[Any]]] = []
    suspects: list[Suspect] = []
    forward = lru_cache(lambda: set(nodes_from(nodes)))
    note = partial(_note, lost=cut, zeros=zeros, suspects=suspects, forward=forward)
    handles = [node.register_hook(partial(note, i, node)) for i, node in enumerate(nodes)]
    try:
        yield suspects
    except RuntimeError as error:
        # NumPy can convert only constants, so the rule that raised leaves the graph.
        guilty = _running(nodes, error) if says(error, Wording.NO_NUMBERS) else None
        if guilty is None:
            raise
        raise UnrecordedGradientError(_told(guilty)) from error
    finally:
        for handle in handles:
            handle.remove()
    solvers = [node for node in nodes if curved and getattr(function_of(node), "__module__", "") in _SOLVERS]
    adjoints = [node for node in nodes if _is_unrecorded(function_of(node))]
    if not (cut or zeros or suspects or solvers or adjoints):
        return
    leading = _leading(nodes, operands)
    cut += [(node, [parent for parent, _ in node.next_functions]) for node in adjoints]
    for node in solvers:
        # A solution has all derivatives by its right-hand side, the first argument, if that is the only one.
        parents = node.next_functions[getattr(node, "has_left", True) is False :]
        if not leading.isdisjoint(parent for parent, _ in parents):
            raise UnrecordedGradientError(lost_slope_of(node, linear=False))
    for node, parents in cut:
        if not leading.isdisjoint(parents):
            raise UnrecordedGradientError(_told(node))
    for node, sources in zeros:
        # The graph above a cotangent was recorded by this gradient.
        if lead_to(sources, operands):
            raise UnrecordedGradientError(_of_zeros(described_backward(node)))
    # All nodes of a Function are due together; with separate counts a call in a loop might never be checked.
    for_what = "graph" if curved else "cotangents"
    keys = {each.position: (function_of(each.node), (for_what, *form_of(each.node))) for each in suspects}
    due = {key: SCHEDULE.is_due(*key) for key in set(keys.values())}

    def of_point(tensor: Tensor) -> bool:
        return tensor.requires_grad and get_gradient_edge(tensor).node in leading

    for each in suspects:
        # With kept constants, a gradient at other arguments belongs to no point.
        function, key = keys[each.position]
        if not due[function, key]:
            continue
        linear = is_linear(function, each.node, each.cotangents)
        asked = curved and (each.linear or not each.constants)
        lost = asked and loses_recorded(function, each.node, each.cotangents, of_point)
        if (lost or not linear) and not leading.isdisjoint(each.parents):
            # The Functions after this one have not been checked.
            for met in due:
                SCHEDULE.begin_again(*met)
            reason = (
                lost_slope_of(each.node, linear=each.linear) if linear else _nonlinear(described_backward(each.node))
            )
            raise UnrecordedGradientError(reason)
    # With several outputs, one may be the gradient itself, and backward may ignore its cotangent.
    suspects[:] = [
        each
        for each in suspects
        if (each.linear or each.constants or len(each.cotangents) > 1 or _keeps_others(each.node, of_point))
        and not leading.isdisjoint(each.parents)
    ]


def _is_unrecorded(function: Any) -> bool:
    package = _package_of(function)
    return package in _UNRECORDED and function.__name__ == _UNRECORDED[package]


def _keeps_others(node: Any, of_point: Callable[[Tensor], bool]) -> bool:
    """Whether a Function keeps tensors that require a gradient and do not depend on the point."""
    return any(each.requires_grad and not of_point(each) for each in kept_tensors(node).values())


def _note(
    position: int,
    node: Any,
    gradients: Sequence[Any],
    cotangents: Sequence[Any],
    *,
    lost: list[tuple[Any, list[Any]]],
    zeros: list[tuple[Any, list[Any]]],
    suspects: list[Suspect],
    forward: Callable[[], set[Any]],
) -> None:
    if not any(each is not None and each.requires_grad for each in cotangents):
        return
    unrecorded = [i for i, each in enumerate(gradients) if each is not None and not each.requires_grad]
    recorded = [each for each in gradients if each is not None and each.requires_grad]
    cut = [i for i in unrecorded if _is_nonzero(gradients[i])]
    # Zeros may result from a zero cotangent; and a gradient next to recorded ones may be a constant that the Function
    # adds, such as for auxiliary losses.
    if unrecorded and (recorded or not cut):
        cut = unrecorded if _is_cut_at_ones(node, cotangents, varies=bool(recorded)) else []
        if not cut and not recorded and any(map(_is_nonzero, _gradients_at(node, cotangents, 1.0))):
            sources = [get_gradient_edge(each).node for each in cotangents if each is not None and each.requires_grad]
            zeros.append((node, sources))
    if cut:
        lost.append((node, [node.next_functions[i][0] for i in cut]))
    elif getattr(getattr(node, "call", None), "holds_anywhere", True):  # set by hodiff.custom_vjp and others
        linear = _seems_linear(node, recorded, cotangents, forward)
        suspects.append(Suspect(position, node, tuple(cotangents), linear, keeps_numbers(node)))


def _seems_linear(
    node: Any, gradients: Sequence[Tensor], cotangents: Sequence[Any], forward: Callable[[], set[Any]]
) -> bool:
    """Whether gradients depend only on cotangents, while backward has numbers that may vary with the point."""
    # An argument without a gradient may be a factor that the caller has detached.
    if any(parent is None for parent, _ in node.next_functions):
        return False
    seen = {get_gradient_edge(each).node for each in cotangents if each is not None and each.requires_grad}
    stack = [each.grad_fn for each in gradients]
    while stack:
        found = stack.pop()
        if found is None or found in seen:
            continue
        if hasattr(found, "variable") or found in forward():
            return False
        seen.add(found)
        stack.extend(parent for parent, _ in found.next_functions)
    return _keeps_numbers(node)


def _keeps_numbers(node: Any) -> bool:
    # Functions in C++ do not show what they keep.
    return function_of(node) is None or keeps_numbers(node) or any(map(has_derivatives, kept_tensors(node).values()))


def _is_cut_at_ones(node: Any, cotangents: Sequence[Any], *, varies: bool) -> bool:
    """Whether the backward of a node loses a cotangent of ones, and with `varies` depends on it."""
    at_ones = [each for each in _gradients_at(node, cotangents, 1.0) if not each.requires_grad]
    if varies:
        at_twos = [each for each in _gradients_at(node, cotangents, 2.0) if not each.requires_grad]
        return any(_is_nonzero(b - a) for a, b in zip(at_ones, at_twos, strict=True))
    return any(map(_is_nonzero, at_ones))


def _gradients_at(node: Any, cotangents: Sequence[Any], scale: float) -> list[Tensor]:
    """Run the backward of a node with constant cotangents that require a gradient."""
    with torch.enable_grad():
        full = [None if each is None else torch.full_like(each, scale, requires_grad=True) for each in cotangents]
        found = getattr(node, "apply", node)(*materialized(node, full))
    return [each for each in (found if isinstance(found, tuple) else (found,)) if isinstance(each, Tensor)]


def _is_nonzero(tensor: Tensor) -> bool:
    numbers = below_transforms(tensor).detach()
    return bool((numbers.coalesce().values() if numbers.layout is torch.sparse_coo else numbers).any())


def _leading(nodes: Iterable[Any], operands: Sequence[Tensor]) -> set[Any]:
    """Return the nodes in the graph of some nodes that lead to operands."""
    followers: dict[Any, list[Any]] = {}
    for node in nodes_from(nodes):
        for parent, _ in node.next_functions:
            followers.setdefault(parent, []).append(node)
    stack = [get_gradient_edge(each).node for each in operands]
    found = set(stack)
    while stack:
        new = [each for each in followers.get(stack.pop(), ()) if each not in found]
        found.update(new)
        stack += new
    return found


def refuse_cuts_of(output: Tensor, nodes: Sequence[Any], operands: Sequence[Tensor]) -> None:
    """Compute a gradient to find Functions among the nodes that lose the graph, also for a constant cotangent."""
    if not nodes or not operands:
        return
    output = output if output.layout is torch.strided else output.to_dense()
    # Leaves cannot be made inside of a transform; this seed is in the graph through a branch that is never chosen.
    ones = torch.ones_like(output)
    # The gradient that follows has a seed without tangent. Torch gives the tangent of a float32 scalar times a Python
    # number in float64.
    with set_tangents(False):
        seed = torch.where(ones.real > 0, ones, output)
    with refusing_cuts(nodes, operands):
        torch.autograd.grad(output, operands, seed, create_graph=True, allow_unused=True)


def _running(nodes: Sequence[Any], error: BaseException) -> Any:
    """Return the node whose rule raised an exception, or None."""
    codes = {
        code: node
        for node in nodes
        for rule in backward_rules(function_of(node))
        if (code := getattr(rule, "__code__", None))
    }
    step, found = error.__traceback__, None
    while step is not None:
        found = codes.get(step.tb_frame.f_code, found)
        step = step.tb_next
    return found


def lost_slope(backward: str, *, linear: bool, instead: str = _REMEDY) -> str:
    """Return the message for a backward whose gradient varies with the point, but is partly constant in the graph."""
    what = "its slope for a constant" if linear else "a part of its slope for a constant"
    return (
        f"{backward} takes {what} (a tensor that forward computed and kept, .detach(), .data, NumPy or a kernel), but "
        f"it varies with the point, so its derivative would be silently lost; {instead}"
    )


def lost_slope_of(node: Any, *, linear: bool) -> str:
    """Return the message of `lost_slope` for a node."""
    return lost_slope(described_backward(node), linear=linear, instead=_instead_of(node))


def _of_zeros(backward: str) -> str:
    return (
        f"{backward} returns zeros without a graph for a cotangent that is zero here and varies with the point, so "
        "its derivative would be silently lost; multiply by the cotangent in any case"
    )


def _nonlinear(backward: str) -> str:
    return (
        f"{backward} is not linear in its cotangent (it clips, normalizes, rounds or adds to gradients), so the "
        "result would not be a product with a matrix; remove it for second derivatives, and add an auxiliary loss to "
        "the loss itself"
    )


def unrecorded(rule: str, instead: str = _REMEDY) -> str:
    """Return the message for a rule of a Function that leaves the graph."""
    return (
        f"{rule} computes outside of the graph (torch.no_grad, .detach(), .data, NumPy or a kernel), so its own "
        f"derivative would silently be zero; {instead}"
    )


def _told(node: Any) -> str:
    return unrecorded(described_backward(node), _instead_of(node))


def _instead_of(node: Any) -> str:
    name = function_name(node)
    return _INSTEAD.get(f"{_package_of(function_of(node))}.{name}") or _INSTEAD.get(name, _REMEDY)


def _package_of(function: Any) -> str:
    package: str = getattr(function, "__module__", "").partition(".")[0]
    return package
