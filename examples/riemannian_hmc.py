"""Riemannian Hamiltonian Monte Carlo: sample Neal's funnel with a metric that follows the Hessian.

    python examples/riemannian_hmc.py
    python examples/riemannian_hmc.py --chains 200 --transitions 40

The funnel has a log-scale v ~ N(0, 9) and nine coordinates x ~ N(0, exp(v)). Its neck is exp(9) times as narrow as its
mouth, so that ordinary Hamiltonian Monte Carlo with any step size misses one of them. The SoftAbs metric

    G(q) = f(H(q)),   f(l) = l coth(a l),   H the Hessian of the potential U,

has the curvature's scale in every direction, and is positive definite also where H is not. A Hamiltonian with the
kinetic energy p' G^-1 p / 2 + log det(G) / 2 leaves the distribution of q unchanged. Its derivative in q contains the
derivative of a function of the Hessian, so third derivatives of U. `hodiff.functions.spectral_function` computes them
also where eigenvalues are equal, as eight of ten are everywhere in the funnel. There, the derivative of
`torch.linalg.eigh` divides by zero.

The generalized leapfrog is implicit, and its equations are solved by iteration. It is reversible and preserves volume,
and its energy error is of second order in the step size, which the script prints. All chains run together. The script
compares the marginal distribution of v with N(0, 9), for this sampler and for Hamiltonian Monte Carlo with a constant
metric.

Source: M. Betancourt, "A general metric for Riemannian manifold Hamiltonian Monte Carlo", GSI 2013; M. Girolami &
B. Calderhead, "Riemann manifold Langevin and Hamiltonian Monte Carlo methods", Journal of the Royal Statistical Society
B 73 (2011); R. Neal, "Slice sampling", Annals of Statistics 31 (2003), section 8.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from scipy.stats import norm
from torch import Tensor

import hodiff
from hodiff.functions import spectral_function

mpl.use("Agg")
import matplotlib.pyplot as plt

WIDTH = 3.0  # standard deviation of v
COORDINATES = 9
FAR = 10.0  # multiple of a step beyond which an iteration is given up
SHARPNESS = 1e6  # a: eigenvalues below its inverse are replaced by the inverse


def potential(q: Tensor) -> Tensor:
    """Compute the negative logarithm of the funnel's density at q = (v, x), (..., 1 + d), up to a constant."""
    v, x = q[..., 0], q[..., 1:]
    return v**2 / (2 * WIDTH**2) + x.shape[-1] * v / 2 + (x**2).sum(-1) * torch.exp(-v) / 2


def softabs(eigenvalues: Tensor) -> Tensor:
    """Compute l coth(a l), by its series near 0."""
    z = SHARPNESS * eigenvalues
    near = z.abs() < 0.1
    small = torch.where(near, z, 0.0) ** 2
    series = 1 + small * (1 / 3 - small * (1 / 45 - small * (2 / 945 - small * (1 / 4725 - small * 2 / 93555))))
    return torch.where(near, series, z / torch.tanh(torch.where(near, 1.0, z))) / SHARPNESS


def hessian(q: Tensor) -> Tensor:
    """Compute the Hessian of the potential at each point, (..., n, n)."""
    return torch.func.vmap(hodiff.hessian(potential))(q)


def hamiltonian(q: Tensor, p: Tensor) -> Tensor:
    """Compute the energy of each chain (k,), of positions and momenta (k, n)."""
    H = hessian(q)
    inverse = spectral_function(H, lambda eigenvalues: 1 / softabs(eigenvalues))
    logarithm = spectral_function(H, lambda eigenvalues: softabs(eigenvalues).log())
    kinetic = torch.einsum("ki,kij,kj->k", p, inverse, p) + logarithm.diagonal(dim1=1, dim2=2).sum(1)
    return potential(q) + kinetic / 2


def forces(q: Tensor, p: Tensor) -> Tensor:
    """Compute the derivative of the energy in the positions."""
    q = q.detach().requires_grad_()
    return torch.autograd.grad(hamiltonian(q, p).sum(), q)[0]


def velocities(q: Tensor, p: Tensor) -> Tensor:
    """Compute the derivative of the energy in the momenta, G^-1 p."""
    inverse = spectral_function(hessian(q), lambda eigenvalues: 1 / softabs(eigenvalues))
    return torch.einsum("kij,kj->ki", inverse, p)


