"""What is measured, one family a file; `benchmarks.registry` lists them."""
