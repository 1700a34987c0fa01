"""Probes, which find defects of custom Functions by calling their rules directly."""
