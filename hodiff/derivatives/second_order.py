r"""The four second-order routes as compositions of `torch.func` transforms, and the choice among them.

For scalar $f$ and directions $v$, each computes $\nabla^2 f(x)\, v$ (Griewank & Walther, *Evaluating Derivatives*,
2nd ed., ch. 5): reverse mode pulls cotangents back, forward mode pushes tangents on, and "X-over-Y" applies X to what
Y computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vmap

from hodiff.common.chunks import ByteCount, resolve_chunk_size, spans
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, one_hot_rows
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.transforms import gradient, pull, push
from hodiff.errors import HodiffError, HodiffWarning, InputError, RouteError
from hodiff.graphs import inspect_graph
from hodiff.routes import FORWARD_INSIDE as FORWARD_INSIDE
from hodiff.routes import ROUTES as ROUTES
from hodiff.torch_internals.wording import UNAVAILABLE, Wording, says

Leaves = tuple[Tensor, ...]
T = TypeVar("T")


def reverse_over_reverse(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Pull the direction back through the gradient."""
    _, pullback, aux = pull(gradient(guard_reverse(f)), primals)
    return pullback(tuple(tangents))[0], aux


def forward_over_reverse(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Push the direction through the gradient."""
    _, product, aux = push(gradient(guard_reverse(f)), (primals,), (tangents,))
    return product, aux


def reverse_over_forward(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Take the gradient of the directional derivative."""
    return gradient(_slope(f, tangents))(primals)


def forward_over_forward(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Push every unit vector through the directional derivative: n passes where the other routes take one."""
    slope = _slope(f, tangents)

    def second(index: int) -> Callable[[Tensor], Tensor]:
        def along(direction: Tensor) -> Tensor:
            directions = tuple(direction if i == index else torch.zeros_like(p) for i, p in enumerate(primals))
            return push(slope, (primals,), (directions,))[1]

        return along

    draw = RandomState(primals)
    bytes_each, aux = _size_of_tangents(slope, primals)
    product = []
    for index, leaf in enumerate(primals):
        parts = []
        for start, stop in spans(leaf.numel(), resolve_chunk_size("auto", leaf.numel(), bytes_each, leaf.device)):
            draw.rewind()
            parts.append(vmap(second(index), randomness="same")(one_hot_rows(start, stop, leaf)))
        product.append(torch.cat(parts).view(leaf.shape).to(leaf.dtype) if parts else torch.zeros_like(leaf))
    return tuple(product), aux


def _slope(f: BoundFunction, tangents: Leaves) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """The directional derivative, and aux, as a function of the point."""

    def slope(point: Leaves) -> tuple[Tensor, PyTree]:
        _, tangent, aux = push(guard_forward(f), (point,), (tangents,))
        return tangent, aux

    return slope


def _size_of_tangents(slope: Callable[[Leaves], tuple[Tensor, PyTree]], primals: Leaves) -> tuple[int, PyTree]:
    """Bytes that a directional derivative computes, each of which has a tangent for each unit vector; and aux."""
    if torch.compiler.is_compiling():
        return 0, slope(primals)[1]
    with ByteCount() as count:
        _, aux = slope(primals)
    return count.bytes, aux


PRODUCTS: dict[str, Callable[[BoundFunction, Leaves, Leaves], tuple[Leaves, PyTree]]] = {
    "reverse-over-reverse": reverse_over_reverse,
    "forward-over-reverse": forward_over_reverse,
    "reverse-over-forward": reverse_over_forward,
    "forward-over-forward": forward_over_forward,
}


def guard_reverse(f: BoundFunction) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """The function as the innermost reverse pass sees it, refusing what that pass would silently take for zero."""

    def checked(point: Leaves) -> tuple[Tensor, PyTree]:
        value, aux = f.scalar(point)
        if not torch.compiler.is_compiling():
            if not value.requires_grad:
                raise f.independent()
            _, once = inspect_graph(value)
            if once is not None:
                raise NotImplementedError(f"{once}.backward is marked once_differentiable")
        return value, aux

    return checked


def guard_forward(f: BoundFunction) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """The same for the innermost forward pass."""

    def checked(point: Leaves) -> tuple[Tensor, PyTree]:
        value, aux = f.scalar(point)
        if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is None:
            raise f.independent()
        return value, aux

    return checked


def validate_route(route: str, caller: str) -> None:
    """Refuse a name that is no route."""
    if route not in ("auto", *ROUTES):
        known = ", ".join(repr(name) for name in ("auto", *ROUTES))
        raise InputError(f"{caller}: unknown route {route!r}; expected one of {known}.")


# Where a derivative is unavailable, and a user can do more about it than torch's words say.
_EXPLAINED = {
    Wording.RANDOM: "the function draws random numbers, and this way would draw anew for each group of "
    "directions; call model.eval(), pass randomness='same' to share one draw, or use the route "
    "'reverse-over-reverse' (for a Jacobian, the mode 'reverse'), which draws once",
    Wording.INFERENCE_TENSOR: "the function closes over a tensor made under torch.inference_mode; clone it "
    "outside of that mode",
    Wording.CHANGES_CAPTURED: "the function changes a tensor in place, which torch.func refuses (batch norm updates "
    "its buffers so in training mode); call model.eval(), pass copies of the buffers through functional_call, or use "
    "the route 'reverse-over-reverse'",
}


def unavailable(error: Exception) -> bool:
    """Whether an exception says that torch lacks the derivative on this route."""
    if isinstance(error, HodiffError):
        return False
    return isinstance(error, NotImplementedError) or (
        isinstance(error, RuntimeError) and says(error, *UNAVAILABLE, *_EXPLAINED)
    )


def _reason(error: Exception) -> str:
    for words, explanation in _EXPLAINED.items():
        if says(error, words):
            return explanation
    return str(error).strip().split("\n")[0]


def follow(route: str, caller: str, attempt: Callable[[str], T], order: Sequence[str] = ROUTES) -> T:
    """Run one attempt by the named route; for "auto", by the first route of the order that torch implements.

    Args:
        route: A route, or "auto".
        caller: The public function, for the error message.
        attempt: What to do, given a route's name.
        order: The routes that "auto" tries, in this order.

    Returns:
        What the attempt returned.

    Raises:
        RouteError: If the route, or under "auto" every route, is not implemented.
    """
    candidates = order if route == "auto" else (route,)
    if torch.compiler.is_compiling():
        return attempt(candidates[0])
    said = {}
    for name in candidates:
        try:
            result = attempt(name)
        except Exception as error:
            if not unavailable(error):
                raise
            said[name] = error
            continue
        if said and name in FORWARD_INSIDE:
            warnings.warn(
                f"{caller}: took {name}, as torch does not implement {' and '.join(said)} here. Inside of it "
                "torch's forward rules of some operators are silently wrong, of which hodiff corrects those in "
                "hodiff.corrections.table(), unless correct=False; compare with hodiff.check(f, x).",
                HodiffWarning,
                stacklevel=4,
            )
        return result
    listing = "\n".join(f"  {name}: {_reason(error)}" for name, error in said.items())
    remedy = "" if route == "auto" else '\n"auto" tries the others.'
    raise RouteError(f"{caller}: torch does not implement this derivative.\n{listing}{remedy}") from next(
        iter(said.values())
    )
