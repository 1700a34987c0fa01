"""Simpler methods that determine the length of Shampoo's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Prevents division by zero.
LEAST = 1e-8


def _sgd(state: dict[str, Any], beta: float, gradient: Tensor, mean: Tensor) -> Tensor:
    return mean


def _adagrad(state: dict[str, Any], beta: float, gradient: Tensor, mean: Tensor) -> Tensor:
    squares = _squares(state, gradient).addcmul_(gradient, gradient)
    return mean / squares.sqrt().add_(LEAST)


def _adam(state: dict[str, Any], beta: float, gradient: Tensor, mean: Tensor) -> Tensor:
    squares = _squares(state, gradient).mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
    return mean / (squares / (1 - beta ** state["step"])).sqrt_().add_(LEAST)


def _squares(state: dict[str, Any], like: Tensor) -> Tensor:
    if "exp_avg_sq" not in state:
        state["exp_avg_sq"] = torch.zeros_like(like)
    squares: Tensor = state["exp_avg_sq"]
    return squares


# Step of another method, by name, from the state, beta_2, the gradient and its average.
GRAFTS: Mapping[str, Callable[[dict[str, Any], float, Tensor, Tensor], Tensor]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
}
