"""Simpler methods that determine the length of Shampoo's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

# Prevents division by zero.
LEAST = 1e-8


def _adagrad(squares: Tensor, beta: float, step: int, gradient: Tensor) -> Tensor:
    return squares.addcmul_(gradient, gradient).sqrt().add_(LEAST)


def _adam(squares: Tensor, beta: float, step: int, gradient: Tensor) -> Tensor:
    squares.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
    return (squares / (1 - beta**step)).sqrt_().add_(LEAST)


# Methods that divide the average of the gradients: their divisors, from the sum or average of squares, which they
# update, beta_2, the number of the step, and the gradient.
WITH_SQUARES: Mapping[str, Callable[[Tensor, float, int, Tensor], Tensor]] = {"adagrad": _adagrad, "adam": _adam}
# All methods; "sgd" takes the average itself.
GRAFTS = ("sgd", *WITH_SQUARES)
