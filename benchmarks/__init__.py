"""Benchmarks of hodiff against torch's own functions and other libraries: `python -m benchmarks`."""
