r"""`torch.func.vjp`, and gradients, of a function of jets.

Let y(t) be the series of a function at x(t), and w(t) the series of a cotangent. The highest coefficient of
$s = \langle y, w \rangle$ is $s_K = \sum_i \langle y_i, w_{K-i} \rangle$, and $\partial s_K / \partial x_j$ is
coefficient $K - j$ of $J(x(t))^\top w(t)$: one backward pass through coefficients gives the coefficients of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.randomness import RandomState
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import at_the_moment, coefficients_of
from hodiff.taylor.series import Coefficient, Frame, filled
from hodiff.taylor.transforms.pushforwards import flat_outputs
from hodiff.torch_internals.autograd.func_calls import replaced, sliced, vjp_of

# Maps cotangents of outputs to cotangents of inputs, which are tensors or jets.
Pullback = Callable[..., list[Any]]


class _MoreFrames(Exception):  # noqa: N818
    """Raised when the output belongs to frames of no input, because the function closes over jets."""

    def __init__(self, frames: list[Frame]):
        super().__init__()
        self.frames = frames


def vjp(function: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    """Output and pullback, in torch's structure."""
    primals = at_the_moment(primals)
    varied = primals if argnums is None else sliced(primals, argnums, as_tuple=False)
    leaves, spec = pytree.tree_flatten(varied)
    noted: dict[str, Any] = {}

    def on_leaves(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        tree = pytree.tree_unflatten(list(given), spec)
        args = tree if argnums is None else replaced(primals, (tree,) if isinstance(argnums, int) else tree, argnums)
        result = at_the_moment(function(*args))
        # Raises an error for outputs that are not tensors, and records the structure.
        flat_outputs(result, noted, has_aux=has_aux)
        output, aux = result if has_aux else (result, ())
        return pytree.tree_leaves(output), pytree.tree_leaves(aux)

    outputs, pull, aux = _linearized(on_leaves, leaves)
    (_, structure), (_, structure_of_aux) = noted["output"], noted["aux"]

    def pullback(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given, found = pytree.tree_flatten(at_the_moment(cotangents))
        if found != structure:
            raise RuntimeError(f"Expected cotangents in the structure of the outputs, {structure}, got {found}")
        return pytree.tree_unflatten(pull(given, retain_graph=retain_graph, create_graph=create_graph), spec)

    result = pytree.tree_unflatten(outputs, structure), pullback
    return (*result, pytree.tree_unflatten(aux, structure_of_aux)) if has_aux else result


def grad_and_value(function: Any, argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradient and value, in torch's structure."""
    kwargs = at_the_moment(kwargs)
    value, pullback, *aux = vjp(lambda *given: function(*given, **kwargs), *args, argnums=argnums, has_aux=has_aux)
    if not isinstance(value, (Tensor, Jet)) or value.ndim != 0:
        got = f"{value.ndim} dims" if isinstance(value, (Tensor, Jet)) else type(value).__name__
        raise RuntimeError(f"grad_and_value(f)(*args): Expected f(*args) to return a scalar Tensor, got {got}")
    with torch.enable_grad():
        gradient = pullback(torch.ones_like(value.detach()))
    return gradient, ((value, *aux) if has_aux else value)


def _linearized(function: Any, leaves: list[Any]) -> tuple[list[Any], Pullback, list[Any]]:
    """Outputs, pullback and aux of a function of jets and tensors."""
    state = RandomState(each for each in leaves if isinstance(each, Tensor))
    frames = _frames_of(leaves)
    try:
        return _through(function, leaves, frames)
    except _MoreFrames as more:
        state.rewind()
        return _through(function, leaves, sorted({*frames, *more.frames}, key=lambda each: each.depth))


def _frames_of(trees: Sequence[Any]) -> list[Frame]:
    """Frames of the jets and of their coefficients, outermost first."""
    found: set[Frame] = set()
    rest = list(trees)
    while rest:
        each = rest.pop()
        if isinstance(each, Jet):
            found.add(each.frame)
            rest += each.coefficients
    return sorted(found, key=lambda each: each.depth)


def _through(function: Any, leaves: list[Any], frames: list[Frame]) -> tuple[list[Any], Pullback, list[Any]]:
    """Differentiate by the coefficients of the deepest frame, which may be jets of the frames around it."""
    if not frames:
        return _of_tensors(function, leaves)
    *outer, frame = frames
    width = frame.order + 1
    parts = []
    for leaf in leaves:
        own = coefficients_of(frame, leaf)
        # All elements of an expanded zero would share one gradient.
        parts += [own[0], *(filled(frame, own, k, own[0]).contiguous() for k in range(1, width))]
    noted: list[Any] = []

    def on_parts(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        jets = [new_jet(frame, given[i : i + width]) for i in range(0, len(given), width)]
        outputs, aux = function(jets)
        shown: list[Any] = []
        noted[:] = [_parted(frame, outputs, shown), None]
        beside: list[Any] = []
        noted[1] = _parted(frame, aux, beside)
        return shown, beside

    values, pull, beside = _through(on_parts, parts, outer)
    outputs = _joined(frame, noted[0], values)

    def pullback(cotangents: Sequence[Any], **options: Any) -> list[Any]:
        return _pulled(frame, outputs, noted[0], pull, cotangents, options)

    return outputs, pullback, _joined(frame, noted[1], beside)


def _of_tensors(function: Any, leaves: list[Any]) -> tuple[list[Any], Pullback, list[Any]]:
    kept: list[Any] = []

    def on_tensors(*tensors: Any) -> Any:
        outputs, aux = function(tensors)
        if more := _frames_of([*outputs, *aux]):
            raise _MoreFrames(more)
        # Values that are not tensors bypass torch.
        kept[:] = aux
        return tuple(outputs), tuple(each for each in aux if isinstance(each, Tensor))

    outputs, pull, beside = vjp_of(on_tensors, *leaves, has_aux=True)
    rest = iter(beside)
    aux = [next(rest) if isinstance(each, Tensor) else each for each in kept]
    return list(outputs), lambda cotangents, **options: list(pull(tuple(cotangents), **options)), aux


def _parted(frame: Frame, values: Sequence[Any], shown: list[Any]) -> list[list[int | None] | None]:
    """Append coefficients to a list, and return their positions for each value; None for zero coefficients."""
    places: list[list[int | None] | None] = []
    for value in values:
        moves = isinstance(value, Jet) and value.frame is frame
        own = []
        for each in value.coefficients if moves else [value]:
            own.append(None if each is None else len(shown))
            if each is not None:
                shown.append(each)
        places.append(own if moves else [*own, *[None] * frame.order])
    return places


def _joined(frame: Frame, places: Any, values: Sequence[Any]) -> list[Any]:
    """Rebuild values from positions and a list of coefficients; the inverse of `_parted`."""
    return [
        new_jet(frame, found) if any(each is not None for each in found[1:]) else found[0]
        for found in ([None if place is None else values[place] for place in own] for own in places)
    ]


def _pulled(
    frame: Frame, outputs: Sequence[Any], places: Any, pull: Pullback, cotangents: Sequence[Any], options: Any
) -> list[Any]:
    order, width = frame.order, frame.order + 1
    weights = [coefficients_of(frame, each) for each in cotangents]

    def seeds(direction: int | None = None) -> list[Any]:
        """Cotangents of all coefficients, or their parts for a single direction."""
        found: list[Any] = []
        for output, own, weight in zip(outputs, places, weights, strict=True):
            terms = coefficients_of(frame, output)
            for i, place in enumerate(own):
                if place is None:
                    continue
                found.append(_seed(frame, terms[i], i, weight[order - i], direction))
        return found

    found = pull(seeds(), **options)
    results = []
    rows = None
    if frame.has_axis(order):
        # Directions that are not summed have separate last coefficients.
        rows = [pull(seeds(r), **options) for r in range(frame.directions or 0)]
    for start in range(0, len(found), width):
        # The cotangent of x_j is coefficient K - j, so the order is reversed.
        terms = list(reversed(found[start : start + width]))
        if rows is not None:
            terms[0] = terms[0][0]
            terms[order] = torch.stack([row[start] for row in rows])
        results.append(new_jet(frame, terms))
    return results


def _seed(frame: Frame, term: Any, i: int, weight: Coefficient, direction: int | None) -> Any:
    """The cotangent of coefficient i of an output."""
    if weight is None:
        return torch.zeros_like(term)
    axis, own_axis = frame.has_axis(frame.order - i), frame.has_axis(i)
    if direction is None:
        return (weight.sum(0) if axis and not own_axis else weight).to(term.dtype).expand(term.shape)
    row = (weight[direction] if axis else weight).to(term.dtype)
    if not own_axis:
        return row.expand(term.shape)
    chosen = torch.arange(term.shape[0], device=term.device) == direction
    return torch.where(chosen.reshape(-1, *[1] * (term.ndim - 1)), row, torch.zeros_like(term))
