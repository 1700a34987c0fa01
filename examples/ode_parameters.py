"""Fit the rates of a predator-prey equation to counts of hares and lynxes, with standard errors.

    python examples/ode_parameters.py

Prey and predators of the Lotka-Volterra equations are counted with an error of some per cent. In logarithms u, v of
their numbers the equations are

    u' = growth - hunting exp(v),    v' = -death + breeding exp(u),

integrated by the Runge-Kutta method in torch, so that the Jacobian J of the residuals r is exact. SciPy's "trf" and
hodiff's "lm-geodesic" find the least squares. The steps of "lm-geodesic" follow the curvature of the residuals: this
takes second derivatives along each step (`naev`) and saves Jacobians. The covariance of the estimates is r'r / (m - n)
(J'J)^-1, whose diagonal gives the standard errors. To check them, the script simulates new counts many times, fits
each, and compares the standard errors with the spread of the fits.

Source: G. A. F. Seber & C. J. Wild, Nonlinear Regression (1989), section 2.1.2 for the covariance; M. Transtrum & J.
Sethna, arXiv:1201.5885, for geodesic acceleration.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import hodiff
from hodiff.checks import along_directions

mpl.use("Agg")
import matplotlib.pyplot as plt

Rates = dict[str, Tensor]

TRUTH = {"growth": 0.9, "hunting": 0.5, "death": 0.7, "breeding": 0.3}
GUESS = {"growth": 0.5, "hunting": 0.5, "death": 0.5, "breeding": 0.5}
START = torch.tensor([4.0, 1.0], dtype=torch.float64).log()
TIMES = torch.linspace(0, 12, 25, dtype=torch.float64)
SUBSTEPS = 2  # integration steps between two counts


def tensors(rates: dict[str, float]) -> Rates:
    """Return the rates as tensors for `least_squares`."""
    return {name: torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()}


def integrate(rates: Rates) -> Tensor:
    """Compute the logarithms of both numbers at all times but the first, (times, 2), by Runge-Kutta steps."""
    alone = torch.stack([rates["growth"], -rates["death"]])
    together = torch.stack([-rates["hunting"], rates["breeding"]])

    def slope(u: Tensor) -> Tensor:
        return alone + together * u.exp().flip(0)

    h = float(TIMES[1] - TIMES[0]) / SUBSTEPS
    path = [START]
    for _ in range(SUBSTEPS * (len(TIMES) - 1)):
        u = path[-1]
        k1 = slope(u)
        # `alpha` avoids products with numbers, which are slow in torch's forward mode.
        k2 = slope(u.add(k1, alpha=h / 2))
        k3 = slope(u.add(k2, alpha=h / 2))
        k4 = slope(u.add(k3, alpha=h))
        path.append(u.add(k1 + k4, alpha=h / 6).add(k2 + k3, alpha=h / 3))
    return torch.stack(path[SUBSTEPS::SUBSTEPS])


def exact(rates: dict[str, float]) -> Tensor:
    """Integrate by SciPy, with order eight and ten digits, without derivatives."""

    def slope(_: float, u: np.ndarray) -> list[float]:
        growth, hunting, death, breeding = rates.values()
        return [growth - hunting * math.exp(u[1]), -death + breeding * math.exp(u[0])]

    options = {"t_eval": TIMES[1:].numpy(), "method": "DOP853", "rtol": 1e-10, "atol": 1e-12}
    return torch.from_numpy(solve_ivp(slope, (0, float(TIMES[-1])), START.numpy(), **options).y.T)


def residuals(rates: Rates, counted: Tensor) -> Tensor:
    """Compute the residuals of the fit."""
    return integrate(rates) - counted


def covariance(residual: Tensor, J: Tensor) -> Tensor:
    """Return the covariance of the estimates, with the noise variance estimated from the residuals."""
    m, n = J.shape
    return residual.square().sum() / (m - n) * torch.linalg.inv(J.T @ J)


def check(counted: Tensor) -> str:
    """Run hodiff's check on the sum of squares: all routes, gradgradcheck, SciPy's Hessian."""

    def sum_of_squares(rates: Rates) -> Tensor:
        return residuals(rates, counted).square().sum()

    few = along_directions(sum_of_squares, tensors(TRUTH))
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(counted: Tensor, fitted: Tensor, repeats: Tensor, C: Tensor, path: Path) -> None:
    """Plot counts and curves, and estimates of two rates from other counts with the ellipse for 95 % of them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for column, name in enumerate(("prey", "predators")):
        left.plot(TIMES[1:], counted[:, column].exp(), f"C{column}.", markersize=4)
        left.plot(TIMES[1:], fitted[:, column].exp(), f"C{column}", label=name)
    left.set(title="counts, and the fitted solution", xlabel="time", ylabel="number")
    left.legend()
    angle = torch.linspace(0, 2 * math.pi, 100, dtype=torch.float64)
    circle = math.sqrt(-2 * math.log(0.05)) * torch.stack([angle.cos(), angle.sin()])
    ellipse = torch.tensor(list(TRUTH.values())[:2])[:, None] + torch.linalg.cholesky(C[:2, :2]) @ circle
    right.plot(*ellipse, color="gray", label="95 %, by the Jacobian")
    right.plot(*repeats[:, :2].T, ".", label="fits to other counts")
    right.set(title="estimates around the truth", xlabel="growth", ylabel="hunting")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit by both methods, print estimates with errors, and repeat with new counts."""
    parser = argparse.ArgumentParser(description="Rates of the Lotka-Volterra equations, with standard errors.")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of the logarithms of the counts")
    parser.add_argument("--repeats", type=int, default=20, help="number of simulated data sets")
    parser.add_argument("--output", type=Path, default=Path("figures/ode_parameters.png"), help="path of the figure")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the vectors are small: more threads would only wait for each other
    generator = torch.Generator().manual_seed(options.seed)
    numbers = exact(TRUTH)

    def count() -> Tensor:
        return numbers + options.noise * torch.randn(numbers.shape, generator=generator, dtype=torch.float64)

    counted = count()
    for method in ("trf", "lm-geodesic"):
        found = hodiff.optimize.least_squares(residuals, tensors(GUESS), counted, method=method)
        ways = f"{found.nfev} values, {found.njev} Jacobians, {found.get('naev', 0)} second derivatives"
        print(f"{method:12} noise {math.sqrt(2 * found.cost / (counted.numel() - 4)):.4f}  {ways}")

    C = covariance(found.fun, found.jac)
    others = (hodiff.optimize.least_squares(residuals, found.x, count()) for _ in range(options.repeats))
    repeats = torch.stack([torch.stack([*other.x.values()]) for other in others])
    print(f"\n{'':10}{'truth':>9}{'estimate':>11}{'standard error':>16}{'spread':>9}{'error / s.e.':>16}")
    rows = zip(TRUTH.items(), found.x.values(), C.diagonal().sqrt(), repeats.std(dim=0), strict=True)
    for (name, truth), rate, error, spread in rows:
        print(f"{name:10}{truth:>9.3f}{rate:>11.4f}{error:>16.4f}{spread:>9.4f}{(rate - truth) / error:>16.2f}")
    draw(counted, integrate(found.x), repeats, C, options.output)
    print(f"\nFigure: {options.output}")
    print(check(counted))


if __name__ == "__main__":
    main()
