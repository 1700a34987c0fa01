"""`check`: every comparison that can be made of one function at one point."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hodiff.checks.batching import batching_checks
from hodiff.checks.comparison import Failure, attempt
from hodiff.checks.compiled import compile_checks
from hodiff.checks.diagnosis import diagnose
from hodiff.checks.quiet import quiet
from hodiff.checks.report import Entry, Report
from hodiff.checks.routes import against_differences, against_scipy, between_routes, climb, in_own_dtype
from hodiff.checks.scalarize import Problem, build
from hodiff.checks.torch_checks import torch_checks
from hodiff.errors import InputError

_DOUBLE = torch.finfo(torch.float64).eps


def check(
    f: Callable[..., Any] | type[torch.autograd.Function],
    inputs: Any,
    *,
    order: int = 2,
    vmap: bool = True,
    compile: bool | str = False,
    scipy: bool = True,
    seed: int = 0,
) -> Report:
    r"""Check the derivatives of a function at a point by every route against independent ones.

    A derivative is trusted when independent routes to it agree. The output is contracted with a random
    cotangent, and the input is moved along random directions (all of them for at most 12 numbers),

    .. math:: \phi(t) = \sum_i \langle u_i, f_i(x + V t) \rangle,

    and :math:`D^k \phi(0)` is taken by all ``2**k`` compositions of reverse and forward passes for each order
    k up to ``order``. They are compared with extrapolated differences of the order below, with each other, at
    second order with SciPy's Hessian of values only, and once more in a curved loss, whose incoming gradient
    depends on the input. ``torch.autograd.gradcheck`` and ``gradgradcheck`` run with each switch on,
    ``torch.func.vmap`` is compared with a loop, and ``torch.compile`` with eager code. The truth is float64;
    inputs of another dtype are checked in it as well. An f with ``approximate`` and ``derivative_error``, as
    `hodiff.functions.numpy_function` makes them, has its own estimate among the notes.

    The error of a comparison is the largest absolute difference over the largest element of the truth, and

    .. math:: \text{tolerance} = k \sqrt{\varepsilon} + 10 \, \text{oracle error} / \text{scale},

    with :math:`\varepsilon` of the coarsest dtype involved; the oracle states its own error. Everything is
    reproducible from ``seed``; global random state is untouched.

    Args:
        f: A function of tensors, or a ``torch.autograd.Function`` subclass, whose ``apply`` is checked. It must
            be deterministic and leave its inputs alone. Perturbations know no symmetry: let f symmetrize.
            All its floating-point outputs count as differentiable.
        inputs: A tensor, or a tuple of arguments: tensors, pytrees of tensors, or constants, which are passed
            through. All floating-point tensors are differentiated, integer tensors are constants.
        order: Highest order of derivative, at least 1.
        vmap: Whether to check batching.
        compile: Whether to check ``torch.compile``, or the name of the backend to use. Resets its caches.
        scipy: Whether to run SciPy's oracle, which evaluates f some thousand times.
        seed: Seed of the cotangent, the directions and the batches.

    Returns:
        A report: its ``str`` is a table with findings, ``ok`` says whether there are none.

    Raises:
        InputError: If the arguments leave nothing to check; the message says why.

    Example:
        >>> import torch
        >>> report = check(torch.sin, torch.tensor([0.5, 2.0], dtype=torch.float64))
        >>> report.ok
        True
        >>> class Square(torch.autograd.Function):
        ...     generate_vmap_rule = True
        ...
        ...     @staticmethod
        ...     def forward(x):
        ...         return x**2
        ...
        ...     @staticmethod
        ...     def setup_context(ctx, inputs, output):
        ...         ctx.slope = 2 * inputs[0].detach()
        ...
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         return ctx.slope * g
        >>> report = check(Square, torch.tensor([0.5, 2.0]))
        >>> [finding.kind for finding in report.findings if finding.route == "reverse-over-reverse"]
        ['zero']

    Source:
        A. Griewank & A. Walther, Evaluating Derivatives, 2nd ed., 2008; C. J. F. Ridders (1982) for the
        differences.
    """
    function = _require_callable(f)
    _require_order(order)
    args = inputs if type(inputs) is tuple else (inputs,)
    generator = torch.Generator().manual_seed(seed)
    backend = compile if isinstance(compile, str) else "inductor" * compile
    with quiet():
        problem = build(function, args, generator)
        entries = tuple(_entries(problem, order, vmap, backend, scipy, seed, generator))
        notes = tuple(_stated_errors(f, args, order))
    return Report(_title(f, problem), entries, diagnose(entries), notes)


def _entries(
    own: Problem, order: int, vmap: bool, backend: str, scipy: bool, seed: int, generator: torch.Generator
) -> Iterator[Entry]:
    problem, trouble = _in_double(own)
    if trouble:
        yield Entry("f", 0, "float64", None, None, "float64", trouble)
    levels = climb(problem, problem.loss, order, generator)
    size = max(level.scale for level in levels)
    yield from against_differences(levels, order)
    yield from between_routes(levels)
    if scipy:
        yield from against_scipy(problem, problem.loss, levels, generator)
    curved = climb(problem, problem.curved_loss, order, generator)
    yield from against_differences(curved, order, "curved loss")
    if own.eps > problem.eps:
        yield from in_own_dtype(own, own.loss, levels, _dtypes(own))
    if not trouble:
        yield from torch_checks(problem, order, vmap, seed)
    if vmap:
        yield from batching_checks(problem, order, size, generator)
    if backend:
        yield from compile_checks(problem, order, size, backend, generator)


def _stated_errors(f: Any, args: tuple[Any, ...], order: int) -> Iterator[str]:
    """What a function that takes derivatives by differences knows of their error, as `numpy_function` does."""
    if not getattr(f, "approximate", False) or not hasattr(f, "derivative_error"):
        return
    for k in range(1, order + 1):
        error = attempt(partial(f.derivative_error, order=k), *args)
        if not isinstance(error, Failure) and error > 0:
            yield f"derivatives of order {k} come from differences, with an estimated absolute error of {error:.1e}"


def _in_double(own: Problem) -> tuple[Problem, str]:
    """Fall back to a coarser rounding, and say so, where f cannot compute in float64."""
    double = attempt(own.in_double)
    if isinstance(double, Failure):
        return own, f"f raises for float64 inputs: {double.message}"
    if double.eps > _DOUBLE:
        return own, "f returns a lower precision than float64 for float64 inputs"
    if attempt(double.is_coarse) is True:
        coarse = replace(double, eps=max(own.eps, torch.finfo(torch.float32).eps))
        return coarse, "f returns float64, but does not notice changes that float64 can hold"
    return double, ""


def _dtypes(problem: Problem) -> str:
    return "in " + "/".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in problem.leaves}))


def _require_callable(f: Any) -> Callable[..., Any]:
    if isinstance(f, type) and issubclass(f, torch.autograd.Function):
        return f.apply
    if not callable(f):
        raise InputError(
            "check: f: expected a callable or a torch.autograd.Function subclass, "
            f"got {type(f).__name__}. Pass the function itself, not its result."
        )
    return f


def _require_order(order: Any) -> None:
    if not isinstance(order, int) or isinstance(order, bool) or order < 1:
        raise InputError(f"check: order: expected a positive integer, got {order!r}.")


def _title(f: Any, problem: Problem) -> str:
    name = getattr(f, "__name__", type(f).__name__)
    shapes = ", ".join(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" for a in problem.leaves)
    return f"{name} at {shapes}"
