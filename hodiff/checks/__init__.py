"""Checks of derivatives by independent routes, differences, and torch's own checks."""

from hodiff.checks.audit.audit import audit as audit
from hodiff.checks.audit.mutated.mutated_audit import MutatedAudit as MutatedAudit
from hodiff.checks.audit.mutated.mutated_audit import mutated_audit as mutated_audit
from hodiff.checks.audit.verdicts import AuditTable as AuditTable
from hodiff.checks.audit.verdicts import Verdict as Verdict
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
