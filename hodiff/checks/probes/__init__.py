"""Probes: defects of custom Functions that are seen by calling their rules by hand."""
