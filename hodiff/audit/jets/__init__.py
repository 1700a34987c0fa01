"""Audit of torch's operator database in Taylor mode."""
