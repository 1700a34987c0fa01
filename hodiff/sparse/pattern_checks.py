"""Verification of a sparsity pattern by products with random vectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hodiff.common.options import require_choice, require_generator, require_int
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.route_choice import refused
from hodiff.errors import HodiffWarning, InputError
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse.coloring import color
from hodiff.sparse.recovery.coloring_choice import require_shape
from hodiff.sparse.recovery.compressed_products import Hessian, Jacobian
from hodiff.sparse.recovery.recover import compare, recover, require_whole
from hodiff.torch_internals.tensors import has_numbers

_COLORED = {"hessian": "star", "jacobian": "columns"}


@outside_graphs
@at_the_boundary
def check_pattern(
    f: Callable[..., Any],
    x: PyTree,
    pattern: Any,
    *args: Any,
    of: str = "hessian",
    probes: int = 1,
    generator: torch.Generator | None = None,
) -> None:
    r"""Check that a pattern has all entries of a Hessian or a Jacobian, by products with random vectors.

    The matrix is recovered from the pattern's coloring, and its product with a random vector is compared with the
    derivative's own product. They differ, with probability one, if an entry is missing. Rows in which the derivative
    is not finite cannot be checked; a `HodiffWarning` counts them.

    Args:
        f: As in `hodiff.sparse.hessian`; or with `of="jacobian"` as in `hodiff.sparse.jacobian`.
        x: Where to differentiate.
        pattern: The pattern, in a form that `color` takes.
        *args: Further arguments of `f`, constants.
        of: "hessian" or "jacobian".
        probes: Number of random vectors.
        generator: Random number generator of the vectors; None for the same vectors each time.

    Raises:
        InputError: If the pattern has another size, or lacks entries; the message names rows that do.

    Example:
        >>> import numpy as np, torch, hodiff
        >>> hodiff.sparse.check_pattern(lambda x: (x**3).sum(), torch.ones(3), np.eye(3, dtype=bool))
        >>> hodiff.sparse.check_pattern(lambda x: x.prod(), torch.ones(3), np.eye(3, dtype=bool))
        Traceback (most recent call last):
        ...
        hodiff.errors.InputError: check_pattern: pattern: expected ...

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 7.1, which asks for it.
    """
    require_choice("check_pattern", "of", of, _COLORED)
    require_int("check_pattern", "probes", probes, least=1)
    require_generator("check_pattern", "generator", generator)
    function = bind("check_pattern", f, (x, *args), name="x")
    coloring = color(pattern, _COLORED[of])
    leaves = function.leaves
    for leaf in leaves:
        if not has_numbers(leaf):
            raise InputError(
                f"check_pattern: x: expected a tensor with numbers, outside of traces, got {type(leaf).__name__} "
                f"{describe(leaf)}, which has no values to compare; pass a tensor with values."
            )
    if of == "hessian":
        hessian = Hessian(function, "auto", "auto")
        products, results, eps = hessian.products, leaves, hessian.eps
    else:
        jacobian = Jacobian(function, "auto")
        products, results, eps = jacobian.products, tuple(jacobian.outputs), jacobian.eps
    height = sum(y.numel() for y in results)
    require_shape("check_pattern", coloring, (height, sum(leaf.numel() for leaf in leaves)))
    with torch.no_grad(), refused("check_pattern"):
        multiply = {"columns": products}
        values, off = recover(coloring, multiply, leaves, eps)
        require_whole("check_pattern", "pattern", coloring, off)
        generator = generator or torch.Generator().manual_seed(1)
        size = probes, coloring.shape[1]
        vectors = torch.randn(size, generator=generator, dtype=torch.float64, device=generator.device)
        vectors = vectors.to(values)
        for vector, product in zip(vectors, products(vectors), strict=True):
            off = compare(coloring, multiply, values, vector, product, eps)
            require_whole("check_pattern", "pattern", coloring, off)
    unchecked = 0 if off is None else len(off.unjudged) + len(off.reached)
    if unchecked:
        warnings.warn(
            f"check_pattern: x: expected a point where the derivative is finite, got one where it is not in "
            f"{unchecked:,} row(s), which cannot be checked; pass another point.",
            HodiffWarning,
            stacklevel=3,
        )
