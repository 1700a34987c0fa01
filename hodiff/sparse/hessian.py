"""Sparse Hessians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.chunks import require_chunk_size
from hodiff.common.options import require_bool, require_callable, require_choice
from hodiff.derivatives.bound_function import at_the_boundary, bind, require_argnums
from hodiff.derivatives.route_choice import validate_route
from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.layouts import FORMATS
from hodiff.sparse.detection.patterns import pattern_of_hessian
from hodiff.sparse.recovery.coloring import Colorings
from hodiff.sparse.recovery.products import Hessian

_METHODS = ("star", "acyclic")


def hessian(
    f: Callable[..., Any],
    *,
    argnums: int = 0,
    pattern: Any = None,
    coloring: Coloring | None = None,
    method: str = "star",
    format: str = "csr",
    check: bool = True,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the sparse Hessian of a scalar function, from one product for each color.

    $$ B = \nabla^2 f(x)\, S, \qquad S \in \{0, 1\}^{n \times c}, \qquad H_{ij} \text{ from } B $$

    Columns of a color are multiplied together, c products in place of n, all with one recorded gradient. The pattern is
    found (`hessian_pattern`) and colored (`color`) at the first call, and kept for arguments of the same shapes.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape ().
        argnums: Which positional argument to differentiate: a tensor or a pytree of n numbers in all.
        pattern: Where the Hessian may have entries, if that is known: what `color` takes.
        coloring: A coloring of it, made before: `hodiff.sparse.color(pattern)`, of method "star" or "acyclic".
        method: How a pattern is colored: "star", whose entries are read from the products, or "acyclic", whose entries
            come by substitution, from about half as many products, with more rounding.
        format: "csr" or "coo", a sparse tensor; "scipy", a `csr_array`; or "values", the entries alone in the order of
            compressed rows, which has derivatives of every kind.
        check: Whether the matrix is held against one more product, with a random vector, which shows entries outside of
            the pattern; then the pattern is looked for again, and a given one is refused. Not inside transforms of
            torch.func.
        route: As in `hodiff.hvp`.
        chunk_size: How many products are made at once: a positive int, None for all, or "auto" for as many as keep
            intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the matrix (n, n), leaves flattened in pytree order. It raises
        `InputError` where `hessian_pattern` does, where a given pattern has another size or lacks entries, and what
        `hodiff.hvp` raises.

    Raises:
        InputError: If an option is unknown, or the pattern cannot be colored.

    Example:
        >>> import torch, hodiff
        >>> f = lambda x: (x[1:] - x[:-1] ** 2).square().sum()
        >>> hodiff.sparse.hessian(f, format="scipy")(torch.tensor([1.0, 2.0, 3.0])).toarray()
        array([[ 4., -4.,  0.],
               [-4., 38., -8.],
               [ 0., -8.,  2.]], dtype=float32)

    Source: A. Gebremedhin, A. Pothen, A. Tarafdar & A. Walther, "Efficient computation of sparse Hessians using
    coloring and automatic differentiation", INFORMS Journal on Computing 21, 2009.
    """
    whole = _value_and_hessian(
        "sparse.hessian", f, argnums, pattern, coloring, method, format, check, route, chunk_size, correct
    )
    return lambda *args, **kwargs: whole(*args, **kwargs)[1]


def value_and_hessian(
    f: Callable[..., Any],
    *,
    argnums: int = 0,
    pattern: Any = None,
    coloring: Coloring | None = None,
    method: str = "star",
    format: str = "csr",
    check: bool = True,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    correct: bool = True,
) -> Callable[..., tuple[Tensor, Any]]:
    r"""Function that computes the value and the sparse Hessian of a scalar function: $(f(x), \nabla^2 f(x))$.

    Args:
        f: As in `hodiff.sparse.hessian`.
        argnums: Likewise, as all that follow.
        pattern: Likewise.
        coloring: Likewise.
        method: Likewise.
        format: Likewise.
        check: Likewise.
        route: Likewise.
        chunk_size: Likewise.
        correct: Likewise.

    Returns:
        Function of the arguments of `f` that returns the value, of shape (), and the matrix.

    Raises:
        InputError: As `hodiff.sparse.hessian`.

    Example:
        >>> import torch, hodiff
        >>> value, H = hodiff.sparse.value_and_hessian(lambda x: (x**3).sum(), format="values")(torch.ones(2))
        >>> value, H
        (tensor(2.), tensor([6., 6.]))

    Source: as `hodiff.sparse.hessian`.
    """
    return _value_and_hessian(
        "sparse.value_and_hessian", f, argnums, pattern, coloring, method, format, check, route, chunk_size, correct
    )


