"""Variational Monte Carlo: ground states of hydrogen, an oscillator, helium and lithium, with a network.

    python examples/variational_monte_carlo.py

The energy of a wavefunction psi of electrons at x is the mean, over points drawn from |psi|^2, of its local energy

    E(x) = -1/2 (Laplacian log|psi| + |gradient log|psi||^2) + V(x),

which is never below that of the ground state, and is the same at every point if psi is an eigenstate. One pass of
`hodiff.taylor.value_grad_laplacian` over all walkers gives value, gradient and Laplacian of log|psi|. The energy's
gradient in the parameters is 2 <(E - <E>) grad log|psi|>, which needs no derivative of E. A step follows this gradient,
or the natural gradient with the metric S = Cov(grad log|psi|) (stochastic reconfiguration), here with momentum and in
the space of walkers, `hodiff.optim.SPRING`.

Hydrogen and the oscillator have one parameter, whose exact value is 1: the energy becomes exact, and its variance zero.
The atoms have a network of messages between the electrons, which gives them orbitals and a symmetric factor:

    psi = exp(sum_i [-Z r_i + symmetric_i] + sum_{i<j} c r_ij / (1 + b r_ij)) det(orbitals up) det(orbitals down)

The kinks at the nucleus and where electrons meet are exact (c is 1/4 for equal spins, 1/2 for opposite ones), as
symmetric factor and orbitals are smooth. The orbitals of an electron depend on all electrons, and not on their order,
so psi changes sign if two electrons of equal spin are exchanged. Energies are in atomic units. Errors are one standard
error, by reblocking the means over all walkers. The atoms of a run with the defaults, by SPRING on one core:

                      energy     error      exact  deviation  seconds
    helium         -2.903725   4.3e-05  -2.903724    1.9e-02       89
    lithium        -7.477853   1.6e-04  -7.478060    7.3e-02      127

The deviation is that of the local energy: it is zero if the state is an eigenstate. Hartree-Fock neglects the
correlation of the electrons. Chemical accuracy is 1.6 millihartree. The reproduction of SPRING's paper,
papers/goldshlager-2024-spring, compares with MinSR and published energies.

Source: W. Foulkes et al., Rev. Mod. Phys. 73 (2001), section III; S. Sorella, Phys. Rev. B 71 (2005), for the natural
gradient; G. Goldshlager, N. Abrahamsen & L. Lin, J. Comput. Phys. 516 (2024), for SPRING; D. Pfau, J. Spencer, A.
Matthews & W. Foulkes, Phys. Rev. Research 2, 033429 (2020), for determinants of networks; R. Li et al., "Forward
Laplacian", 2024. Exact energies: G. Drake, Handbook of Atomic Physics (2006); M. Puchalski & K. Pachucki, Phys. Rev. A
73, 022503 (2006), for lithium; and the Hartree-Fock limits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from tqdm import tqdm

import hodiff
from hodiff.checks import along_directions
from hodiff.taylor import value_grad_laplacian

mpl.use("Agg")
import matplotlib.pyplot as plt

HARTREE_FOCK = {"helium": -2.861680, "lithium": -7.432727}
MOVES = 10  # moves of each walker between two energies
ONE_ELECTRON, ATOMS = ("hydrogen", "oscillator"), ("helium", "lithium")
RUNS = (*((name, "SPRING") for name in ONE_ELECTRON), ("helium", "AdamW"), *((name, "SPRING") for name in ATOMS))


class OneParameter(nn.Module):
    """Wavefunction log|psi| = -a r^power / power, of one electron."""

    def __init__(self, power: int, start: float):
        super().__init__()
        self.power = power
        self.a = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Map walkers (N, 1, 3) to (N,)."""
        return -self.a * torch.linalg.vector_norm(x, dim=-1)[:, 0] ** self.power / self.power


