"""Hyperparameters of a Gaussian process of GPyTorch: trust-region Newton, and their uncertainty.

    python examples/gaussian_process.py

The log marginal likelihood of n targets y at inputs X, with the kernel matrix K of hyperparameters h,

    L(h) = -1/2 (y - m)' K^-1 (y - m) - 1/2 log det K - n/2 log 2 pi,

is maximized by GPyTorch's usual Adam, and by Newton's method in a trust region with the Hessian of GPyTorch's own
marginal likelihood. Its kernels have no second derivatives: within `hodiff.doors.gpytorch.higher_order()`, they do.

At the maximum, the Hessian also says how well the data determine the hyperparameters: Laplace's approximation of their
posterior is normal with the covariance (-H)^-1. The table has the estimate and an interval of one standard deviation of
each raw hyperparameter, transformed to the hyperparameter itself. Targets are drawn from a process with known
hyperparameters.

A run with the defaults:

                -log L    gradient  evaluations
    Adam     -26.36994     9.2e-01          100
    Newton   -26.39063     3.0e-11           20

                      true  estimate          interval
    noise             0.01     0.007    0.006 to 0.009
    constant           0.0    -0.154   -0.433 to 0.125
    outputscale        1.0     0.550    0.353 to 0.820
    lengthscale        0.3     0.270    0.228 to 0.318

Source: C. E. Rasmussen & C. K. I. Williams, "Gaussian Processes for Machine Learning", MIT Press 2006, sections 5.2 and
5.4.1; D. J. C. MacKay, "Comparison of approximate methods for handling hyperparameters", Neural Computation 11 (1999).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff.doors.gpytorch import higher_order

Parameters = dict[str, Tensor]

# Each hyperparameter of the drawn data.
TRUE = {"lengthscale": 0.3, "outputscale": 1.0, "noise": 0.01}
GRADIENT = 1e-5  # tolerance of the norm of the gradient


class Process(gpytorch.models.ExactGP):
    """A process with a constant mean and a Matern kernel."""

    def __init__(self, inputs: Tensor, targets: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood):
        super().__init__(inputs, targets, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=2.5))

    def forward(self, inputs: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at some inputs."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))


class Evidence(nn.Module):
    """The negative log marginal likelihood of all targets."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        super().__init__()
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.process = Process(inputs, targets, likelihood)
        self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.process)
        self.inputs, self.targets = inputs, targets
        self.double()

    def forward(self) -> Tensor:
        """Return the negative log marginal likelihood."""
        value: Tensor = -len(self.targets) * self.likelihood(self.process(self.inputs), self.targets)
        return value

    def function(self) -> tuple[Callable[[Parameters], Tensor], Parameters]:
        """Return it as a function of raw hyperparameters, and their current values."""
        point = {name: parameter.detach() for name, parameter in self.named_parameters()}
        return (lambda parameters: functional_call(self, parameters, ())), point


@dataclass(frozen=True)
class Fit:
    """Hyperparameters that a method found.

    Attributes:
        parameters: The raw hyperparameters.
        value: The negative log marginal likelihood.
        gradient: Norm of its gradient.
        evaluations: Number of factorizations of kernel matrices.
    """

    parameters: Parameters
    value: float
    gradient: float
    evaluations: int


def draw_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs between 0 and 4, and targets of a process with the true hyperparameters."""
    generator = torch.Generator().manual_seed(seed)
    inputs = 4 * torch.rand(count, 1, dtype=torch.float64, generator=generator)
    r = 5**0.5 * torch.cdist(inputs, inputs) / TRUE["lengthscale"]
    K = TRUE["outputscale"] * (1 + r + r**2 / 3) * (-r).exp() + TRUE["noise"] * torch.eye(count, dtype=torch.float64)
    white = torch.randn(count, dtype=torch.float64, generator=generator)
    return inputs, torch.linalg.cholesky(K) @ white


def summarize(evidence: Evidence, parameters: Parameters, evaluations: int) -> Fit:
    """Return a fit, with the gradient at its end."""
    function, _ = evidence.function()
    with higher_order():
        gradient, value = torch.func.grad_and_value(function)(parameters)
    norm = torch.cat([each.flatten() for each in gradient.values()]).norm()
    return Fit(parameters, value.item(), norm.item(), evaluations)


def by_adam(evidence: Evidence, steps: int) -> Fit:
    """Minimize as GPyTorch's tutorials do."""
    optimizer = torch.optim.Adam(evidence.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (evidence() / len(evidence.targets)).backward()
        optimizer.step()
    return summarize(evidence, evidence.function()[1], steps)


def by_newton(evidence: Evidence) -> Fit:
    """Minimize by Newton's method in a trust region, with exact Hessians."""
    count = 0
    function, start = evidence.function()

    def counted(parameters: Parameters) -> Tensor:
        nonlocal count
        count += 1
        return function(parameters)

    with higher_order():
        found = hodiff.optimize.minimize(counted, start, method="trust-exact", options={"gtol": GRADIENT})
    return summarize(evidence, found.x, count)


def posterior(evidence: Evidence, parameters: Parameters) -> dict[str, tuple[float, float, float]]:
    """Return each hyperparameter with the ends of its interval, by Laplace's approximation."""
    function, _ = evidence.function()
    with higher_order():
        H = hodiff.hessian_matrix(function, parameters)
    deviations = torch.linalg.inv(H).diagonal().sqrt()
    found = {}
    for (name, raw), deviation in zip(parameters.items(), deviations, strict=True):
        constraint = evidence.process.constraint_for_parameter_name(name.removeprefix("process."))
        ends = [raw.item(), raw.item() - deviation.item(), raw.item() + deviation.item()]
        middle, low, high = ends if constraint is None else constraint.transform(torch.tensor(ends)).tolist()
        found[name.rpartition(".")[2].removeprefix("raw_")] = middle, low, high
    return found


def check(count: int = 12) -> str:
    """Run hodiff's check on the marginal likelihood: all routes, gradgradcheck, SciPy's Hessian."""
    function, point = Evidence(*draw_data(count, 0)).function()
    names = list(point)

    def of_vector(x: Tensor) -> Tensor:
        return function({name: each.view_as(point[name]) for name, each in zip(names, x, strict=True)})

    with higher_order():
        start = torch.cat([each.flatten() for each in point.values()])
        return hodiff.assert_differentiable(of_vector, start, vmap=False).summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit by both methods, and print the uncertainty of the hyperparameters."""
    parser = argparse.ArgumentParser(description="Hyperparameters of a Gaussian process, by Newton's method.")
    parser.add_argument("--count", type=int, default=80, help="number of inputs")
    parser.add_argument("--steps", type=int, default=100, help="number of steps of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the matrices are small
    data = draw_data(options.count, options.seed)
    print(f"{check()}\n")
    print(f"{'':8}{'-log L':>10}{'gradient':>12}{'evaluations':>13}")
    fits = {"Adam": by_adam(Evidence(*data), options.steps), "Newton": by_newton(Evidence(*data))}
    for name, fit in fits.items():
        print(f"{name:8}{fit.value:>10.5f}{fit.gradient:>12.1e}{fit.evaluations:>13}")
    print(f"\n{'':14}{'true':>8}{'estimate':>10}{'interval':>18}")
    for name, (middle, low, high) in posterior(Evidence(*data), fits["Newton"].parameters).items():
        print(f"{name:14}{TRUE.get(name, 0.0):>8}{middle:>10.3f}{f'{low:.3f} to {high:.3f}':>18}")


if __name__ == "__main__":
    main()
