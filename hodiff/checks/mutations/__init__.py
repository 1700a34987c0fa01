"""Calls and their mutations, shared by the audit of invented calls and `explore=True`."""
