"""Workloads and tallies, one family per file; `benchmarks.registry` lists them."""
