"""Side-by-side ratios of hodiff against torch's own ways and other libraries: `python -m benchmarks`."""
