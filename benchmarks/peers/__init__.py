"""JAX, curvlinops, folx and asdex on the same problems, in an environment of their own: they need another torch.

    make bench-peers

creates that environment and runs them. The results, `peers.json`, hold what each peer was timed beside, which is the
unit: an eager torch gradient, or for Laplacians the propagator by hand or hodiff's own. Where they exist, `python -m
benchmarks` adds their rows to its tables. Run this first, then that. `--only taylor` races folx and hodiff alone,
`--only sparse` asdex and hodiff, on one core, to which the process is bound.
"""
