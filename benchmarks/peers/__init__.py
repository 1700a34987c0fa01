"""JAX, curvlinops, folx and asdex on the same problems, in their own environment: they need another torch version.

    make bench-peers

creates that environment and runs them. The results, `peers.json`, include the unit of all ratios: an eager torch
gradient, or for Laplacians the propagator by hand or hodiff's own. `python -m benchmarks` adds the peers' rows to its
tables, so run the peers first. `--only taylor` races only folx and hodiff, and `--only sparse` only asdex and hodiff.
Both bind the process to one core.
"""
