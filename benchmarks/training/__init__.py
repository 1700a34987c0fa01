"""Optimizers of first and second order train small networks: the loss by steps and by seconds.

    python -m benchmarks --only training

A task is a row of `tasks.TASKS`, an optimizer one of `optimizers.OPTIMIZERS`.
"""
