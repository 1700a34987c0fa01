"""DeepXDE's Poisson, heat, Burgers and beam examples, and a plate, with residuals by both programs.

Equations, conditions and solutions are those of its examples; networks and numbers of points are smaller.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# DeepXDE asks on its first import otherwise.
os.environ["DDE_BACKEND"] = "pytorch"

import deepxde as dde
import numpy as np
import torch
from torch import Tensor

import hodiff

# A residual: DeepXDE passes points (N, d) and the network's values there.
Residual = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """An equation with its points, the sizes of its network, and the solution if it is known."""

    layers: list[int]
    data: Callable[[Residual], Any]
    theirs: Residual
    ours: Callable[[Any], Residual]
    exact: Callable[[np.ndarray], np.ndarray] | None = None

    def model(self, by_hodiff: bool, seed: int = 0) -> Any:
        """Return DeepXDE's model, not compiled yet."""
        dde.config.set_default_float("float64")
        dde.config.set_random_seed(seed)
        net = dde.nn.FNN(self.layers, "tanh", "Glorot normal")
        return dde.Model(self.data(self.ours(net) if by_hodiff else self.theirs), net)

    def error(self, model: Any) -> float:
        """Return the relative L2 error on a grid, which differs from the training points."""
        assert self.exact is not None
        grid = np.stack(np.meshgrid(*_axes(model.data.geom)), -1).reshape(-1, self.layers[0])
        true = self.exact(grid)
        with torch.no_grad():
            found = model.net(torch.as_tensor(grid)).numpy()
        return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def _axes(geometry: Any) -> list[np.ndarray]:
    """Return coordinates of a grid on a line, or on a line and a time."""
    if not isinstance(geometry, dde.geometry.GeometryXTime):
        return [np.linspace(geometry.l, geometry.r, 61)]
    return [*_axes(geometry.geometry), np.linspace(geometry.timedomain.t0, geometry.timedomain.t1, 61)]


def _poisson_data(pde: Residual) -> Any:
    line = dde.geometry.Interval(-1, 1)
    edge = dde.icbc.DirichletBC(line, lambda x: np.sin(np.pi * x), lambda _, on_edge: on_edge)
    return dde.data.PDE(line, pde, edge, 16, 2, train_distribution="uniform")


def _poisson(x: Tensor, y: Tensor) -> Tensor:
    return -dde.grad.hessian(y, x) - math.pi**2 * torch.sin(math.pi * x)


def _poisson_by_hodiff(net: Any) -> Residual:
    return lambda x, _: -hodiff.laplacian(net, batched=True)(x) - math.pi**2 * torch.sin(math.pi * x)


def _heat_data(pde: Residual) -> Any:
    region = dde.geometry.GeometryXTime(dde.geometry.Interval(0, 1), dde.geometry.TimeDomain(0, 1))
    edge = dde.icbc.DirichletBC(region, lambda x: 0, lambda _, on_edge: on_edge)
    start = dde.icbc.IC(region, lambda x: np.sin(np.pi * x[:, :1]), lambda _, initial: initial)
    return dde.data.TimePDE(region, pde, [edge, start], num_domain=500, num_boundary=40, num_initial=80)


def _heat(x: Tensor, y: Tensor) -> Tensor:
    return dde.grad.jacobian(y, x, i=0, j=1) - 0.4 * dde.grad.hessian(y, x, i=0, j=0)


def _heat_by_hodiff(net: Any) -> Residual:
    def residual(x: Tensor, _: Tensor) -> Tensor:
        u_t, u_xx = hodiff.partial(net, [(1,), (0, 0)], batched=True)(x)
        return u_t - 0.4 * u_xx

    return residual


def _heat_exact(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.4 * np.pi**2 * x[:, 1:]) * np.sin(np.pi * x[:, :1])


def _burgers_data(pde: Residual) -> Any:
    region = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 0.99))
    edge = dde.icbc.DirichletBC(region, lambda x: 0, lambda _, on_edge: on_edge)
    start = dde.icbc.IC(region, lambda x: -np.sin(np.pi * x[:, :1]), lambda _, initial: initial)
    return dde.data.TimePDE(region, pde, [edge, start], num_domain=500, num_boundary=40, num_initial=80)


