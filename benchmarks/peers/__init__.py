"""JAX and curvlinops on the same problems, in an environment of their own: they need other versions of torch.

    python -m venv .venv-bench
    .venv-bench/bin/pip install torch numpy scikit-learn tqdm jax "curvlinops-for-pytorch>=3"
    .venv-bench/bin/python -m benchmarks.peers

The results, `peers.json`, hold an eager torch gradient timed beside each peer; where they exist, `python -m benchmarks`
adds their rows to its tables. Run this first, then that. Nothing here imports hodiff.
"""