def momenta(q: Tensor, generator: torch.Generator) -> Tensor:
    """Draw momenta from N(0, G)."""
    root = spectral_function(hessian(q), lambda eigenvalues: softabs(eigenvalues).sqrt())
    return torch.einsum("kij,kj->ki", root, torch.randn(q.shape, generator=generator, dtype=q.dtype))


def fixed_point(step: Callable[[Tensor], Tensor], start: Tensor, scale: Tensor, tolerance: float) -> Tensor:
    """Iterate until all chains have converged or left; return NaN for chains that do not converge."""
    found, left = start, torch.zeros(len(start), dtype=torch.bool)
    for _ in range(30):
        before, found = found, step(found)
        off = ((found - before) / scale).abs().amax(1)
        # Far from the start there is no solution, and derivatives may overflow.
        left |= ~((found - start).abs() / scale < FAR).all(1)
        found = torch.where(left[:, None], start, found)
        if not bool(((off > tolerance) & ~left).any()):
            break
    return torch.where(((off <= tolerance) & ~left)[:, None], found, torch.nan)


def leapfrog(q: Tensor, p: Tensor, size: float, steps: int, tolerance: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Take steps of the generalized leapfrog; chains whose equations have no solution become NaN."""
    for _ in range(steps):
        alive = q.isfinite().all(1)
        place, momentum = q[alive], p[alive]
        scale = momentum.abs().amax(1, keepdim=True)
        # The functions of both equations are called within this step only, so they see its variables.
        half = fixed_point(lambda p: momentum - size / 2 * forces(place, p), momentum, scale, tolerance)  # noqa: B023
        ok = half.isfinite().all(1)
        place, half = place[ok], half[ok]
        before = velocities(place, half)
        scale = size * before.abs().amax(1, keepdim=True)
        end = fixed_point(lambda q: place + size / 2 * (before + velocities(q, half)), place, scale, tolerance)  # noqa: B023
        q, p = torch.full_like(q, torch.nan), torch.full_like(p, torch.nan)
        still = alive.nonzero()[:, 0][ok]
        fine = end.isfinite().all(1)
        q[still[fine]] = end[fine]
        p[still[fine]] = half[fine] - size / 2 * forces(end[fine], half[fine])
    return q, p


@dataclass(frozen=True)
class Sampled:
    """Draws of v (transitions, chains), and the mean acceptance probability."""

    v: Tensor
    accepted: float

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and mean square of v, and their standard errors from independent chains, (2,) each."""
        each = torch.stack([self.v.mean(0), (self.v**2).mean(0)])
        return each.mean(1), each.std(1) / each.shape[1] ** 0.5


def sample(chains: int, transitions: int, warmup: int, size: float, steps: int, seed: int = 0) -> Sampled:
    """Run chains of Riemannian Hamiltonian Monte Carlo from v = 0."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(chains, 1 + COORDINATES, generator=generator, dtype=torch.float64)
    q[:, 0] = 0.0
    seen, rates = [], []
    for transition in range(warmup + transitions):
        p = momenta(q, generator)
        # Random step sizes avoid periodic paths.
        jitter = 0.8 + 0.4 * float(torch.rand((), generator=generator))
        proposed, turned = leapfrog(q, p, size * jitter, steps)
        done = proposed.isfinite().all(1)
        change = torch.full((chains,), torch.inf, dtype=q.dtype)
        change[done] = hamiltonian(proposed[done], turned[done]) - hamiltonian(q[done], p[done])
        rate = torch.exp(-change).clamp(max=1).nan_to_num(0.0)
        taken = torch.rand(chains, generator=generator, dtype=q.dtype) < rate
        q = torch.where(taken[:, None], proposed, q)
        if transition >= warmup:
            seen.append(q[:, 0])
            rates.append(rate.mean())
    return Sampled(torch.stack(seen), float(torch.stack(rates).mean()))


def sample_plainly(chains: int, transitions: int, warmup: int, size: float, steps: int, seed: int = 0) -> Sampled:
    """Run chains of Hamiltonian Monte Carlo with the identity as metric, from v = 0."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(chains, 1 + COORDINATES, generator=generator, dtype=torch.float64)
    q[:, 0] = 0.0
    slope = torch.func.grad(lambda q: potential(q).sum())
    seen, rates = [], []
    for transition in range(warmup + transitions):
        p = torch.randn(q.shape, generator=generator, dtype=q.dtype)
        proposed, turned = q, p - size / 2 * slope(q)
        for step in range(steps):
            proposed = proposed + size * turned
            turned = turned - (size if step < steps - 1 else size / 2) * slope(proposed)
        change = potential(proposed) - potential(q) + ((turned**2).sum(1) - (p**2).sum(1)) / 2
        rate = torch.exp(-change).clamp(max=1).nan_to_num(0.0)
        taken = torch.rand(chains, generator=generator, dtype=q.dtype) < rate
        q = torch.where(taken[:, None], proposed, q)
        if transition >= warmup:
            seen.append(q[:, 0])
            rates.append(rate.mean())
    return Sampled(torch.stack(seen), float(torch.stack(rates).mean()))


def energy_errors(sizes: Sequence[float], duration: float = 0.8, chains: int = 50) -> list[float]:
    """Return the median absolute energy error at the end of paths of one duration, for each step size."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(chains, 1 + COORDINATES, generator=generator, dtype=torch.float64)
    q[:, 1:] *= torch.exp(q[:, :1] / 2)
    p = momenta(q, generator)
    before, found = hamiltonian(q, p), []
    for size in sizes:
        ends = leapfrog(q, p, size, round(duration / size), tolerance=1e-12)
        found.append(float((hamiltonian(*ends) - before).abs().nanmedian()))
    return found


def check() -> str:
    """Run hodiff's check on the Hamiltonian at one point: all routes, gradgradcheck, SciPy's Hessian."""
    p = torch.linspace(-1, 1, 4, dtype=torch.float64)
    q = torch.tensor([0.3, 0.5, -0.2, 0.4], dtype=torch.float64)
    return hodiff.assert_differentiable(lambda q: hamiltonian(q[None], p[None])[0], q, vmap=False).summary


def draw(results: dict[str, Sampled], path: Path) -> None:
    """Draw the marginal distributions of v and the exact one."""
    figure, axes = plt.subplots(1, len(results), figsize=(4.4 * len(results), 3.2), layout="constrained", sharey=True)
    grid = torch.linspace(-12, 12, 200)
    for axis, (name, found) in zip(axes, results.items(), strict=True):
        axis.hist(found.v.flatten().numpy(), bins=60, range=(-12, 12), density=True, alpha=0.6)
        axis.plot(grid, norm.pdf(grid, scale=WIDTH), color="black", linewidth=1)
        axis.set(title=name, xlabel="v")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the integrator's order, and sample by both methods."""
    parser = argparse.ArgumentParser(description="Riemannian Hamiltonian Monte Carlo on Neal's funnel.")
    parser.add_argument("--chains", type=int, default=50, help="number of chains")
    parser.add_argument(
        "--transitions", type=int, default=16, help="number of transitions, after half as many for warm-up"
    )
    parser.add_argument("--quick", action="store_true", help="use 10 chains and 4 transitions")
    parser.add_argument("--output", type=Path, default=Path("figures/riemannian_hmc.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = (0.2, 0.1, 0.05)
    errors = energy_errors(sizes, chains=10 if options.quick else 50)
    for size, error in zip(sizes, errors, strict=True):
        print(f"step size {size:g}: energy error {error:.2e}")
    chains, transitions = (10, 4) if options.quick else (options.chains, options.transitions)
    ways = {
        "Riemannian metric": lambda: sample(chains, transitions, transitions // 2, 0.25, 8),
        "constant metric": lambda: sample_plainly(chains, 10 * transitions, 5 * transitions, 0.1, 100),
    }
    results = {}
    print(f"\n{'':20}{'accepted':>10}{'mean of v':>20}{'mean of v^2':>20}{'seconds':>10}")
    for name, run in ways.items():
        begun = time.process_time()
        results[name] = found = run()
        (mean, square), (off, away) = (each.tolist() for each in found.moments())
        numbers = f"{f'{mean:.2f} +- {off:.2f}':>20}{f'{square:.2f} +- {away:.2f}':>20}"
        print(f"{name:20}{found.accepted:10.2f}{numbers}{time.process_time() - begun:10.1f}")
    print(f"{'exact':20}{'':10}{0:20.2f}{WIDTH**2:20.2f}")
    draw(results, options.output)
    print(f"\nFigure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
