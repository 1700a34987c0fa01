"""Capabilities of each method of `minimize`, SciPy's and hodiff's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hodiff.optim.newton import NewtonOptions, newton_method
from hodiff.optim.newton_krylov import NewtonKrylovOptions, newton_krylov_method
from hodiff.optim.quasi_newton import QuasiNewtonOptions, ssbfgs_method, ssbroyden_method

# Takes the objective, the options and a callback for each iteration; returns SciPy's result.
Solver = Callable[[Any, Any, Callable[[Any], None]], Any]


@dataclass(frozen=True)
class Method:
    """Capabilities of a method.

    Attributes:
        curvature: "" for none, "products" with the Hessian, or the "hessian" itself.
        bounds: Whether the method supports bounds.
        constraints: Whether the method supports constraints.
        sparse: Whether the method supports a sparse Hessian.
        solver: Function that minimises; None for SciPy.
        options: Dataclass of the options.
    """

    curvature: str = ""
    bounds: bool = False
    constraints: bool = False
    sparse: bool = False
    solver: Solver | None = None
    options: type = dict


METHODS = {
    "bfgs": Method(),
    "cg": Method(),
    "dogleg": Method("hessian"),
    "l-bfgs-b": Method(bounds=True),
    "newton": Method("hessian", sparse=True, solver=newton_method, options=NewtonOptions),
    "newton-cg": Method("products", sparse=True),
    "newton-krylov": Method("products", solver=newton_krylov_method, options=NewtonKrylovOptions),
    "slsqp": Method(bounds=True, constraints=True),
    "ssbfgs": Method(solver=ssbfgs_method, options=QuasiNewtonOptions),
    "ssbroyden": Method(solver=ssbroyden_method, options=QuasiNewtonOptions),
    "tnc": Method(bounds=True),
    "trust-constr": Method("products", bounds=True, constraints=True, sparse=True),
    "trust-exact": Method("hessian"),
    "trust-krylov": Method("products", sparse=True),
    "trust-ncg": Method("products", sparse=True),
}
