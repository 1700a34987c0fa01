"""Audits of torch's operator database: every route of every operator, invented calls, and Taylor mode."""

from hodiff.audit.database_audit import audit as audit
from hodiff.audit.database_audit import reproductions as reproductions
from hodiff.audit.mutated.mutated_audit import MutatedAudit as MutatedAudit
from hodiff.audit.mutated.mutated_audit import mutated_audit as mutated_audit
from hodiff.checks.torch_verdicts import AuditTable as AuditTable
from hodiff.checks.torch_verdicts import Verdict as Verdict
