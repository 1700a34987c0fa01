"""Measurements on a GPU, one section in one process: `python -m benchmarks.gpu --help`."""
