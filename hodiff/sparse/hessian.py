"""Sparse Hessians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hodiff.common.options import require_bools, require_callable, require_choice, require_chunk_size
from hodiff.common.trees import describe, flatten, leaf_names
from hodiff.derivatives.bound_function import at_the_boundary, bind, require_argnums
from hodiff.derivatives.route_choice import refused, require_route
from hodiff.errors import InputError
from hodiff.routes import ROUTES
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.compressed_patterns import FORMATS
from hodiff.sparse.detection.patterns import Detection, pattern_of_hessian
from hodiff.sparse.recovery.coloring_choice import Colorings
from hodiff.sparse.recovery.compressed_products import CompiledAtPoint, CompiledHessian, Hessian
from hodiff.torch_internals.autograd.grad_mode import saving_unhooked
from hodiff.torch_internals.wording import Wording, says

METHODS = ("star", "acyclic")


@dataclass(frozen=True)
class _Options:
    """Options of every sparse Hessian; `hessian` explains them, and patterns and colorings are validated on use."""

    caller: str
    pattern: Any
    coloring: Coloring | None
    method: str
    format: str
    check: bool
    compile: bool
    route: str
    chunk_size: int | str | None
    correct: bool

    def __post_init__(self) -> None:
        require_choice(self.caller, "method", self.method, METHODS)
        require_choice(self.caller, "format", self.format, FORMATS)
        require_route(self.caller, self.route)
        require_chunk_size(self.caller, "chunk_size", self.chunk_size)
        require_bools(self.caller, check=self.check, compile=self.compile, correct=self.correct)
        if self.compile and self.route not in ("auto", ROUTES[0]):
            raise InputError(
                f"{self.caller}: route: expected 'auto' or {ROUTES[0]!r} with compile=True, got {self.route!r}; omit "
                "one of them."
            )


@outside_graphs
def hessian(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    pattern: Any = None,
    coloring: Coloring | None = None,
    method: str = "star",
    format: str = "csr",
    check: bool = True,
    compile: bool = False,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the sparse Hessian of a scalar function, from one product for each color.

    $$ B = \nabla^2 f(x)\, S, \qquad S \in \{0, 1\}^{n \times c}, \qquad H_{ij} \text{ from } B $$

    Columns of one color share a product: c products instead of n, all from one recorded gradient. The first call finds
    the pattern (`hessian_pattern`) and colors it (`color`); the coloring is cached for arguments of the same shapes.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape ().
        argnums: Which positional argument to differentiate, or which ones: tensors or pytrees of n numbers in all.
        pattern: Pattern of the Hessian, if it is known, in any form that `hodiff.sparse.color` accepts.
        coloring: Coloring of the pattern, computed before: `hodiff.sparse.color(pattern)` with method "star" or
            "acyclic".
        method: Method of coloring: "star" reads entries directly from the products; "acyclic" computes them by
            substitution, from about half as many products, with more rounding.
        format: "csr" or "coo" for a sparse tensor; "scipy" for a `csr_array`; or "values" for the entries alone in the
            order of compressed rows, which support derivatives of every kind.
        check: Whether to compare the matrix with one more product, with a random vector, which shows entries outside of
            the pattern that exceed about 2e-12 of their row's size in float64, 6e-6 in float32. If there are any, a
            detected pattern is detected again, and a given pattern is refused. Skipped inside transforms of torch.func.
        compile: Whether to compile the gradient and all products as one graph with `torch.compile`, as
            `hodiff.compile_gradient` does: several times faster after a first call, which takes seconds and is compared
            with eager. The results have no derivatives of their own.
        route: As in `hodiff.hvp`; not together with `compile`.
        chunk_size: Number of products that are computed together: a positive int, None for all, or "auto" for as many
            as keep intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the matrix (n, n), leaves flattened in pytree order. It raises
        `InputError` where `hessian_pattern` does, where a given pattern has another size or lacks entries, and what
        `hodiff.hvp` raises.

    Raises:
        InputError: If an argument is invalid, or the pattern cannot be colored.

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
    options = _Options("sparse.hessian", pattern, coloring, method, format, check, compile, route, chunk_size, correct)
    evaluate = _evaluation(f, argnums, options)
    return outside_graphs(lambda *args, **kwargs: evaluate(args, kwargs)[1])


@outside_graphs
def value_and_hessian(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    pattern: Any = None,
    coloring: Coloring | None = None,
    method: str = "star",
    format: str = "csr",
    check: bool = True,
    compile: bool = False,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    correct: bool = True,
) -> Callable[..., tuple[Tensor, Any]]:
    r"""Function that computes the value and the sparse Hessian of a scalar function: $(f(x), \nabla^2 f(x))$.

    Args:
        f: As in `hodiff.sparse.hessian`.
        argnums: As in `hodiff.sparse.hessian`.
        pattern: As in `hodiff.sparse.hessian`.
        coloring: As in `hodiff.sparse.hessian`.
        method: As in `hodiff.sparse.hessian`.
        format: As in `hodiff.sparse.hessian`.
        check: As in `hodiff.sparse.hessian`.
        compile: As in `hodiff.sparse.hessian`.
        route: As in `hodiff.sparse.hessian`.
        chunk_size: As in `hodiff.sparse.hessian`.
        correct: As in `hodiff.sparse.hessian`.

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
    options = _Options(
        "sparse.value_and_hessian", pattern, coloring, method, format, check, compile, route, chunk_size, correct
    )
    evaluate = _evaluation(f, argnums, options)

    @outside_graphs
    def value_and_matrix(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        found, matrix = evaluate(args, kwargs)
        return found.value, matrix

    return value_and_matrix


@outside_graphs
def lagrangian_hessian(
    objective: Callable[..., Any],
    constraints: Callable[..., Any],
    *,
    pattern: Any = None,
    coloring: Coloring | None = None,
    method: str = "star",
    format: str = "csr",
    check: bool = True,
    compile: bool = False,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the sparse Hessian of a Lagrangian, $\nabla^2_x \left[ f(x) + \lambda^\top c(x) \right]$.

    The pattern holds for all multipliers, so that one coloring serves all iterations of a solver.

    Args:
        objective: Function `f(x, *args)` that returns a tensor of shape ().
        constraints: Function `c(x, *args)` that returns a tensor of any shape, or a pytree of tensors.
        pattern: As in `hodiff.sparse.hessian`.
        coloring: As in `hodiff.sparse.hessian`.
        method: As in `hodiff.sparse.hessian`.
        format: As in `hodiff.sparse.hessian`.
        check: As in `hodiff.sparse.hessian`.
        compile: As in `hodiff.sparse.hessian`.
        route: As in `hodiff.sparse.hessian`.
        chunk_size: As in `hodiff.sparse.hessian`.
        correct: As in `hodiff.sparse.hessian`.

    Returns:
        Function `(x, multipliers, *args)` that returns the matrix (n, n); multipliers have the structure and
        shapes of what `constraints` returns.

    Raises:
        InputError: As `hodiff.sparse.hessian`; or, when the function is called, if the multipliers do not match.

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
    options = _Options(
        "sparse.lagrangian_hessian", pattern, coloring, method, format, check, compile, route, chunk_size, correct
    )
    evaluate = _evaluation(_Lagrangian(objective, constraints), 0, options)
    return outside_graphs(lambda *args, **kwargs: evaluate(args, kwargs)[1])


class _Lagrangian:
    def __init__(self, objective: Callable[..., Any], constraints: Callable[..., Any]):
        self._objective, self._constraints = objective, constraints

    def __call__(self, x: Any, multipliers: Any, *args: Any, **kwargs: Any) -> Tensor:
        total: Tensor = self._objective(x, *args, **kwargs)
        values, factors = self._constraints(x, *args, **kwargs), multipliers
        by_name, given = (dict(zip(leaf_names(each), flatten(each)[0], strict=True)) for each in (values, factors))
        # Match leaves by name, because dictionaries may have their keys in any order.
        if _shapes(by_name) != _shapes(given):
            raise InputError(
                f"sparse.lagrangian_hessian: multipliers: expected {_described(by_name)}, as the constraints are, got "
                f"{_described(given)}."
            )
        for name, value in by_name.items():
            total = total + (given[name] * value).sum()
        return total


def _shapes(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {name: leaf.shape if isinstance(leaf, Tensor) else None for name, leaf in leaves.items()}


def _described(leaves: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {describe(leaf)}".strip() for name, leaf in leaves.items()) or "nothing"


def _evaluation(
    f: Callable[..., Any], argnums: int | tuple[int, ...], options: _Options
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Hessian | CompiledAtPoint, Any]]:
    """Return a function of arguments and keywords that returns the products at a point and the matrix."""
    caller, method = options.caller, options.method
    require_callable(caller, f=f)
    require_argnums(caller, argnums)
    colorings = Colorings(caller, options.pattern, options.coloring, lambda found: color(found, method), METHODS)
    detected = Detection(pattern_of_hessian, options.check)
    compiled = CompiledHessian(caller, f, argnums, options.correct) if options.compile else None

    @at_the_boundary
    @saving_unhooked()  # the passes inside would start the recomputation of a checkpoint around the call
    def evaluate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hessian | CompiledAtPoint, Any]:
        function = bind(caller, f, args, kwargs, argnums, correct=options.correct)
        products: Hessian | CompiledAtPoint
        try:
            if compiled is None:
                products = Hessian(function, options.route, options.chunk_size)
            else:
                products = compiled.at(function, args, kwargs, options.chunk_size)
        except RuntimeError as error:
            if says(error, Wording.NO_NUMBERS):  # the error of pattern detection shows where
                pattern_of_hessian(function)
            raise
        size = sum(leaf.numel() for leaf in function.leaves)
        with refused(caller):
            chosen, values = colorings.entries(
                (args, kwargs),
                lambda: detected(function),
                (size, size),
                {"columns": products.products},
                function.leaves,
                products.eps if options.check else None,
            )
        return products, chosen.matrix(values, options.format)

    return evaluate
