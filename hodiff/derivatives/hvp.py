"""Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from hodiff.common.ordinary import ordinary
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.products_by_route import PRODUCTS, Leaves
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import follow, require_route
from hodiff.derivatives.steady import leaving_no_trace
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode


@at_the_boundary
def hvp(
    f: Callable[..., Any],
    x: PyTree,
    v: PyTree,
    *args: Any,
    route: str = "auto",
    has_aux: bool = False,
    correct: bool = True,
) -> PyTree:
    r"""Compute the Hessian-vector product of a scalar function, without the Hessian.

    $$ H v = \nabla^2 f(x)\, v = \left.\frac{d}{dt} \nabla f(x + t v)\right|_{t=0} $$

    The result can be differentiated again (in `x`, `v`, `args` and tensors that `f` closes over). It works under every
    `torch.func` transform, `torch.compile(fullgraph=True)` and `torch.no_grad()`, and carries no graph if no input
    requires a gradient.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape `()`, or `(value, aux)` with `has_aux`. It is
            evaluated once (by "forward-over-forward" once for each group of coordinates), as an ordinary forward pass:
            dropout is drawn once, batch norm in training mode updates its buffers once. If it calls a custom Function,
            the 1st, 2nd, 4th, 8th, ... call evaluates it again to check the Function's gradient, with the same buffers
            and random numbers.
        x: Where to differentiate: a tensor or a pytree of floating-point tensors. Complex ones are differentiated by
            real and imaginary part: with $z = a + ib$ and $v = s + it$ the product is that in $(a, b)$ with $(s, t)$,
            its first half plus i times its second, as torch's gradients are (those of `jax.grad` are conjugate).
            Elements that share memory, as after `expand` or `unfold`, count as numbers of their own. DTensors may be
            sharded; with modules under `fully_shard`, the value is the mean over ranks (see the guide to large models).
        v: The direction, with the structure, shapes, dtypes and devices of `x`.
        *args: Further arguments of `f`, taken as constants.
        route: One of `hodiff.ROUTES`, or "auto". "auto" tries "reverse-over-reverse" first: it was the fastest or
            within a few percent of it on every network we measured, and torch's own rules are right most often there.
            If it does not exist, "auto" tries the next of `hodiff.ROUTES`. With `correct=False` the two routes with
            forward mode inside are silently wrong if torch's forward rules are: `layer_norm`, `batch_norm`, `solve`,
            `det` and others; "auto" tries them last, and warns.
        has_aux: Whether `f` returns `(value, aux)`, aux a pytree of tensors.
        correct: Whether hodiff's rules replace torch's wrong and missing rules, as within `hodiff.corrected()`; if
            not, the derivatives are torch's own.

    Returns:
        The product, with the structure of `x`; with `has_aux`, the pair (product, aux). A leaf that `f` ignores gets
        zeros.

    Raises:
        InputError: If `f` does not return one real number or does not depend on `x`, if a leaf of `x` cannot be
            differentiated, if `v` does not match `x`, or if the route is unknown.
        RouteError: If torch does not implement the route, or with "auto" any route; the message has each error.

    Example:
        >>> import torch, hodiff
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hodiff.hvp(lambda x: x[0] ** 2 * x[1], x, v)
        tensor([4., 2.])

    Source: B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994), eq. 2.4.
    """
    require_route("hvp", route)
    function = bind(
        "hvp",
        f,
        (x, *args),
        name="x",
        has_aux=has_aux,
        correct=correct,
        complex_too=True,
        jagged_too=True,
        sharded_too=True,
    )
    primals = function.leaves
    tangents = function.tangents(v)
    plain = only_reverse_mode()

    def attempt(name: str) -> tuple[Leaves, PyTree]:
        if function.sharded is not None:
            function.require_route(name)
        if plain and name == ROUTES[0]:
            recorded = RecordedGradient(function, tangents)
            return recorded.product(tangents), recorded.aux
        with leaving_no_trace(function.f) if plain else nullcontext():
            return PRODUCTS[name](function, primals, tangents)

    product, aux = follow(route, "hvp", attempt)
    result = function.unflatten(ordinary(product, (*primals, *tangents)))
    return (result, aux) if has_aux else result
