"""What each method of `minimize` takes: those of `scipy.optimize.minimize`, and those of our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hodiff.optim.newton import NewtonOptions, newton_method
from hodiff.optim.newton_krylov import NewtonKrylovOptions, newton_krylov_method
from hodiff.optim.quasi_newton import QuasiNewtonOptions, ssbfgs_method, ssbroyden_method

# Of the objective, the options and what is called after each iteration, to SciPy's result.
Solver = Callable[[Any, Any, Callable[[Any], None]], Any]


@dataclass(frozen=True)
class Method:
    """A method by what it is given.

    Attributes:
        curvature: "" for none, "products" with the Hessian, or the "hessian" itself.
        bounds: Whether it takes bounds.
        constraints: Whether it takes constraints.
        sparse: Whether it takes the Hessian as a sparse matrix.
        solver: What minimises, where that is not SciPy.
        options: The dataclass of its options.
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
