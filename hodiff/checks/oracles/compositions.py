"""Compositions of reverse and forward passes, to any order.

Griewank & Walther, *Evaluating Derivatives*, 2nd ed., 2008, chapters 3 and 5.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_int
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.wording import Wording, says

MODES = ("reverse", "forward")

TensorFunction = Callable[..., Any]


def route_names(order: int) -> tuple[str, ...]:
    """Name all ``2**order`` routes to the derivative of an order.

    ``"X-over-Y"`` applies X to the result of Y, so the last word is the innermost pass.

    Args:
        order: Order of the derivative, at least 1.

    Returns:
        The names; routes with the same inner passes are adjacent.

    Raises:
        InputError: If ``order`` is not a positive integer.

    Example:
        >>> route_names(1)
        ('reverse', 'forward')
        >>> route_names(2)
        ('reverse-over-reverse', 'forward-over-reverse', 'reverse-over-forward', 'forward-over-forward')
    """
    require_int("route_names", "order", order, 1)
    return tuple("-over-".join(reversed(modes)) for modes in product(MODES, repeat=order))


def derivative(f: TensorFunction, route: str) -> TensorFunction:
    r"""Compose passes into one derivative of a scalar function of a vector, with one free index.

    .. math:: (x, v_1, \dots, v_{k-1}) \mapsto D^k f(x)[v_1, \dots, v_{k-1}, \cdot] \in \mathbb{R}^n

    The outermost reverse pass provides the free index. A route without a reverse pass provides none, so all its passes
    run once for each basis vector. torch.func refuses Functions whose forward takes ctx; for these Functions,
    ``torch.autograd`` computes the routes of reverse passes only.

    Args:
        f: Maps a tensor of shape (n,) to a tensor of shape ().
        route: One of `route_names`, such as ``"forward-over-reverse"``; its words count the order k.

    Returns:
        A function of x, shape (n,), and k - 1 directions, each of shape (n,); it returns shape (n,).

    Raises:
        InputError: If a word of the route is neither ``"reverse"`` nor ``"forward"``.

    Example:
        >>> import torch
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> derivative(lambda x: x[0] ** 2 * x[1], "forward-over-reverse")(x, v)
        tensor([4., 2.])
    """
    modes = route.split("-over-")[::-1]
    if not set(modes) <= set(MODES):
        raise InputError(f"derivative: route: expected words from {MODES} joined by '-over-', got {route!r}.")
    if "reverse" not in modes:
        return _by_basis(f, route)
    free = len(modes) - 1 - modes[::-1].index("reverse")
    # After a refusal, skip torch.func: f may run long before it is refused again.
    refused = False

    def evaluate(x: Tensor, *directions: Tensor) -> Tensor:
        nonlocal refused
        if refused and not in_transform():
            return _recorded(f, x, directions)
        remaining = iter(directions)
        function = f
        for level, mode in enumerate(modes):
            function = torch.func.grad(function) if level == free else _ALONG[mode](function, next(remaining))
        try:
            return function(x)
        except RuntimeError as error:
            if "forward" in modes or in_transform() or not says(error, Wording.NO_SETUP_CONTEXT):
                raise
            refused = True
            return _recorded(f, x, directions)

    return evaluate


def _recorded(f: TensorFunction, x: Tensor, directions: tuple[Tensor, ...]) -> Tensor:
    """Compute D^k f(x)[v_1, ..., v_{k-1}, .] by torch.autograd."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = f(x)
        for v in directions:
            value = _gradient(value, x, create_graph=True) @ v
        return _gradient(value, x)


def _gradient(value: Tensor, x: Tensor, *, create_graph: bool = False) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(value, [x], create_graph=create_graph, materialize_grads=True)[0]


def along_directions(f: TensorFunction, route: str) -> TensorFunction:
    """Compose passes into (x, v_1, ..., v_k) -> D^k f(x)[v_1, ..., v_k]; the innermost pass takes v_1."""
    modes = route.split("-over-")[::-1]

    def evaluate(x: Tensor, *directions: Tensor) -> Tensor:
        function = f
        for mode, direction in zip(modes, directions, strict=True):
            function = _ALONG[mode](function, direction)
        return function(x)

    return evaluate


def _by_basis(f: TensorFunction, route: str) -> TensorFunction:
    along = along_directions(f, route)

    def evaluate(x: Tensor, *directions: Tensor) -> Tensor:
        basis = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
        return torch.stack([along(x, *directions, last) for last in basis])

    return evaluate


def _along_forward(f: TensorFunction, direction: Tensor) -> TensorFunction:
    return lambda x: torch.func.jvp(f, (x,), (direction,))[1]


def _along_reverse(f: TensorFunction, direction: Tensor) -> TensorFunction:
    return lambda x: torch.func.grad(f)(x) @ direction


_ALONG = {"forward": _along_forward, "reverse": _along_reverse}