def _burgers(x: Tensor, y: Tensor) -> Tensor:
    u_x, u_t = (dde.grad.jacobian(y, x, i=0, j=j) for j in (0, 1))
    return u_t + y * u_x - 0.01 / math.pi * dde.grad.hessian(y, x, i=0, j=0)


def _burgers_by_hodiff(net: Any) -> Residual:
    def residual(x: Tensor, y: Tensor) -> Tensor:
        u_t, u_x, u_xx = hodiff.partial(net, [(1,), (0,), (0, 0)], batched=True)(x)
        return u_t + y * u_x - 0.01 / math.pi * u_xx

    return residual


def _burgers_exact(x: np.ndarray) -> np.ndarray:
    """Compute the solution of Cole and Hopf by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    viscosity = 0.01 / np.pi
    place = x[:, :1] - nodes * np.sqrt(4 * viscosity * x[:, 1:])
    factor = weights * np.exp(-np.cos(np.pi * place) / (2 * np.pi * viscosity))
    return -(np.sin(np.pi * place) * factor).sum(1, keepdims=True) / factor.sum(1, keepdims=True)


def _beam_data(pde: Residual) -> Any:
    line = dde.geometry.Interval(0, 1)
    left = lambda x, on_edge: on_edge and dde.utils.isclose(x[0], 0)  # noqa: E731 - as in their example
    right = lambda x, on_edge: on_edge and dde.utils.isclose(x[0], 1)  # noqa: E731
    conditions = [
        dde.icbc.DirichletBC(line, lambda x: 0, left),
        dde.icbc.NeumannBC(line, lambda x: 0, left),
        dde.icbc.OperatorBC(line, lambda x, y, _: dde.grad.hessian(y, x), right),
        dde.icbc.OperatorBC(line, lambda x, y, _: dde.grad.jacobian(dde.grad.hessian(y, x), x), right),
    ]
    return dde.data.PDE(line, pde, conditions, num_domain=10, num_boundary=2, train_distribution="uniform")


def _beam(x: Tensor, y: Tensor) -> Tensor:
    return dde.grad.hessian(dde.grad.hessian(y, x), x) + 1


def _beam_by_hodiff(net: Any) -> Residual:
    return lambda x, _: hodiff.bilaplacian(net, batched=True)(x) + 1


def _plate_data(pde: Residual) -> Any:
    square = dde.geometry.Rectangle([0, 0], [1, 1])
    edge = dde.icbc.DirichletBC(square, lambda x: 0, lambda _, on_edge: on_edge)
    bent = dde.icbc.OperatorBC(square, lambda x, y, _: dde.grad.hessian(y, x), lambda _, on_edge: on_edge)
    return dde.data.PDE(square, pde, [edge, bent], num_domain=200, num_boundary=40)


def _plate(x: Tensor, y: Tensor) -> Tensor:
    laplacian = dde.grad.hessian(y, x, i=0, j=0) + dde.grad.hessian(y, x, i=1, j=1)
    return dde.grad.hessian(laplacian, x, i=0, j=0) + dde.grad.hessian(laplacian, x, i=1, j=1) - 1


def _plate_by_hodiff(net: Any) -> Residual:
    return lambda x, _: hodiff.bilaplacian(net, batched=True)(x) - 1


PROBLEMS = {
    "Poisson": Problem([1, 20, 20, 20, 1], _poisson_data, _poisson, _poisson_by_hodiff, lambda x: np.sin(np.pi * x)),
    "heat": Problem([2, 20, 20, 20, 1], _heat_data, _heat, _heat_by_hodiff, _heat_exact),
    "Burgers": Problem([2, 20, 20, 20, 1], _burgers_data, _burgers, _burgers_by_hodiff, _burgers_exact),
    "beam": Problem(
        [1, 20, 20, 20, 1],
        _beam_data,
        _beam,
        _beam_by_hodiff,
        lambda x: -(x**4) / 24 + x**3 / 6 - x**2 / 4,
    ),
    "plate": Problem([2, 20, 20, 20, 1], _plate_data, _plate, _plate_by_hodiff),
}
