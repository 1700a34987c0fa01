"""Fallback for a function without a rule: nested forward mode of that function alone, which takes 2^K."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.randomness import RandomState, is_generator
from hodiff.derivatives.products_by_route import pull, push
from hodiff.errors import InputError, RouteError
from hodiff.recompute.reachable import RefuseForeign
from hodiff.taylor.jets import Jet, is_plain_tensor, new_jet, tensor_of
from hodiff.taylor.jets_in_arguments import Batched, along_directions, at_the_moment, call, one_after_another
from hodiff.taylor.running import as_constant
from hodiff.taylor.series import Coefficient, Frame, filled, plus
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_of_no_running_transform, is_wrapped
from hodiff.torch_internals.custom_operators import has_formula, loses_tangents
from hodiff.torch_internals.interception import active_function_modes
from hodiff.torch_internals.tensors import share_storage, version_of
from hodiff.torch_internals.wording import UNAVAILABLE, says


class LostTangentsError(RouteError):
    """Raised when an operator silently loses its derivatives in forward mode."""


def unknown(frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the coefficients of a function of jets by nested `torch.func.jvp` in t."""
    if frame.observer is not None:
        frame.observer(func)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not torch.compiler.is_compiling() and any(isinstance(each, Iterator) for each in leaves):
        raise RouteError(
            f"jet: {getattr(func, '__name__', func)} runs its function more than once in Taylor mode: expected "
            "arguments that can be read again, got an iterator; pass a function, such as batches.__getitem__ of a "
            "list."
        )
    places = [i for i, each in enumerate(leaves) if isinstance(each, Jet) and each.frame is frame]
    jets = [leaves[i] for i in places]
    generators = [] if torch.compiler.is_compiling() else [each for each in leaves if is_generator(each)]
    described: list[Any] = []
    shared: dict[int, int] = {}

    def tensors(values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs of the function that can move; record the other outputs in `described`."""
        given = list(leaves)
        for i, each in zip(places, values, strict=True):
            given[i] = each
        plain_args, plain_kwargs = pytree.tree_unflatten(given, spec)
        before = _versions(values)
        with _as_lost_tangents(func):
            outputs, out_spec = pytree.tree_flatten(at_the_moment(call(func, plain_args, plain_kwargs)))
        if before != _versions(values):
            name = getattr(func, "__name__", func)
            raise InputError(
                f"jet: {name} writes to its argument, which is not supported for a jet: expected a function "
                "that returns a new tensor."
            )
        if (frame.mode is None or not has_formula(func)) and loses_tangents(func) and any(map(_can_move, outputs)):
            raise _lost(func)
        if not any(map(_can_move, outputs)):
            raise _NothingMoves
        shared.update(_shared(outputs, places, values))
        described[:] = [[_MOVES if _can_move(each) else each for each in outputs], out_spec]
        return tuple(each for each in outputs if _can_move(each))

    # All evaluations draw the same random numbers.
    state = RandomState((jet.value for jet in jets if isinstance(jet.value, Tensor)), generators)
    with nullcontext() if frame.mode is None else frame.mode:
        try:
            series = _series(frame, tensors, jets, state)
        except _ClosedOver:
            # vmap cannot map jets that the function closes over, so evaluate direction by direction.
            state.rewind()
            series = _series(frame, tensors, jets, state, one_by_one=True)
        except _NothingMoves:
            state.rewind()
            with moment(frame, as_constant):
                return at_the_moment(call(func, at_the_moment(args), at_the_moment(kwargs)))
        if any(isinstance(each, Tensor) and is_wrapped(each) for each in described[0]):
            # A transform that has ended still wraps an output, such as an index found in a batch of directions, so
            # compute it again.
            state.rewind()
            with moment(frame, as_constant):
                tensors([jet.value for jet in jets])
    moving = iter(series)
    outputs = [new_jet(frame, next(moving)) if each is _MOVES else each for each in described[0]]
    for i, place in shared.items():
        outputs[i].as_view(leaves[place], _taken(func, leaves, spec, place, i))
    return pytree.tree_unflatten(outputs, described[1])


def _shared(outputs: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the moving outputs that share memory with an argument, and the place of that argument."""
    if torch.compiler.is_compiling():
        return
    inner = {place: below_transforms(tensor_of(each)) for place, each in zip(places, values, strict=True)}
    for i, output in enumerate(outputs):
        for place, value in inner.items() if _can_move(output) else ():
            if value.numel() and share_storage(below_transforms(tensor_of(output)), value):
                yield i, place


def _taken(func: Any, leaves: Sequence[Any], spec: Any, place: int, i: int) -> Any:
    """Return the function that takes a view, output i, from the argument at a place."""

    def taken(source: Any) -> Any:
        args, kwargs = pytree.tree_unflatten([*leaves[:place], source, *leaves[place + 1 :]], spec)
        found = pytree.tree_leaves(call(func, args, kwargs))[i]
        # A write calls it with numbers of the elements.
        if is_plain_tensor(source) and (found.dtype != source.dtype or not share_storage(found, source)):
            raise InputError(
                f"jet: {getattr(func, '__name__', func)} returns a view of a jet, to which writing is not supported: "
                "expected functions that return new tensors."
            )
        return found

    return taken


class _NothingMoves(BaseException):
    """Raised if a function returns nothing that can be differentiated, such as a name or a bool."""


def _versions(values: Sequence[Any]) -> list[int]:
    """Version counters of the tensors; empty under a compiler."""
    return [] if torch.compiler.is_compiling() else [version_of(each) for each in values if isinstance(each, Tensor)]


# Placeholder for an output that moves.
_MOVES = object()


def _can_move(x: Any) -> bool:
    return isinstance(x, (Tensor, Jet)) and (x.is_floating_point() or x.is_complex())


def _series(
    frame: Frame, tensors: Any, jets: list[Jet], state: RandomState, *, one_by_one: bool = False
) -> list[list[Coefficient]]:
    order, values = frame.order, [jet.value for jet in jets]
    # The highest coefficients of a collapsed series enter linearly, and are pushed forward separately.
    apart = frame.collapsed and frame.directions is not None
    top = order - 1 if apart else order
    given = [Batched(_dense(frame, jet, k), frame.has_axis(k)) for jet in jets for k in range(1, top + 1)]
    closed_over: list[Jet] = []
    start = (
        torch.zeros((), dtype=values[0].real.dtype, device=values[0].device)
        if values
        else torch.zeros((), device="cpu")
    )

    def derivatives(*coefficients: Any, direction: int | None = None) -> tuple[tuple[Any, ...], ...]:
        def at(t: Any) -> tuple[Any, ...]:
            points = [_point(value, coefficients[i * top : (i + 1) * top], t) for i, value in enumerate(values)]

            def point(jet: Jet) -> Any:
                if not jet.is_moving():
                    return jet.value
                _require_running(jet, t)
                closed_over.append(jet)
                return _point(jet.value, _along(frame, jet, top, direction), t)

            with moment(frame, point):
                return tensors(points)

        return _tower(at, start, order)

    first: Sequence[Any]
    if one_by_one or any(each.axis for each in given):
        if one_by_one:
            parts = _by_direction(frame, derivatives, given, state)
        else:
            parts = along_directions(derivatives, given, {}, randomness="same")
            if state.advanced:
                # Random draws in a vmap may differ between directions, and the draws of a rule do.
                parts = one_after_another(derivatives, given, state.rewind)
        first, *rising = parts
        # All directions share one value.
        first = [each[0] for each in first]
    else:
        first, *rising = derivatives(*(each.tensor for each in given))
    found: list[list[Coefficient]] = [[each] for each in first]
    spread = one_by_one or bool(given[:1])
    for k, parts in enumerate(rising, start=1):
        for column, each in zip(found, parts, strict=True):
            summed = each.sum(0) if frame.directions is not None and not frame.has_axis(k) and spread else each
            column.append(summed / math.factorial(k))
    if apart and any(jet.coefficients[order] is not None for jet in (*jets, *closed_over)):
        state.rewind()
        tangents = tuple(_dense(frame, jet, order) for jet in jets)

        def highest(t: Any) -> tuple[Any, ...]:
            def point(jet: Jet) -> Any:
                last = jet.coefficients[order]
                if last is None:
                    return jet.value
                _require_running(jet, t)
                return _point(jet.value, (last,), t)

            with moment(frame, point):
                return tensors([_point(x, (v,), t) for x, v in zip(values, tangents, strict=True)])

        _, slopes = _slopes(highest, start)
        for column, slope in zip(found, slopes, strict=True):
            column[order] = plus(column[order], slope)
    return found


class _ClosedOver(BaseException):
    """Raised when a vmap over directions meets a jet that is not an argument."""


def _point(value: Any, coefficients: Sequence[Coefficient], t: Any) -> Any:
    """Evaluate the curve of a jet at t."""
    for k, each in enumerate(coefficients, start=1):
        value = value + each * t.to(value.dtype) ** k
    return value


def _require_running(jet: Any, t: Any) -> None:
    """Raise an error if the transform of t is no longer running, as in the forward of a Function."""
    if torch.compiler.is_compiling():
        return
    for mode in active_function_modes():
        # Python operators bypass this mode, because the jet's own operators come first.
        if isinstance(mode, RefuseForeign):
            raise mode.error(jet)
    if is_of_no_running_transform(t):
        raise closed_over_by_forward()


def closed_over_by_forward() -> RouteError:
    """Return the error for a Function whose forward closes over a jet."""
    return RouteError(
        "jet: the forward of a Function closes over a jet: expected it among the arguments, as its "
        "derivative would be lost."
    )


def _along(frame: Frame, jet: Jet, top: int, direction: int | None) -> list[Coefficient]:
    """Return the coefficients along one direction of a jet that the function closes over."""
    found = []
    for k in range(1, top + 1):
        each = _dense(frame, jet, k)
        if frame.has_axis(k):
            if direction is None:
                raise _ClosedOver
            each = each[direction]
        found.append(each)
    return found


@contextmanager
def moment(frame: Frame, point: Any) -> Iterator[None]:
    """Replace the frame's jets by tensors within the block: `point` maps a jet to a point on its curve."""
    before, frame.moment = frame.moment, point
    try:
        yield
    finally:
        frame.moment = before


def _by_direction(frame: Frame, derivatives: Any, given: Sequence[Batched], state: RandomState) -> Any:
    """Evaluate direction by direction; unlike `torch.func.vmap`, this supports jets that are closed over."""
    rows = []
    for r in range(frame.directions or 0):
        state.rewind()
        rows.append(derivatives(*(each.tensor[r] if each.axis else each.tensor for each in given), direction=r))
    return tuple(
        tuple(torch.stack([row[k][i] for row in rows]) for i in range(len(rows[0][k]))) for k in range(frame.order + 1)
    )


def _dense(frame: Frame, jet: Jet, k: int) -> Coefficient:
    return filled(frame, jet.coefficients, k, jet.value)


def _tower(function: Any, t: Any, order: int) -> tuple[tuple[Any, ...], ...]:
    """Value and derivatives of a function of a number, by forward mode nested to the order."""
    if order == 0:
        return (function(t),)
    values, slopes = _slopes(lambda t: _tower(function, t, order - 1), t)
    return (*values, slopes[-1])


def _slopes(function: Any, t: Any) -> tuple[Any, Any]:
    """Value and derivative with respect to a number, in forward mode, or else by reverse mode applied twice."""
    try:
        return push(lambda t: (function(t), ()), (t,), (torch.ones_like(t),))[:2]
    except (RuntimeError, NotImplementedError) as error:
        if not says(error, *UNAVAILABLE):
            raise
    values, pullback, _ = pull(lambda t: (function(t), ()), t)
    # The pullback is linear in cotangents; its own pullback is the tangent.
    zeros = pytree.tree_map(torch.zeros_like, values)
    _, twice, _ = pull(lambda cotangents: (pullback(cotangents), ()), zeros)
    return values, twice((torch.ones_like(t),))[0]


@contextmanager
def _as_lost_tangents(func: Any) -> Iterator[None]:
    """Convert the corrections' error for a library's operator to a `LostTangentsError`."""
    try:
        yield
    except NotImplementedError as error:
        if not loses_tangents(func):
            raise
        raise _lost(func) from error


def _lost(func: Any) -> LostTangentsError:
    return LostTangentsError(
        f"jet: {func} is an operator of a library, which torch's forward mode takes for a constant: expected a rule by "
        "hodiff.taylor.register, a formula by torch.library.custom_op and register_autograd, or a "
        "torch.autograd.Function with setup_context around it."
    )
