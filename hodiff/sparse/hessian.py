"""Sparse Hessians, and the options of each, with their types, defaults, explanations and validators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypedDict

from torch import Tensor
from typing_extensions import Unpack

from hodiff.common.chunks import require_chunk_size
from hodiff.common.keyword_options import Default, explains, shows, with_defaults
from hodiff.common.options import require_bool, require_callable, require_choice
from hodiff.common.trees import describe, flatten, leaf_names
from hodiff.derivatives.bound_function import at_the_boundary, bind, require_argnums
from hodiff.derivatives.route_choice import refused, validate_route
from hodiff.errors import InputError
from hodiff.routes import ROUTES
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.compressed_patterns import FORMATS
from hodiff.sparse.detection.patterns import pattern_of_hessian
from hodiff.sparse.recovery.coloring_choice import Colorings
from hodiff.sparse.recovery.compressed_products import CompiledAtPoint, CompiledHessian, Hessian
from hodiff.torch_internals.wording import Wording, says

METHODS = ("star", "acyclic")


def _validated_elsewhere(caller: str, name: str, value: Any) -> None:
    """Accept any value: patterns and colorings are validated where they are used."""


def _require_route(caller: str, name: str, value: Any) -> None:
    validate_route(value, caller)


class HessianOptions(TypedDict, total=False):
    """Options of every sparse Hessian, which do not depend on the differentiated function."""

    pattern: Annotated[
        Any,
        Default(None, "Pattern of the Hessian, if it is known, in any form that `hodiff.sparse.color` accepts."),
        _validated_elsewhere,
    ]
    coloring: Annotated[
        Coloring | None,
        Default(
            None,
            'Coloring of the pattern, computed before: `hodiff.sparse.color(pattern)` with method "star" or "acyclic".',
        ),
        _validated_elsewhere,
    ]
    method: Annotated[
        str,
        Default(
            "star",
            'Method of coloring: "star" reads entries directly from the products; "acyclic" computes them by '
            "substitution, from about half as many products, with more rounding.",
        ),
        partial(require_choice, choices=METHODS),
    ]
    format: Annotated[
        str,
        Default(
            "csr",
            '"csr" or "coo" for a sparse tensor; "scipy" for a `csr_array`; or "values" for the entries alone in '
            "the order of compressed rows, which support derivatives of every kind.",
        ),
        partial(require_choice, choices=FORMATS),
    ]
    check: Annotated[
        bool,
        Default(
            True,
            "Whether to compare the matrix with one more product, with a random vector, which shows entries "
            "outside of the pattern. If there are any, a detected pattern is detected again, and a given pattern "
            "is refused. Skipped inside transforms of torch.func.",
        ),
        require_bool,
    ]
    compile: Annotated[
        bool,
        Default(
            False,
            "Whether to compile the gradient and all products as one graph with `torch.compile`, as "
            "`hodiff.compile_gradient` does: several times faster after a first call, which takes seconds and is "
            "compared with eager. The results have no derivatives of their own.",
        ),
        require_bool,
    ]
    route: Annotated[str, Default("auto", "As in `hodiff.hvp`; not together with `compile`."), _require_route]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'Number of products that are computed together: a positive int, None for all, or "auto" for as many '
            "as keep intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    correct: Annotated[bool, Default(True, "As in `hodiff.hvp`."), require_bool]


@outside_graphs
@explains(HessianOptions)
@shows(HessianOptions)
def hessian(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    **options: Unpack[HessianOptions],
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
            the pattern. If there are any, a detected pattern is detected again, and a given pattern is refused. Skipped
            inside transforms of torch.func.
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
    given = with_defaults(hessian, HessianOptions, options, caller="sparse.hessian")
    evaluate = _evaluation("sparse.hessian", f, argnums, given)
    return outside_graphs(lambda *args, **kwargs: evaluate(args, kwargs)[1])


@outside_graphs
@shows(HessianOptions)
def value_and_hessian(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    **options: Unpack[HessianOptions],
) -> Callable[..., tuple[Tensor, Any]]:
    r"""Function that computes the value and the sparse Hessian of a scalar function: $(f(x), \nabla^2 f(x))$.

    Args:
        f: As in `hodiff.sparse.hessian`.
        argnums: As in `hodiff.sparse.hessian`.
        **options: As in `hodiff.sparse.hessian`.

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
    given = with_defaults(value_and_hessian, HessianOptions, options, caller="sparse.value_and_hessian")
    evaluate = _evaluation("sparse.value_and_hessian", f, argnums, given)

    @outside_graphs
    def value_and_matrix(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        found, matrix = evaluate(args, kwargs)
        return found.value, matrix

    return value_and_matrix


@outside_graphs
@shows(HessianOptions)
def lagrangian_hessian(
    objective: Callable[..., Any],
    constraints: Callable[..., Any],
    **options: Unpack[HessianOptions],
) -> Callable[..., Any]:
    r"""Function that computes the sparse Hessian of a Lagrangian, $\nabla^2_x \left[ f(x) + \lambda^\top c(x) \right]$.

    The pattern holds for all multipliers, so that one coloring serves all iterations of a solver.

    Args:
        objective: Function `f(x, *args)` that returns a tensor of shape ().
        constraints: Function `c(x, *args)` that returns a tensor of any shape, or a pytree of tensors.
        **options: Options of `hodiff.sparse.hessian`, except `argnums`.

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
    if "argnums" in options:
        raise InputError("sparse.lagrangian_hessian: argnums: expected none, as x comes first, got one; leave it out.")
    return hessian(_Lagrangian(objective, constraints), **options)


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
    caller: str, f: Callable[..., Any], argnums: int | tuple[int, ...], options: Mapping[str, Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Hessian | CompiledAtPoint, Any]]:
    """Return a function of arguments and keywords that returns the products at a point and the matrix."""
    require_callable(caller, f=f)
    require_argnums(caller, argnums)
    method, correct, check = options["method"], options["correct"], options["check"]
    colorings = Colorings(caller, options["pattern"], options["coloring"], lambda found: color(found, method), METHODS)
    compiled = CompiledHessian(caller, f, argnums, correct) if options["compile"] else None
    if compiled is not None and options["route"] not in ("auto", ROUTES[0]):
        raise InputError(
            f"{caller}: route: expected 'auto' or {ROUTES[0]!r} beside compile=True, got {options['route']!r}; leave "
            f"one of them out."
        )

    @at_the_boundary
    def evaluate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hessian | CompiledAtPoint, Any]:
        function = bind(caller, f, args, kwargs, argnums, correct=correct)
        products: Hessian | CompiledAtPoint
        try:
            if compiled is None:
                products = Hessian(function, options["route"], options["chunk_size"])
            else:
                products = compiled.at(function, args, kwargs, options["chunk_size"])
        except RuntimeError as error:
            if says(error, Wording.NO_NUMBERS):  # the error of pattern detection shows where
                pattern_of_hessian(function)
            raise
        size = sum(leaf.numel() for leaf in function.leaves)
        with refused(caller):
            chosen, values = colorings.entries(
                (args, kwargs),
                lambda: pattern_of_hessian(function),
                (size, size),
                {"columns": products.products},
                function.leaves,
                products.eps if check else None,
            )
        return products, chosen.matrix(values, options["format"])

    return evaluate
