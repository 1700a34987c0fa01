"""Training of small networks by optimizers of first and second order: the loss by steps and by seconds.

    python -m benchmarks --only training

Tasks are rows of `tasks.TASKS`, optimizers rows of `optimizers.OPTIMIZERS`.
"""