class Atom(nn.Module):
    """Wavefunction of an atom's electrons, antisymmetric under exchange of equal spins.

    psi = exp(sum_i [-Z r_i + symmetric_i] + sum_{i<j} cusp_ij) det up det down, smooth but for r_i and cusp_ij.
    """

    equal: Tensor

    def __init__(
        self, charge: float, spins: tuple[int, int], generator: torch.Generator, width: int = 24, layers: int = 2
    ):
        super().__init__()

        def matrices(rows: int) -> nn.ParameterList:
            drawn = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(layers))
            return nn.ParameterList(each / rows**0.5 for each in drawn)

        self.charge, self.spins, orbitals = charge, spins, max(spins)
        spin = torch.tensor([1.0] * spins[0] + [-1.0] * spins[1], dtype=torch.float64)
        self.register_buffer("equal", spin[:, None] * spin)  # 1 for equal spins, -1 for opposite ones
        self.embed = nn.Parameter(torch.randn(4, width, generator=generator, dtype=torch.float64) / 2)
        self.pair, self.receive, self.send = matrices(3), matrices(width), matrices(width)
        self.output, self.hidden = matrices(width), matrices(width)
        # Zero at first, so that the wavefunction starts with envelopes and cusps alone.
        self.read = nn.Parameter(torch.zeros(width, 1 + orbitals, dtype=torch.float64))
        self.a = nn.Parameter(charge * torch.linspace(0.2, 0.8, orbitals, dtype=torch.float64))
        self.log_b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Map walkers (N, electrons, 3) to log|psi|, (N,)."""
        logarithm, determinants = self.factors(x)
        return logarithm + determinants.abs().log()

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logarithm of the positive factor of psi, and the product of both determinants."""
        r = torch.linalg.vector_norm(x, dim=-1)
        soft = torch.sqrt(1 + x.square().sum(-1))
        squares = (x[:, :, None] - x[:, None]).square().sum(-1)
        numbers = torch.tanh(self.network(x, soft, squares)) @ self.read
        # Orbitals decay from exp(-Z r) at the nucleus, with its kink, to exp((a - Z) r) outside.
        orbitals = torch.exp(self.a * (soft[..., None] - 1)) * (1 + numbers[..., 1:])
        up, down = (each[..., : each.shape[1]] for each in orbitals.split(self.spins, 1))
        logarithm = (numbers[..., 0] - self.charge * r).sum(-1) + self.cusps(squares)
        return logarithm, torch.linalg.det(up) * torch.linalg.det(down)

    def cusps(self, squares: Tensor) -> Tensor:
        """Compute the kinks where electrons meet, of slope 1/4 for equal spins and 1/2 for opposite ones."""
        one, two = torch.triu_indices(len(self.equal), len(self.equal), 1)
        apart, opposite = torch.sqrt(squares[:, one, two]), self.equal[one, two] < 0
        return (torch.where(opposite, 0.5, 0.25) * apart / (1 + torch.exp(self.log_b)[opposite.long()] * apart)).sum(-1)

    def network(self, x: Tensor, soft: Tensor, squares: Tensor) -> Tensor:
        """Compute a vector for each electron from messages of all electrons, smooth everywhere."""
        h = torch.tanh(torch.cat([x / soft[..., None], torch.log(soft)[..., None]], -1) @ self.embed)
        near = torch.log1p(squares)
        pairs = torch.stack([near, self.equal.expand_as(near), self.equal * near], -1)
        for pair, receive, send, output, hidden in zip(
            self.pair, self.receive, self.send, self.output, self.hidden, strict=True
        ):
            messages = torch.tanh(pairs @ pair + (h @ receive)[:, :, None] + (h @ send)[:, None])
            h = h + messages.mean(2) @ output
            h = h + torch.tanh(h @ hidden)
        return h


def coulomb(x: Tensor, charge: float) -> Tensor:
    """Compute the attraction of a nucleus at the origin, and the repulsion of the electrons."""
    one, two = torch.triu_indices(x.shape[1], x.shape[1], 1)
    repulsion = (1 / torch.linalg.vector_norm(x[:, one] - x[:, two], dim=-1)).sum(-1)
    return repulsion - (charge / torch.linalg.vector_norm(x, dim=-1)).sum(-1)


@dataclass(frozen=True)
class System:
    """Electrons in a potential, with a wavefunction that approximates their ground state."""

    exact: float
    electrons: int
    potential: Callable[[Tensor], Tensor]
    make: Callable[[torch.Generator], nn.Module]


SYSTEMS = {
    "hydrogen": System(-0.5, 1, lambda x: coulomb(x, 1.0), lambda _: OneParameter(1, 0.7)),
    "oscillator": System(1.5, 1, lambda x: x.square().sum((1, 2)) / 2, lambda _: OneParameter(2, 0.6)),
    "helium": System(-2.903724, 2, lambda x: coulomb(x, 2.0), lambda g: Atom(2.0, (1, 1), g)),
    "lithium": System(-7.478060, 3, lambda x: coulomb(x, 3.0), lambda g: Atom(3.0, (2, 1), g)),
}


