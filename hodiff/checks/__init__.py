"""Checks of derivatives: independent routes, differences, and what torch offers."""

from hodiff.checks.assertions import assert_differentiable as assert_differentiable
from hodiff.checks.audit_run import audit as audit
from hodiff.checks.audit_table import AuditTable as AuditTable
from hodiff.checks.audit_verdicts import Verdict as Verdict
from hodiff.checks.compositions import derivative as derivative
from hodiff.checks.compositions import route_names as route_names
from hodiff.checks.finite_differences import DifferenceEstimate as DifferenceEstimate
from hodiff.checks.finite_differences import central_differences as central_differences
from hodiff.checks.finite_differences import hvp_differences as hvp_differences
from hodiff.checks.report import Entry as Entry
from hodiff.checks.report import Finding as Finding
from hodiff.checks.report import Report as Report
from hodiff.checks.scipy_oracle import HessianEstimate as HessianEstimate
from hodiff.checks.scipy_oracle import scipy_hessian as scipy_hessian
from hodiff.checks.suite import check as check
