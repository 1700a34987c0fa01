"""Calls and their mutations: what the audit of invented calls and `explore=True` share."""
