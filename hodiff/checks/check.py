"""`check`: every comparison that can be made of one function at one point, and what is wrong if they disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hodiff.checks.arguments import (
    devices_of,
    dtypes_of,
    name_of,
    require_callable,
    require_method,
    require_order,
    require_reference,
    require_ulps,
    title_of,
)
from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.compiled import compile_checks
from hodiff.checks.comparisons.gradchecks import gradchecks
from hodiff.checks.comparisons.low_precision import against_reference, noise_note, reference_problem, with_truth
from hodiff.checks.comparisons.orders import (
    Level,
    against_differences,
    against_scipy,
    between_routes,
    climb,
    in_own_dtype,
)
from hodiff.checks.comparisons.scalarize import ScalarProblem, UnrepeatableError, scalarize
from hodiff.checks.comparisons.surrogates import between_claims, declares_surrogate, gap, stated_errors, unjudged
from hodiff.checks.comparisons.vmapped import vmap_checks
from hodiff.checks.findings.diagnosis import diagnose
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.probes.function_calls import FunctionCall, function_calls
from hodiff.checks.probes.probe import probe
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Report
from hodiff.checks.source_lines import class_location
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.errors import InputError

_DOUBLE = torch.finfo(torch.float64).eps
# What a function with a reference does not promise: to compute in float64.
_OF_DOUBLE = {"HD306"}


def check(
    f: Callable[..., Any] | type[torch.autograd.Function],
    inputs: Any,
    *,
    order: int = 2,
    vmap: bool = True,
    compile: bool | str = False,
    scipy: bool = True,
    seed: int = 0,
    approximate: bool = False,
    reference: Callable[..., Any] | None = None,
    ulps: float | None = None,
    method: str = "auto",
    loss: Callable[..., Any] | None = None,
) -> Report:
    r"""Check the derivatives of a function at a point by every route against independent ones.

    A derivative is trusted when independent routes to it agree. The output is contracted with a random
    cotangent, and the input is moved along a few random directions (along every element for at most 12 numbers),

    .. math:: \phi(t) = \sum_i \langle u_i, f_i(x + V t) \rangle,

    and :math:`D^k \phi(0)` is taken by all ``2**k`` compositions of reverse and forward passes for each order
    k up to ``order``. They are compared with extrapolated differences of the order below, with each other, at
    second order with SciPy's Hessian of values only, and once more in a curved loss, whose incoming gradient
    depends on the input. ``torch.autograd.gradcheck`` and ``gradgradcheck`` run with each switch on,
    ``torch.func.vmap`` is compared with a loop, and ``torch.compile`` with eager code. The truth is float64;
    inputs of another dtype are checked in it as well. An f with ``approximate`` and ``derivative_error``, as
    `hodiff.functions.numpy_function` makes them, has its own estimate among the notes.

    The rules of each custom Function in f are then called by hand: their saved tensors, what comes in and what they
    return are looked at, moved, laid out differently and poisoned, so that each defect has a cause, a line of the
    source, and a remedy; `hodiff.checks.codes` lists them. What follows from a cause is not a finding of its own.

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
        seed: Seed of the cotangent, the directions and the batches, and of what f itself draws in its rules.
        approximate: Whether f declares derivatives that are not its own. Its routes are compared with each other, and
            the gap to differences is a note. An f with ``approximate = True``, or made by `hodiff.straight_through`,
            says so itself.
        reference: The same function for float64, for an f that computes in a lower precision only: value and
            derivatives are compared with it. It is called with float64 tensors only.
        ulps: Error that is allowed then, relative to the largest element, in units of f's rounding. By default, half
            of the digits for each order.
        method: ``"matrices"`` moves the input along every element, ``"directions"`` along a few random directions;
            ``"auto"`` takes matrices for at most 12 numbers.
        loss: For an f that is a ``torch.nn.Module``: maps its output to a number. The module's parameters are
            differentiated too, and the submodule at fault is named.

    Returns:
        A report: its ``str`` is a table with findings, ``ok`` says whether none is an error.

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
        >>> report.codes
        ('HD304', 'HD401')
        >>> report.findings[0].evidence[0]
        'Square keeps ctx.slope'

    Source:
        A. Griewank & A. Walther, Evaluating Derivatives, 2nd ed., 2008; C. J. F. Ridders (1982) for the
        differences.
    """
    function = require_callable(f)
    require_order(order)
    require_method(method)
    require_ulps(ulps, reference)
    if loss is not None:
        return _check_module(
            f,
            inputs,
            loss,
            order=order,
            vmap=vmap,
            compile=compile,
            scipy=scipy,
            seed=seed,
            approximate=approximate,
            reference=reference,
            ulps=ulps,
            method=method,
        )
    reference = require_reference(reference, approximate)
    args = inputs if type(inputs) is tuple else (inputs,)
    generator = torch.Generator().manual_seed(seed)
    switches = _Switches(order, vmap, compile if isinstance(compile, str) else "inductor" * compile, scipy, seed)
    with silence_torch_warnings(), torch.random.fork_rng(devices_of(args)):
        torch.manual_seed(seed)
        try:
            problem = scalarize(function, args, generator, method)
        except UnrepeatableError as unrepeatable:
            cause = Cause("HD903", (str(unrepeatable),), no_entry, class_location(f))
            return Report(name_of(f), (), diagnose((), [cause]))
        if reference is not None:
            truth = reference_problem(problem, reference, args, generator)
            return _by_reference(f, args, problem, reference, truth, switches, ulps, generator)
        return _by_routes(f, args, problem, switches, approximate, generator)


@dataclass(frozen=True)
class _Switches:
    """What to compare."""

    order: int
    vmap: bool
    backend: str
    scipy: bool
    seed: int


def _by_routes(
    f: Any,
    args: tuple[Any, ...],
    own: ScalarProblem,
    switches: _Switches,
    approximate: bool,
    generator: torch.Generator,
) -> Report:
    problem, trouble = _in_double(own)
    surrogate = approximate or declares_surrogate(f, problem.function, problem.leaves)
    levels = climb(problem, problem.loss, switches.order, generator)
    entries = list(_entries(own, problem, trouble, levels, switches, surrogate, generator))
    calls = attempt(function_calls, problem.function, problem.leaves, f)
    calls = [] if isinstance(calls, Failure) else calls
    causes = probe(
        *(f, args, problem.function, problem.leaves, calls),
        approximate=surrogate,
        seed=switches.seed,
        vmap=switches.vmap,
    )
    if surrogate:
        entries = list(unjudged(entries))
        causes.append(gap(entries))
    settled = frozenset(level.order for level in levels if level.settled)
    findings = diagnose(entries, causes, facts=_facts(f, calls), settled=settled, location=class_location(f))
    return Report(title_of(f, own), tuple(entries), findings, tuple(stated_errors(f, args, switches.order)))


def _by_reference(
    f: Any,
    args: tuple[Any, ...],
    own: ScalarProblem,
    reference: Callable[..., Any],
    truth: ScalarProblem,
    switches: _Switches,
    ulps: float | None,
    generator: torch.Generator,
) -> Report:
    """A float64 twin is the truth; what needs float64 inside f is left out."""
    levels = climb(truth, truth.loss, switches.order, generator)
    entries = against_reference(own, truth, levels, switches.order, ulps, generator)
    size = max([1e-300, *(float(y.abs().max()) for y in own.function(*own.leaves) if y.numel())])
    if switches.vmap:
        entries += vmap_checks(own, switches.order, size, generator)
    calls = attempt(function_calls, own.function, own.leaves, f)
    calls = [] if isinstance(calls, Failure) else with_truth(calls, f, reference)
    causes = probe(
        *(f, args, own.function, own.leaves, calls),
        approximate=False,
        seed=switches.seed,
        vmap=switches.vmap,
        truth=truth.function,
    )
    causes = [cause for cause in causes if cause.code not in _OF_DOUBLE]
    settled = frozenset(level.order for level in levels if level.settled)
    findings = diagnose(entries, causes, facts=_facts(f, calls), settled=settled, location=class_location(f))
    return Report(title_of(f, own), tuple(entries), findings, tuple(noise_note(own, truth)))


def _entries(
    own: ScalarProblem,
    problem: ScalarProblem,
    trouble: str,
    levels: list[Level],
    switches: _Switches,
    surrogate: bool,
    generator: torch.Generator,
) -> Iterator[Entry]:
    order = switches.order
    if trouble:
        yield Entry("f", 0, "float64", None, None, "float64", trouble)
    size = max(level.scale for level in levels)
    yield from against_differences(levels, order)
    yield from between_claims(problem, order, generator) if surrogate else between_routes(levels)
    if switches.scipy and not surrogate:
        yield from against_scipy(problem, problem.loss, levels, generator)
    if not surrogate:
        yield from against_differences(climb(problem, problem.curved_loss, order, generator), order, "curved loss")
    if own.eps > problem.eps and not surrogate:
        yield from in_own_dtype(own, own.loss, levels, dtypes_of(own))
    if not trouble and not surrogate:
        yield from gradchecks(problem, order, switches.vmap, switches.seed)
    if switches.vmap:
        yield from vmap_checks(problem, order, size, generator)
    if switches.backend:
        yield from compile_checks(problem, order, size, switches.backend, generator)


def _facts(f: Any, calls: list[FunctionCall]) -> frozenset[str]:
    """What decides between codes, where comparisons alone do not."""
    functions = [call.function for call in calls] + ([f] if isinstance(f, type) else [])
    batching = any(function.vmap is not torch.autograd.Function.vmap for function in functions)
    return frozenset({"custom" if functions else "plain", *(["batching"] if batching else [])})


def _check_module(module: Any, inputs: Any, loss: Callable[..., Any], **options: Any) -> Report:
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"check: loss: expected None unless f is a torch.nn.Module, got a loss for {type(module).__name__}. "
            "Compose loss and f, and check the composition."
        )
    from hodiff.checks.modules.check_module import check_module

    return check_module(module, inputs, loss=loss, **options)


def _in_double(own: ScalarProblem) -> tuple[ScalarProblem, str]:
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
