"""Checks of a function and of a module: subject, evidence, diagnosis, report."""
