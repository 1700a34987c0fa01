"""PINA's Poisson, Burgers and heat problems, with residuals by both programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pina import Condition, LabelTensor
from pina.domain import CartesianDomain
from pina.equation import Equation
from pina.equation.zoo import FixedValue
from pina.model import FeedForward
from pina.operator import grad, laplacian
from pina.problem import InverseProblem, SpatialProblem, TimeDependentProblem
from pina.problem.zoo import BurgersProblem, Poisson2DSquareProblem
from torch import nn

from hodiff.doors.pina import laplacian as hodiff_laplacian
from hodiff.doors.pina import partial

VISCOSITY = 0.05


def start(points: LabelTensor, u: LabelTensor) -> LabelTensor:
    return u - torch.sin(math.pi * points["x"])


def decay(points: LabelTensor, u: LabelTensor) -> LabelTensor:
    return grad(u, points, d=["t"]) - 0.1 * laplacian(u, points, d=["x"])


class HeatProblem(TimeDependentProblem, SpatialProblem):
    """The heat equation on a line, as in PINA's tutorials."""

    output_variables: ClassVar = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1]})
    temporal_domain = CartesianDomain({"t": [0, 1]})
    domains: ClassVar = {
        "D": spatial_domain.update(temporal_domain),
        "t0": spatial_domain.update(CartesianDomain({"t": 0})),
        "boundary": spatial_domain.partial().update(temporal_domain),
    }
    conditions: ClassVar = {
        "boundary": Condition(domain="boundary", equation=FixedValue(0.0)),
        "t0": Condition(domain="t0", equation=Equation(start)),
        "D": Condition(domain="D", equation=Equation(decay)),
    }

    def solution(self, points: LabelTensor) -> LabelTensor:
        found = torch.exp(-0.1 * math.pi**2 * points["t"]) * torch.sin(math.pi * points["x"])
        found.labels = self.output_variables
        return found


def poisson(model: nn.Module, inputs: list[str]) -> Equation:
    def residual(points: LabelTensor, _: LabelTensor) -> torch.Tensor:
        source = torch.sin(math.pi * points["x"]) * torch.sin(math.pi * points["y"])
        return hodiff_laplacian(model, points, inputs) - 2 * math.pi**2 * source.tensor

    return Equation(residual)


def burgers(model: nn.Module, inputs: list[str]) -> Equation:
    def residual(points: LabelTensor, u: LabelTensor) -> torch.Tensor:
        u_t, u_x, u_xx = partial(model, points, [("t",), ("x",), ("x", "x")], inputs)
        return u_t + u.tensor * u_x - VISCOSITY * u_xx

    return Equation(residual)


def heat(model: nn.Module, inputs: list[str]) -> Equation:
    def residual(points: LabelTensor, _: LabelTensor) -> torch.Tensor:
        (u_t,) = partial(model, points, ["t"], inputs)
        return u_t - 0.1 * hodiff_laplacian(model, points, inputs, d=["x"])

    return Equation(residual)


def inverse_heat(model: nn.Module) -> InverseProblem:
    """Return the heat equation with an unknown diffusivity, from its solution at some points."""

    def residual(points: LabelTensor, _: LabelTensor, unknown: dict[str, torch.Tensor]) -> torch.Tensor:
        u_t, u_xx = partial(model, points, [("t",), ("x", "x")], ["x", "t"])
        return u_t - unknown["diffusivity"] * u_xx

    places = LabelTensor(torch.rand(60, 2), ["x", "t"])
    known = HeatProblem.solution(HeatProblem, places)

    class InverseHeatProblem(HeatProblem, InverseProblem):
        unknown_parameter_domain = CartesianDomain({"diffusivity": [0, 1]})
        domains: ClassVar = {"D": HeatProblem.domains["D"]}
        conditions: ClassVar = {
            "D": Condition(domain="D", equation=Equation(residual)),
            "data": Condition(input=places, target=known),
        }

    problem = InverseHeatProblem()
    problem.discretise_domain(8, "grid", domains="D")
    return problem


# The problem, and its equation by hodiff as a function of the model and the labels of its inputs.
PROBLEMS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module, list[str]], Equation]]] = {
    "Poisson": (Poisson2DSquareProblem, poisson),
    "Burgers": (lambda: BurgersProblem(VISCOSITY), burgers),
    "heat": (HeatProblem, heat),
}


def made(name: str, *, by_hodiff: bool, width: int = 16, func: Any = nn.Tanh) -> tuple[Any, nn.Module]:
    """Return a problem on its points, and a network with equal weights in every call."""
    kind, equation = PROBLEMS[name]
    torch.manual_seed(0)
    problem, model = kind(), FeedForward(2, 1, layers=[width, width], func=func)
    # The conditions are attributes of the class.
    problem.conditions = dict(problem.conditions)
    if by_hodiff:
        problem.conditions["D"] = Condition(domain="D", equation=equation(model, problem.input_variables))
    problem.discretise_domain(20, "grid", domains="D")
    problem.discretise_domain(40, "grid", domains=[each for each in problem.domains if each != "D"])
    return problem, model


def error(problem: Any, solver: Any) -> float:
    """Return the relative L2 error on a grid, which differs from the training points."""
    points = problem.domains["D"].sample(51, "grid")
    with torch.no_grad():
        true = problem.solution(points)
        return float((solver(points) - true).tensor.norm() / true.tensor.norm())
