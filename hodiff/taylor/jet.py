"""Derivatives of every order along a curve, in one pass, and a report of the functions that have no rule for series."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hodiff.common.options import require_bools, require_callable
from hodiff.common.trees import PyTree, flatten, flatten_tangents, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.jets import new_jet, tensor_of
from hodiff.taylor.passes import framed, primal_leaves, through
from hodiff.taylor.series import HIGHEST, Coefficient, Frame
from hodiff.torch_internals.function_names import function_name


@dataclass(frozen=True)
class Explanation:
    """Report on how the functions of a program are differentiated in Taylor mode.

    Attributes:
        nested: Functions without a rule, which fall back to nested forward mode: number of calls by name.
    """

    nested: dict[str, int]

    def __str__(self) -> str:
        if not self.nested:
            return "every function has a rule: a jet of order K takes K² at most"
        calls = ", ".join(f"{name} ({count})" for name, count in self.nested.items())
        return f"without a rule, by nested forward mode, which takes 2^K: {calls}; see hodiff.taylor.register"


@leave_inference_mode
def explain(f: Callable[..., Any], *primals: Any) -> Explanation:
    """Report which functions called by `f` have no rule for series and fall back to nested forward mode.

    Args:
        f: Function `f(*primals)`.
        *primals: As in `hodiff.taylor.jet`.

    Returns:
        The explanation, which prints as a sentence.

    Raises:
        InputError: If a primal cannot be differentiated.

    Example:
        >>> import torch, hodiff
        >>> print(hodiff.taylor.explain(torch.special.i1, torch.ones(3)))
        without a rule, by nested forward mode, which takes 2^K: special.i1 (1); see hodiff.taylor.register
    """
    require_callable("explain", f=f)
    seen: Counter[str] = Counter()
    with framed(1, observer=lambda function: seen.update([function_name(function)])) as frame:
        curves = []
        for i, primal in enumerate(primals):
            leaves, spec = primal_leaves(primal, "explain", f"primals[{i}]")
            curves.append(unflatten([new_jet(frame, [leaf, leaf]) for leaf in leaves], spec))
        through(frame, f, curves)
    return Explanation(dict(seen))


@leave_inference_mode
def jet(
    f: Callable[..., Any],
    primals: Sequence[PyTree],
    series: Sequence[Sequence[PyTree]],
    *,
    normalized: bool = False,
    correct: bool = True,
) -> tuple[PyTree, tuple[PyTree, ...]]:
    r"""Value of a function and its derivatives to order K along a curve, by one pass over truncated power series.

    $$ x(t) = x_0 + x_1 t + \tfrac{1}{2!} x_2 t^2 + \dots + \tfrac{1}{K!} x_K t^K, \qquad
       y_k = \left.\frac{d^k}{dt^k} f(x(t))\right|_{t=0} $$

    Time and memory grow as K² at most, where nested forward mode takes 2^K. For derivatives along a line,
    $D^k f(x)[v, \dots, v]$, give $x_1 = v$ and zeros after it. Parameters that `f` closes over keep their gradients;
    jets can be taken of jets, inside `torch.func` transforms, and inside `torch.compile`.

    A function without a rule falls back to nested forward mode of that function alone, which takes 2^K;
    `hodiff.taylor.explain` lists such functions. Kinks use torch's derivative, and Python branches use the value.

    Args:
        f: Function `f(*primals)` that returns a tensor or a pytree of tensors.
        primals: Where to differentiate: for each argument of `f` a tensor or a pytree of floating-point or complex
            tensors.
        series: For each primal its derivatives by t, from the first to the K-th, in the structure, shapes and dtypes of
            the primal; the same K for all.
        normalized: Whether series and results are Taylor coefficients, $x_k / k!$, instead of derivatives.
        correct: As in `hodiff.hvp`.

    Returns:
        The pair of $f(x_0)$ and the K derivatives of the output, each in the structure of what `f` returns; zeros where
        it does not depend on the primals.

    Raises:
        InputError: If series are not of one length, or one does not match its primal; if a primal cannot be
            differentiated; if `f` takes a number out of a value that moves, by `float`, `item` or NumPy, or writes
            such a value to a constant tensor.
        RouteError: If `f` calls a Function that has neither a rule for forward mode nor one for series.

    Example:
        >>> import torch, hodiff
        >>> x, one, zero = torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.0)
        >>> hodiff.taylor.jet(lambda x: x**3, (x,), ([one, zero, zero],))
        (tensor(8.), (tensor(12.), tensor(12.), tensor(6.)))

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., chapter 13; the arguments have the same
    meaning as in `jax.experimental.jet`.
    """
    require_callable("jet", f=f)
    require_bools("jet", normalized=normalized, correct=correct)
    primals, order = _paired(primals, series)
    if order > HIGHEST and not normalized:
        raise InputError(
            f"jet: series: expected at most {HIGHEST} derivatives, as larger factorials are no floating-point numbers, "
            f"got {order}; pass Taylor coefficients and normalized=True."
        )
    with framed(order, correct=correct) as frame:
        curves = [
            _curve(frame, i, x, terms, normalized) for i, (x, terms) in enumerate(zip(primals, series, strict=True))
        ]
        found, spec = through(frame, f, curves)
    value = unflatten([each[0] for each in found], spec)
    terms = tuple(
        unflatten([_derivative(each, k, 1 if normalized else float(math.factorial(k))) for each in found], spec)
        for k in range(1, order + 1)
    )
    return value, terms


def _paired(primals: Any, series: Any) -> tuple[tuple[PyTree, ...], int]:
    """Validate primals and series; return the primals and the order."""
    for name, given in (("primals", primals), ("series", series)):
        if not isinstance(given, (tuple, list)):
            raise InputError(
                f"jet: {name}: expected a tuple with one entry for each argument of f, got {type(given).__name__}; "
                "write (x,) and ([v],) for one argument."
            )
    if len(primals) != len(series):
        raise InputError(f"jet: series: expected one for each of {len(primals)} primals, got {len(series)}.")
    for i, each in enumerate(series):
        if not isinstance(each, (tuple, list)):
            raise InputError(f"jet: series[{i}]: expected a list of derivatives, got {type(each).__name__}; write [v].")
    orders = sorted({len(each) for each in series})
    if len(orders) != 1:
        raise InputError(
            f"jet: series: expected lists of one length, the order, got {orders or 'none'}; fill up with zeros."
        )
    return tuple(primals), orders[0]


def _curve(frame: Frame, i: int, primal: PyTree, terms: Sequence[PyTree], normalized: bool) -> PyTree:
    """Return a primal with its leaves replaced by jets."""
    leaves, spec = primal_leaves(primal, "jet", f"primals[{i}]")
    columns: list[list[Coefficient]] = [[leaf] for leaf in leaves]
    for k, term in enumerate(terms, start=1):
        given = flatten(term)[0]
        flatten_tangents(
            unflatten([tensor_of(each) for each in given], flatten(term)[1]),
            [tensor_of(leaf) for leaf in leaves],
            spec,
            f"jet: series[{i}][{k - 1}]",
        )
        scale = 1 if normalized else float(math.factorial(k))
        for column, each in zip(columns, given, strict=True):
            column.append(each if scale == 1 else each / scale)
    return unflatten([new_jet(frame, column) for column in columns], spec)


def _derivative(coefficients: Sequence[Coefficient], k: int, scale: float) -> Any:
    found = coefficients[k]
    if found is None:
        return torch.zeros_like(coefficients[0])
    return found if scale == 1 else found * scale