def lagrangian_hessian(
    objective: Callable[..., Any],
    constraints: Callable[..., Any],
    **options: Any,
) -> Callable[..., Any]:
    r"""Function that computes the sparse Hessian of a Lagrangian, $\nabla^2_x \left[ f(x) + \lambda^\top c(x) \right]$.

    The pattern holds for all multipliers, so that one coloring serves all iterations of a solver.

    Args:
        objective: Function `f(x, *args)` that returns a tensor of shape ().
        constraints: Function `c(x, *args)` that returns a tensor of any shape, or a pytree of tensors.
        **options: Those of `hodiff.sparse.hessian`, but for `argnums`.

    Returns:
        Function `(x, multipliers, *args)` that returns the matrix (n, n); multipliers are like what `constraints`
        returns.

    Raises:
        InputError: As `hodiff.sparse.hessian`; or, by the function, if the multipliers do not fit.

    Example:
        >>> import torch, hodiff
        >>> H = hodiff.sparse.lagrangian_hessian(lambda x: (x**2).sum(), lambda x: x[1:] * x[:-1], format="scipy")
        >>> H(torch.ones(3), torch.tensor([5.0, 7.0])).toarray()
        array([[2., 5., 0.],
               [5., 2., 7.],
               [0., 7., 2.]], dtype=float32)

    Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., equation 12.33 (with the other sign of λ).
    """
    require_callable("sparse.lagrangian_hessian", objective=objective, constraints=constraints)
    if "argnums" in options:
        raise InputError("sparse.lagrangian_hessian: argnums: expected none, as x comes first, got one; leave it out.")
    return hessian(_Lagrangian(objective, constraints), **options)


class _Lagrangian:
    def __init__(self, objective: Callable[..., Any], constraints: Callable[..., Any]):
        self._objective, self._constraints = objective, constraints

    def __call__(self, x: Any, multipliers: Any, *args: Any) -> Tensor:
        total: Tensor = self._objective(x, *args)
        values, spec = pytree.tree_flatten(self._constraints(x, *args))
        factors, given = pytree.tree_flatten(multipliers)
        if spec != given or any(a.shape != b.shape for a, b in zip(values, factors, strict=True)):
            raise InputError(
                f"sparse.lagrangian_hessian: multipliers: expected one for each constraint, of shapes "
                f"{[tuple(each.shape) for each in values]}, got {[tuple(each.shape) for each in factors]}."
            )
        for value, factor in zip(values, factors, strict=True):
            total = total + (factor * value).sum()
        return total


def _value_and_hessian(
    caller: str,
    f: Callable[..., Any],
    argnums: int,
    pattern: Any,
    coloring: Coloring | None,
    method: str,
    form: str,
    check: bool,
    route: str,
    chunk_size: int | str | None,
    correct: bool,
) -> Callable[..., tuple[Tensor, Any]]:
    require_argnums(caller, argnums)
    require_choice(caller, "method", method, _METHODS)
    require_choice(caller, "format", form, FORMATS)
    require_bool(caller, "check", check)
    validate_route(route, caller)
    require_chunk_size(caller, "chunk_size", chunk_size)
    colorings = Colorings(caller, pattern, coloring, lambda found: color(found, method), _METHODS)

    @at_the_boundary
    def value_and_matrix(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        function = bind(caller, f, args, kwargs, argnums, correct=correct)
        matrix = Hessian(function, route, chunk_size)
        size = sum(leaf.numel() for leaf in function.leaves)
        chosen, values = colorings.entries(
            (args, kwargs),
            lambda: pattern_of_hessian(function),
            (size, size),
            {"columns": matrix.products},
            function.leaves,
            matrix.eps if check else None,
        )
        return matrix.value, chosen.matrix(values, form)

    return value_and_matrix
