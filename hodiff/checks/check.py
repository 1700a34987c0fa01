"""`check` compares the derivatives of a function or a module by every route; `assert_differentiable` for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hodiff.checks.check_arguments import (
    require_backend,
    require_function,
    require_inputs,
    require_loss,
    require_module,
    require_numbers,
    require_reference,
    require_ulps,
    under_autocast,
)
from hodiff.checks.check_options import METHODS, CheckOptions
from hodiff.checks.exploration.explore import explore_function, explore_module
from hodiff.checks.pipelines.check_function import check_function
from hodiff.checks.pipelines.check_module import check_module
from hodiff.checks.report.report import Report
from hodiff.common.module_state import at_another_point
from hodiff.common.options import require_bools, require_choice, require_int
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.distributed.fully_sharded import require_no_fully_sharded
from hodiff.errors import CheckError, InputError
from hodiff.recompute.reachable import modules_in
from hodiff.torch_internals.compilers.dynamo import compiled_code, module_of


# Grad modes and compilers around the call must not change the result.
@leave_inference_mode
@torch.enable_grad()
@compiled_code(runs=False)
@at_another_point
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
    correct: bool = True,
    wrt: str | None = None,
    fixed: Sequence[int] = (),
    explore: bool = False,
    autocast: torch.dtype | None = None,
) -> Report:
    r"""Check the derivatives of a function or module at a point by every route against independent ones.

    Derivatives are taken within `hodiff.corrected()`, as hodiff's transforms take them; a derivative that torch alone
    gets wrong is a warning, HD410. With ``correct=False``, torch alone is checked. The first line of the report says
    which.

    A derivative is trusted when independent routes to it agree. The output is contracted with a random
    cotangent, and the input is moved along a few random directions (along every element for at most 12 numbers),

    .. math:: \phi(t) = \sum_i \langle u_i, f_i(x + V t) \rangle,

    and :math:`D^k \phi(0)` is computed by all ``2**k`` compositions of reverse and forward passes for each order
    k up to ``order``. The results are compared with extrapolated differences of the order below, with each other, and
    at second order with SciPy's Hessian of values only. The comparison is repeated for a curved loss, whose incoming
    gradient depends on the input. ``torch.autograd.gradcheck`` and ``gradgradcheck`` run with each switch on,
    ``torch.func.vmap`` is compared with a loop, and ``torch.compile`` with eager code. The truth is float64;
    inputs of another dtype are also checked in that dtype. If no route is right at an order, the next order is compared
    with differences of differences, provided that they are expected to take less than ten seconds. Otherwise it is
    skipped, and the report says so. If f has ``approximate`` and ``derivative_error``, as functions made by
    `hodiff.functions.numpy_function` do, the notes include its own error estimate.

    The rules of each custom Function in f are then called directly. Their saved tensors, arguments and results are
    inspected, perturbed, laid out differently and poisoned, so that each defect has a cause, a line of the
    source, and a remedy; `hodiff.checks.findings.codes` lists them. The consequences of a cause are not reported again.

    A ``torch.nn.Module`` is moved along a few directions through its parameters and inputs, on a copy in float64; where
    routes disagree, the report names the submodule at fault, and the torch function or custom Function in it. ``vmap``,
    ``scipy`` and ``method`` are for functions. With ``reference`` a module is checked as a function of its inputs.

    The error of a comparison is the largest absolute difference over the largest element of the truth, and

    .. math:: \text{tolerance} = k \sqrt{\varepsilon} + 10 \, \text{oracle error} / \text{scale},

    with :math:`\varepsilon` of the coarsest dtype involved; the oracle states its own error. Everything is
    reproducible from ``seed``; global random state is untouched.

    Args:
        f: A function of tensors, or a ``torch.autograd.Function`` subclass, whose ``apply`` is checked. It must
            be deterministic and must not change its inputs. Perturbations are not symmetric: let f symmetrize.
            All its floating-point outputs count as differentiable.
        inputs: A tensor, or a tuple of arguments: tensors, pytrees of tensors, or constants, which are passed
            through. All floating-point tensors are differentiated, integer tensors are constants.
        order: Highest order of derivative, at least 1.
        vmap: Whether to check batching.
        compile: Whether to check ``torch.compile``, or the name of the backend to use. Resets its caches.
        scipy: Whether to run SciPy's oracle, which evaluates f some thousand times.
        seed: Seed of the cotangent, the directions and the batches, and of random numbers in f and its rules.
        approximate: Whether f declares derivatives that are not its own. Its routes are compared with each other, and
            the gap to differences is a note. An f with ``approximate = True``, or made by `hodiff.straight_through`,
            says so itself.
        reference: The same function for float64, for an f that computes in a lower precision only: value and
            derivatives are compared with it. It is called with float64 tensors only.
        ulps: Allowed error with a reference, relative to the largest element, in units of f's rounding. By default,
            half of the digits for each order.
        method: ``"matrices"`` moves the input along every element, ``"directions"`` along a few random directions;
            ``"auto"`` takes matrices for at most 12 numbers.
        loss: For an f that is a ``torch.nn.Module``: maps its output to a number. By default, a random contraction of
            its outputs and of their squares.
        correct: Whether to take derivatives as hodiff's transforms do; else as torch alone does.
        wrt: Variables by which a module is differentiated: its ``"parameters"`` that require a gradient, its floating
            ``"inputs"``, or ``"both"``, which is the default. A function has inputs only.
        fixed: Positions of a module's floating inputs that are treated as constants.
        explore: Whether to invent inputs around the given one, some fifteen checks more for each tensor: zeros, ties,
            large elements, other sizes, no dimensions, broadcast shapes, other layouts of memory, float32 and bfloat16.
            An invented input counts if f runs and differences of two steps agree; its findings state the condition.
            Only the first (batch) dimension of a module's inputs changes in size.
        autocast: A 16-bit dtype: f is checked as ``torch.autocast`` runs it on float32 inputs, against its own float64
            values or ``reference``. Under autocast, a rule may meet dtypes that it meets nowhere else.

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
    require_function(f)
    f = module_of(f)
    require_no_fully_sharded("check", modules_in(f))
    if autocast is not None:
        f, inputs, reference = under_autocast(f, inputs, autocast, reference)
    require_int("check", "order", order, 1)
    require_int("check", "seed", seed)
    require_bools("check", vmap=vmap, scipy=scipy, approximate=approximate, correct=correct, explore=explore)
    require_backend(compile)
    require_choice("check", "method", method, METHODS)
    require_ulps(ulps, reference)
    require_numbers(f, inputs)
    args = inputs if type(inputs) is tuple else (inputs,)
    require_loss(f, loss, reference)
    backend = compile if isinstance(compile, str) else "inductor" * compile
    options = CheckOptions(order, vmap, backend, scipy, seed, method, correct, approximate, reference, ulps, loss)
    if isinstance(f, torch.nn.Module) and (loss is not None or reference is None):
        require_module(f, args, wrt, fixed)
        options = replace(options, wrt=wrt or "both", fixed=fixed)
        report = check_module(f, args, options)
        return explore_module(report, f, args, options) if explore else report
    require_inputs(f, wrt, fixed)
    options = replace(options, reference=require_reference(reference, approximate))
    report = check_function(f, args, options)
    return explore_function(report, f, args, options) if explore else report


def assert_differentiable(f: Any, inputs: Any, *, order: int = 2, **options: Any) -> Report:
    """Check the derivatives of a function, and fail with the whole report if one is wrong or missing.

    Args:
        f: A function, a ``torch.autograd.Function`` subclass or a module, as in `hodiff.check`.
        inputs: A tensor or a tuple of arguments.
        order: Highest order of derivative, at least 1.
        options: Further options of `hodiff.check`.

    Returns:
        The report, which may have warnings and notes.

    Raises:
        CheckError: An AssertionError whose text is the report, if there is a finding of severity "error".
        InputError: If the arguments leave nothing to check.

    Example:
        >>> import torch
        >>> report = assert_differentiable(torch.sin, torch.tensor([0.5, 2.0], dtype=torch.float64))
        >>> report.codes
        ()
    """
    # Test runners that honour this name show the line of the test instead of hodiff's own.
    __tracebackhide__ = True
    try:
        report = check(f, inputs, order=order, **options)
    except InputError as error:
        failure: Exception = error.with_traceback(None)
    else:
        if report.ok:
            return report
        failure = CheckError(str(report))
    raise failure
