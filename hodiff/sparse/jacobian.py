"""Sparse Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hodiff.common.options import require_bool, require_callable, require_choice, require_chunk_size
from hodiff.derivatives.bound_function import at_the_boundary, bind, require_argnums
from hodiff.derivatives.route_choice import refused, takes_unrecorded, unavailable
from hodiff.errors import RouteError
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.compressed_patterns import FORMATS
from hodiff.sparse.detection.patterns import Detection, pattern_of_jacobian
from hodiff.sparse.recovery.coloring_choice import Colorings
from hodiff.sparse.recovery.compressed_products import Jacobian
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.grad_mode import saving_unhooked

_METHODS = ("columns", "rows", "bidirectional")
# A tangent costs as much as two cotangents in eager torch.
_FORWARD_COSTS = 2


@outside_graphs
def jacobian(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    pattern: Any = None,
    coloring: Coloring | None = None,
    method: str = "auto",
    format: str = "csr",
    check: bool = True,
    chunk_size: int | str | None = "auto",
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the sparse Jacobian of a function, from one product for each color.

    $$ B = J(x)\, S \quad\text{or}\quad B^\top = S^\top J(x), \qquad J_{ij} \text{ from } B $$

    Args:
        f: Function `f(x, *args)` that returns a tensor or a pytree of m numbers in all.
        argnums: Which positional argument to differentiate, or which ones: tensors or pytrees of n numbers in all.
        pattern: The Jacobian's pattern, if it is known, in a form that `color` takes.
        coloring: A coloring of the pattern: `hodiff.sparse.color(pattern, "columns")`, "rows" or "bidirectional".
        method: How a pattern is colored: "columns", by tangents; "rows", by cotangents; "bidirectional", by both; or
            "auto", by tangents or cotangents, whichever cost less, or by cotangents where torch has no forward mode.
        format: As in `hodiff.sparse.hessian`.
        check: As in `hodiff.sparse.hessian`.
        chunk_size: As in `hodiff.sparse.hessian`.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the matrix (m, n), leaves of the result and of x flattened in
        pytree order. It raises `InputError` where `jacobian_pattern` does and where a given pattern has another size or
        lacks entries, and `RouteError` where torch does not implement the derivative.

    Raises:
        InputError: If an option is unknown, or the pattern cannot be colored.

    Example:
        >>> import torch, hodiff
        >>> hodiff.sparse.jacobian(lambda x: x[1:] * x[:-1], format="scipy")(torch.tensor([1.0, 2.0, 3.0])).toarray()
        array([[2., 1., 0.],
               [0., 3., 2.]], dtype=float32)

    Source: A. Curtis, M. Powell & J. Reid, "On the estimation of sparse Jacobian matrices", 1974; A. Griewank & A.
    Walther, *Evaluating Derivatives*, 2nd ed., chapter 8.
    """
    caller = "sparse.jacobian"
    require_callable(caller, f=f)
    require_argnums(caller, argnums)
    require_choice(caller, "method", method, ("auto", *_METHODS))
    require_choice(caller, "format", format, FORMATS)
    require_bool(caller, "check", check)
    require_chunk_size(caller, "chunk_size", chunk_size)
    colorings = Colorings(caller, pattern, coloring, lambda found: _colored(found, method), _METHODS)
    by_cotangents, by_tangents = (
        Colorings(caller, pattern, None, partial(color, method=each), _METHODS) for each in ("rows", "columns")
    )

    detected = Detection(pattern_of_jacobian, check)

    @outside_graphs
    @at_the_boundary
    @saving_unhooked()  # the passes inside would start the recomputation of a checkpoint around the call
    def matrix_of_f(*args: Any, **kwargs: Any) -> Any:
        function = bind(caller, f, args, kwargs, argnums, correct=correct)
        leaves, matrix = function.leaves, Jacobian(function, chunk_size)

        def entries(of: Colorings) -> tuple[Coloring, Tensor]:
            return of.entries(
                (args, kwargs),
                lambda: detected(function),
                (sum(y.numel() for y in matrix.outputs), sum(leaf.numel() for leaf in leaves)),
                {"columns": matrix.products, "rows": matrix.transposed_products},
                leaves,
                matrix.eps if check else None,
            )

        by_cheapest = [colorings]
        if method == "auto" and coloring is None:
            by_cheapest += [by_cotangents, by_tangents]  # torch or a Function may have only one of the modes
        for of in by_cheapest:
            try:
                chosen, values = entries(of)
                return chosen.matrix(values, format)
            except (RouteError, RuntimeError, NotImplementedError) as error:
                if not (isinstance(error, RouteError) or unavailable(error) or takes_unrecorded(error)):
                    raise
        # Plain autograd may support what transforms do not, such as sparse constants and old-style Functions.
        matrix.recorded = only_reverse_mode() and (method if coloring is None else coloring.method) in ("auto", "rows")
        with refused(caller):
            chosen, values = entries(by_cotangents if method == "auto" and coloring is None else colorings)
        return chosen.matrix(values, format)

    return matrix_of_f


def _colored(pattern: Any, method: str) -> Coloring:
    if method != "auto":
        return color(pattern, method)
    by_tangents, by_cotangents = color(pattern, "columns"), color(pattern, "rows")
    pays = _FORWARD_COSTS * by_tangents.num_colors < by_cotangents.num_colors
    return by_tangents if pays else by_cotangents
