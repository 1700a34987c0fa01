"""JAX and curvlinops on the same problems, in an environment of their own: they need other versions of torch.

    make bench-peers

creates that environment and runs them. The results, `peers.json`, hold an eager torch gradient timed beside each peer;
where they exist, `python -m benchmarks` adds their rows to its tables. Run this first, then that. Nothing here imports
hodiff.
"""
