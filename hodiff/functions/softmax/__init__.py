"""Softmax, log-sum-exp and reductions."""
