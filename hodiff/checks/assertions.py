"""`assert_differentiable`: checks derivatives in one line of a test."""

from __future__ import annotations

from typing import Any

from hodiff.checks.check import check
from hodiff.checks.report.report import Report
from hodiff.common.keyword_options import require_options
from hodiff.errors import CheckError, InputError


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
    require_options(assert_differentiable, check, options)
    try:
        report = check(f, inputs, order=order, **options)
    except InputError as error:
        failure: Exception = error.with_traceback(None)
    else:
        if report.ok:
            return report
        failure = CheckError(str(report))
    raise failure
