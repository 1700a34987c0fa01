"""Checks of derivatives by independent routes, differences, and torch's own checks."""

from importlib import import_module as _import_module
from typing import Any as _Any

from hodiff.checks.check import assert_differentiable as assert_differentiable
from hodiff.checks.check import check as check
from hodiff.checks.directions import along_directions as along_directions
from hodiff.checks.oracles.compositions import derivative as derivative
from hodiff.checks.oracles.compositions import route_names as route_names
from hodiff.checks.oracles.finite_differences import DifferenceEstimate as DifferenceEstimate
from hodiff.checks.oracles.finite_differences import central_differences as central_differences
from hodiff.checks.oracles.finite_differences import hvp_differences as hvp_differences
from hodiff.checks.oracles.scipy_hessian import HessianEstimate as HessianEstimate
from hodiff.checks.oracles.scipy_hessian import scipy_hessian as scipy_hessian
from hodiff.checks.report.data import Entry as Entry
from hodiff.checks.report.report import Finding as Finding
from hodiff.checks.report.report import Report as Report
from hodiff.checks.torch_verdicts import AuditTable as AuditTable
from hodiff.checks.torch_verdicts import Verdict as Verdict

# The audits import the checks, so their names here are looked up on first use.
_AUDITS = {"MutatedAudit", "audit", "mutated_audit"}


def __getattr__(name: str) -> _Any:
    if name in _AUDITS:
        return getattr(_import_module("hodiff.audit"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
