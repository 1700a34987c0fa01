"""A function of pytrees as solvers see it: of one float64 vector, counted, each point recorded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hodiff.common.trees import PyTree
from hodiff.derivatives import hessian_matrix
from hodiff.derivatives.bound_function import bind
from hodiff.derivatives.products_by_route import Leaves
from hodiff.optim.point import Counts, Point
from hodiff.optim.variables import Variables, require_some


class Objective:
    """What minimisers ask of a scalar function.

    Args:
        caller: The public function, for messages.
        f: The user's function.
        x0: Where to begin.
        args: Its further arguments.
        curved: Whether products with the Hessian will be asked for, so that gradients are recorded.

    Attributes:
        counts: How often each was computed.
        best: The smallest value, and where it is; None before the first.
        strayed: Whether anything was not finite.
    """

    def __init__(self, caller: str, f: Callable[..., Any], x0: PyTree, args: tuple[Any, ...], *, curved: bool):
        self.function = bind(caller, f, (x0, *args), name="x0", complex_too=True)
        self.variables = Variables(x0)
        require_some(caller, self.variables.space)
        self.counts = Counts()
        self.best: tuple[float, Any] | None = None
        self.strayed = False
        self._curved = curved
        self._here: Point | None = None

    def value(self, x: np.ndarray) -> float:
        """$f(x)$."""
        value = self._at(x).value
        self.strayed |= not np.isfinite(value)
        return value

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Its gradient."""
        return self._seen(self._at(x).gradient)

    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Its Hessian times a vector."""
        self.counts.products += 1
        return self._seen(self._at(x).product(self.variables.leaves(v)))

    def _seen(self, leaves: Leaves) -> np.ndarray:
        flat = self.variables.flat(leaves)
        self.strayed |= not np.isfinite(flat).all()
        return flat

    def hessian(self, x: np.ndarray) -> np.ndarray:
        """Its Hessian, (n, n)."""
        self.counts.hessians += 1
        _, *args = self.function.args
        if not np.isfinite(self.gradient(x)).all():
            # Of which a warning would speak, and the result does.
            return np.full((self.variables.space.size,) * 2, np.nan)
        return self.variables.array(hessian_matrix(self.function.f, self.variables.tree(x), *args))

    def point(self, x: Any) -> Point:
        """A point, a vector of NumPy or torch, recorded anew."""
        function = replace(self.function, leaves=self.variables.leaves(x))
        point = Point(x, function, self.variables, self.counts, self._curved)
        if self.best is None or point.value < self.best[0]:
            self.best = (point.value, x)
        return point

    def _at(self, x: np.ndarray) -> Point:
        if self._here is None or not np.array_equal(x, self._here.x):
            # The old graph goes before the new one comes.
            self._here = None
            self._here = self.point(np.array(x))
        return self._here