def local_energy(state: nn.Module, potential: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute the local energy of each walker (N, electrons, 3), without gradients in the parameters."""
    with torch.no_grad():
        _, slopes, laplacian = value_grad_laplacian(state, batched=True)(x)
        return -(laplacian + slopes.square().sum((1, 2))) / 2 + potential(x)


@dataclass
class Walkers:
    """Points drawn from |psi|^2 by Metropolis' rule, with steps of which about half are accepted."""

    x: Tensor
    generator: torch.Generator
    step: float = 0.5

    @torch.no_grad()
    def walk(self, state: nn.Module, moves: int) -> Walkers:
        """Propose `moves` moves to each walker."""
        value, accepted = state(self.x), 0.0
        for _ in range(moves):
            # Lengths differ by electrons, as an atom's inner and outer electrons move on different scales.
            lengths, directions = (
                torch.randn(*self.x.shape[:2], size, generator=self.generator, dtype=self.x.dtype) for size in (1, 3)
            )
            to = self.x + self.step * lengths.exp() * directions
            there = state(to)
            draw = torch.rand(len(to), generator=self.generator, dtype=to.dtype)
            goes = draw.log() < 2 * (there - value)
            self.x, value = torch.where(goes[:, None, None], to, self.x), torch.where(goes, there, value)
            accepted += goes.double().mean().item() / moves
        self.step *= 1.05 if accepted > 0.5 else 1 / 1.05
        return self


def centred(energies: Tensor) -> Tensor:
    """Subtract the mean from local energies, after clipping outliers to five mean deviations."""
    middle = energies.median()
    most = 5 * (energies - middle).abs().mean()
    kept = energies.clamp(middle - most, middle + most)
    return kept - kept.mean()


Step = Callable[[nn.Module, Walkers, Tensor, float], None]


def by_spring(state: nn.Module) -> Step:
    """Return a natural-gradient step with momentum."""
    optimizer = hodiff.optim.SPRING(state, damping=1e-3, momentum=0.95, norm_constraint=1e-2)

    def step(state: nn.Module, walkers: Walkers, energies: Tensor, rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step(lambda walker: state(walker[None])[0], walkers.x, centred(energies))

    return step


def by_adamw(state: nn.Module) -> Step:
    """Return a step of AdamW with the same gradient."""
    optimizer = torch.optim.AdamW(state.parameters(), weight_decay=1e-4)

    def step(state: nn.Module, walkers: Walkers, energies: Tensor, rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate / 20
        optimizer.zero_grad()
        (2 * centred(energies) * state(walkers.x)).mean().backward()
        optimizer.step()

    return step


WAYS = {"SPRING": by_spring, "AdamW": by_adamw}


def reblocked(means: Tensor) -> float:
    """Return the standard error of a correlated mean, with block lengths of Lee et al., Phys. Rev. E 83 (2011)."""
    count, length, series = len(means), 1, means
    first = error = (means.var() / count).sqrt().item()
    while len(series) >= 4 and length**3 <= 2 * count * (error / max(first, 1e-300)) ** 4:
        even = len(series) // 2 * 2
        series, length = series[:even].reshape(-1, 2).mean(1), 2 * length
        error = (series.var() / len(series)).sqrt().item()
    return error


@dataclass
class Course:
    """Mean energy at each step, and the final measurements."""

    energies: list[float] = field(default_factory=list)
    energy: float = 0.0
    error: float = 0.0
    deviation: float = 0.0
    seconds: float = 0.0


def solve(name: str, optimizer: str, options: argparse.Namespace, progress: bool) -> Course:
    """Find a ground state, and measure its energy with fixed parameters."""
    system, generator, start = SYSTEMS[name], torch.Generator().manual_seed(options.seed), time.process_time()
    state = system.make(generator)
    shape = (options.walkers, system.electrons, 3)
    walkers = Walkers(torch.randn(shape, generator=generator, dtype=torch.float64), generator).walk(state, 20 * MOVES)
    step = WAYS[optimizer](state)
    course = Course()
    for index in tqdm(range(options.steps), desc=f"{name}, {optimizer}", leave=False, disable=not progress):
        energies = local_energy(state, system.potential, walkers.walk(state, MOVES).x)
        course.energies.append(energies.mean().item())
        step(state, walkers, energies, 0.2 / (1 + index / 100))
    walkers.walk(state, 5 * MOVES)
    rows = [local_energy(state, system.potential, walkers.walk(state, MOVES).x) for _ in range(options.measurements)]
    measured = torch.stack(rows)
    course.energy, course.error = measured.mean().item(), reblocked(measured.mean(1))
    course.deviation, course.seconds = measured.std().item(), time.process_time() - start
    return course


def check() -> str:
    """Run hodiff's check on lithium's log|psi|, in the electrons: all routes, gradgradcheck, SciPy's Hessian."""
    generator = torch.Generator().manual_seed(0)
    state = Atom(3.0, (2, 1), generator, width=4).requires_grad_(False)
    state.read.normal_(generator=generator)
    somewhere = torch.tensor([[[0.3, -0.5, 0.2], [-0.6, 0.1, 0.9], [0.2, 1.1, -0.4]]], dtype=torch.float64)
    few = along_directions(lambda x: state(x).sum(), somewhere, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(courses: dict[tuple[str, str], Course], path: Path) -> None:
    """Plot distances from the exact energies, and the atoms' energies by step."""
    figure, (left, *others) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name in ONE_ELECTRON:
        distances = [abs(each - SYSTEMS[name].exact) for each in courses[name, "SPRING"].energies]
        left.semilogy(distances, label=name)
    left.set(title="distance from the exact energy", xlabel="step", ylabel="hartree")
    for name, axes in zip(ATOMS, others, strict=True):
        for optimizer in (way for atom, way in RUNS if atom == name):
            course = courses[name, optimizer]
            smooth = torch.tensor(course.energies).unfold(0, min(20, len(course.energies)), 1).mean(1)
            label = f"{optimizer}, then {course.energy:.4f} ± {course.error:.4f}"
            axes.plot(range(10, 10 + len(smooth)), smooth, label=label)
        exact = SYSTEMS[name].exact
        axes.axhline(HARTREE_FOCK[name], color="gray", linestyle=":", label="Hartree-Fock")
        axes.axhline(exact, color="black", linewidth=0.8, label=f"exact, {exact:.4f}")
        axes.set(title=f"{name}, mean of 20 steps", xlabel="step", ylim=(exact - 0.005, exact + 0.05))
    for axes in (left, *others):
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve all systems, helium by two optimizers, and print the table."""
    parser = argparse.ArgumentParser(description="Ground states by variational Monte Carlo.")
    parser.add_argument("--walkers", type=int, default=512, help="number of walkers")
    parser.add_argument("--steps", type=int, default=400, help="number of optimizer steps")
    parser.add_argument(
        "--measurements", type=int, default=400, help="number of energy measurements of all walkers, at the end"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and walkers")
    parser.add_argument("--quick", action="store_true", help="use few walkers and steps, for some seconds")
    parser.add_argument(
        "--output", type=Path, default=Path("figures/variational_monte_carlo.png"), help="path of the figure"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.walkers, options.steps, options.measurements = 128, 30, 20
    torch.set_num_threads(1)
    print(f"{check()}\n")
    print(f"{'':22}{'energy':>13}{'error':>10}{'exact':>11}{'deviation':>11}{'seconds':>9}")
    courses = {}
    progress = sys.stderr.isatty() and not options.no_progress
    for name, optimizer in RUNS:
        course = courses[name, optimizer] = solve(name, optimizer, options, progress)
        print(
            f"{f'{name}, {optimizer}':22}{course.energy:13.6f}{course.error:10.1e}{SYSTEMS[name].exact:11.6f}"
            f"{course.deviation:11.1e}{course.seconds:9.1f}",
            flush=True,
        )
    for name in ATOMS:
        course, start = courses[name, "SPRING"], "\n" if name == ATOMS[0] else ""
        below, above = HARTREE_FOCK[name] - course.energy, course.energy - SYSTEMS[name].exact
        print(
            f"{start}{name}: {1000 * below:.1f} millihartree below Hartree-Fock, and {1000 * above:.2f} ± "
            f"{1000 * course.error:.2f} above the exact energy."
        )
    draw(courses, options.output)
    print(f"Figure: {options.output}")


if __name__ == "__main__":
    main()
