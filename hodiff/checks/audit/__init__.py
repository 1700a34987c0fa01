"""Audit of torch's operator database by every route."""
