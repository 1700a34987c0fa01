"""Function at one point, recorded once: value, gradient and products with the Hessian."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hodiff.common.module_state import attributes_put_back
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.products_by_route import PRODUCTS, Leaves
from hodiff.derivatives.recorded_gradient import RecordedGradient, recorded_value
from hodiff.derivatives.route_choice import follow
from hodiff.operators.linearized.recorded_model import lacks_derivatives
from hodiff.optimize.variables import Variables
from hodiff.recompute.reachable import named_modules
from hodiff.routes import ROUTES


@dataclass
class Counts:
    """Numbers of evaluations."""

    values: int = 0
    gradients: int = 0
    products: int = 0
    hessians: int = 0


class Evaluation(Protocol):
    """Value and gradient of a function at a point, as line searches need them; `Point` has them."""

    x: Any
    value: float

    @property
    def finite(self) -> bool:
        """Whether the value is finite."""

    @property
    def slope(self) -> Tensor:
        """Gradient as a float64 vector."""

    def release(self) -> None:
        """Free graphs."""


class Point:
    """Recorded point: the graph of the value and, if `curved`, of the gradient.

    Attributes:
        x: The point, a vector of NumPy or torch.
        value: The function's value.
        eps: Machine epsilon of the value's dtype.
    """

    def __init__(self, x: Any, function: BoundFunction, variables: Variables, counts: Counts, curved: bool):
        self.x, self._function, self._variables, self._counts, self._curved = x, function, variables, counts, curved
        # Restore attributes of modules, so that a module's state does not carry over to the next point.
        with torch.no_grad(), attributes_put_back(list(named_modules(function.f))):
            self._recording = recorded_value(function)
        counts.values += 1
        value = self._recording.result[0]
        self.value, self.eps = float(value.detach()), torch.finfo(value.dtype).eps

    @property
    def finite(self) -> bool:
        """Whether the value is finite."""
        return math.isfinite(self.value)

    @cached_property
    def gradient(self) -> Leaves:
        """Gradient with respect to each real leaf."""
        self._counts.gradients += 1
        return self._curvature[0] if self._curved else self._plain_gradient()

    @cached_property
    def slope(self) -> Tensor:
        """Gradient as a float64 vector."""
        return self._variables.join(self.gradient)

    def product(self, v: Leaves) -> Leaves:
        """Compute the Hessian times a vector, as leaves."""
        return self._curvature[1](v)

    def times(self, v: Tensor) -> Tensor:
        """Compute the Hessian times a float64 vector."""
        self._counts.products += 1
        # Scaling by a power of two is explained in `Objective.product`.
        unit = torch.exp2(torch.frexp(v.abs().max()).exponent.to(v.dtype))
        return unit * self._variables.join(self.product(self._variables.split(v / unit)))

    def release(self) -> None:
        """Free the graphs; the value and a gradient that was computed remain."""
        del self._recording
        self.__dict__.pop("_curvature", None)

    def _plain_gradient(self) -> Leaves:
        value, _ = self._recording.result
        if not value.requires_grad:
            raise self._function.independent()
        found = self._recording.gradients([value])
        return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(found, self._function.leaves, strict=True))

    @cached_property
    def _curvature(self) -> tuple[Leaves, Callable[[Leaves], Leaves]]:
        return follow("auto", self._function.caller, self._by_route)

    def _by_route(self, route: str) -> tuple[Leaves, Callable[[Leaves], Leaves]]:
        function = self._function
        # A product that raises must do so here, so that the next route is tried.
        if route != ROUTES[0]:
            PRODUCTS[route](function, function.leaves, tuple(map(torch.zeros_like, function.leaves)))
            return self._plain_gradient(), lambda v: PRODUCTS[route](function, function.leaves, v)[0]
        with torch.no_grad():
            recorded = RecordedGradient(function, numbers=True, recording=self._recording)
            if lacks_derivatives(*recorded.live_edges):
                recorded.product(tuple(map(torch.zeros_like, function.leaves)), keep=True)
        return recorded.gradient, lambda v: recorded.product(v, keep=True)
