r"""`torch.func.jvp` of jets: coefficients of $J(x(t))\, v(t)$ are tangents of the coefficients of $f(x(t))$."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import dense
from hodiff.taylor.jets import Jet
from hodiff.taylor.jets_in_arguments import Shape, at_the_moment, coefficients_of, gathered, spread
from hodiff.taylor.series import filled
from hodiff.torch_internals.autograd.func_calls import jvp_of, replaced, sliced


def jvp(
    function: Callable[..., Any],
    primals: Any,
    tangents: Any,
    argnums: Any = None,
    *,
    has_aux: bool = False,
    **options: Any,
) -> Any:
    """Output and tangent, in torch's structure."""
    primals, tangents = at_the_moment((primals, tangents))
    varied = primals if argnums is None or not isinstance(primals, tuple) else sliced(primals, argnums)
    leaves, spec = pytree.tree_flatten(varied)
    directions, structure = pytree.tree_flatten(tangents)
    if not isinstance(primals, tuple) or spec != structure or not leaves:
        # torch raises the error.
        return jvp_of(function, primals, tangents, argnums, has_aux=has_aux, **options)
    points: list[Any] = []
    moves: list[Any] = []
    shapes = [paired(x, v, points, moves) for x, v in zip(leaves, directions, strict=True)]
    noted: dict[str, Any] = {}

    def on_tensors(*tensors: Any) -> Any:
        rest = iter(tensors)
        given = pytree.tree_unflatten([gathered(shape, rest) for shape in shapes], spec)
        result = function(*(given if argnums is None else replaced(primals, given, argnums)))
        return flat_outputs(at_the_moment(result), noted, has_aux=has_aux)

    values, slopes, aux = jvp_of(on_tensors, tuple(points), tuple(moves), None, has_aux=True, **options)
    output, tangent = built(noted["output"], values), built(noted["output"], slopes)
    return (output, tangent, built(noted["aux"], aux)) if has_aux else (output, tangent)


def paired(x: Any, v: Any, points: list[Any], moves: list[Any]) -> Shape:
    """Append the tensors of a primal and of its tangent to two parallel lists, and return their structure."""
    frame = x.frame if isinstance(x, Jet) else None
    if isinstance(v, Jet) and (frame is None or v.frame.depth > frame.depth):
        frame = v.frame
    if frame is None:
        points.append(dense(x) if isinstance(x, Tensor) else x)
        moves.append(dense(v) if isinstance(v, Tensor) else v)
        return ("tensor", 0, ())
    xs, vs = coefficients_of(frame, x), coefficients_of(frame, v)
    parts: list[Any] = []
    for k, (a, b) in enumerate(zip(xs, vs, strict=True)):
        if a is None and b is None:
            parts.append(None)
            continue
        parts.append(paired(filled(frame, xs, k, xs[0]), filled(frame, vs, k, vs[0]), points, moves))
    return ("jet", frame, tuple(parts))


def flat_outputs(result: Any, noted: dict[str, Any], *, has_aux: bool) -> tuple[Any, Any]:
    """Return the tensors of the output and of aux; record in `noted` how to rebuild the trees."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError("output of function f should be a tuple: (output, aux) if has_aux is True")
    output, aux = result if has_aux else (result, ())
    found = []
    for name, tree in (("output", output), ("aux", aux)):
        tensors: list[Any] = []
        leaves, spec = pytree.tree_flatten(tree)
        if name == "output" and not all(isinstance(leaf, (Tensor, Jet)) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise RuntimeError(f"Expected f to return only tensors, got {kinds}")
        noted[name] = ([spread(leaf, tensors, []) for leaf in leaves], spec)
        found.append(tuple(tensors))
    return found[0], found[1]


def built(noted: Any, tensors: Any) -> Any:
    """Rebuild a tree from tensors and a record of `flat_outputs`."""
    shapes, spec = noted
    rest = iter(tensors)
    return pytree.tree_unflatten([gathered(shape, rest) for shape in shapes], spec)
