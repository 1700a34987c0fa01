"""Audit at invented calls, which torch's database omits."""
