"""Energies of helium by steps, with SPRING and with MinSR, and ground states of helium and lithium.

python papers/goldshlager-2024-spring/reproduce.py
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from papers.common import OURS, Claim, Reproduction, run, verdict

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "variational_monte_carlo.py"

SPRING, MINSR = "SPRING", "MinSR"
MOMENTUM = {SPRING: 0.95, MINSR: 0.0}
RATES = (0.05, 0.2)
DAMPING = 1e-3
SEED = 0
ADAMW = "AdamW"
CHEMICAL_ACCURACY = 1.6e-3  # hartree, 1 kcal/mol
# FermiNet: D. Pfau, J. Spencer, A. Matthews & W. Foulkes, Phys. Rev. Research 2, 033429 (2020).
PUBLISHED = {"helium": "exact -2.903724", "lithium": "exact -7.478060, FermiNet -7.47798(1)"}


def example() -> ModuleType:
    """Load the example, which has the wavefunction, its local energies and its walkers."""
    spec = importlib.util.spec_from_file_location("monte_carlo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["monte_carlo"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def start(seed: int, count: int) -> tuple[ModuleType, nn.Module, Any]:
    """Return the example, a wavefunction of helium, and walkers in equilibrium."""
    vmc = example()
    generator = torch.Generator().manual_seed(seed)
    state = vmc.SYSTEMS["helium"].make(generator)
    x = torch.randn(count, 2, 3, generator=generator, dtype=torch.float64)
    return vmc, state, vmc.Walkers(x, generator).walk(state, 200)


def train(method: str, rate: float, seed: int, count: int, steps: int) -> dict[str, list[float]]:
    """Train for some steps; return means and deviations of energies, and processor seconds of the optimizer's steps."""
    vmc, state, walkers = start(seed, count)
    optimizer = hodiff.optim.SPRING(state, lr=rate, damping=DAMPING, momentum=MOMENTUM[method], norm_constraint=1e-2)
    found: dict[str, list[float]] = {"energy": [], "deviation": [], "seconds": []}
    for _ in range(steps):
        walkers.walk(state, vmc.MOVES)
        x = walkers.x
        energies = vmc.local_energy(state, vmc.SYSTEMS["helium"].potential, x)
        found["energy"].append(energies.mean().item())
        found["deviation"].append(energies.std().item())
        begun = time.process_time()
        optimizer.step(lambda walker: state(walker[None])[0], x, vmc.centred(energies))
        found["seconds"].append(time.process_time() - begun)
    return found


def distance_to_dense(count: int = 60) -> float:
    """Compare a step of MinSR with stochastic reconfiguration in the space of parameters; relative distance."""
    vmc, state, walkers = start(0, count)
    x: Tensor = walkers.x
    energies = vmc.centred(vmc.local_energy(state, vmc.SYSTEMS["helium"].potential, x))
    parameters = list(state.parameters())
    rows = []
    for walker in x:
        found = torch.autograd.grad(state(walker[None])[0], parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        rows.append(torch.cat([each.reshape(-1) for each in parts]))
    centred = torch.stack(rows) - torch.stack(rows).mean(0)
    S = centred.T @ centred / count + DAMPING * torch.eye(centred.shape[1], dtype=x.dtype)
    expected = -torch.linalg.solve(S, centred.T @ energies / count)
    before = torch.cat([p.detach().reshape(-1) for p in parameters])
    optimizer = hodiff.optim.SPRING(state, lr=1.0, damping=DAMPING, momentum=0.0, norm_constraint=None)
    optimizer.step(lambda walker: state(walker[None])[0], x, energies)
    moved = torch.cat([p.detach().reshape(-1) for p in parameters]) - before
    return float((moved - expected).norm() / expected.norm())


def step_seconds(name: str, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure steps of SPRING and AdamW in turns, from the same weights; median processor seconds."""
    vmc, times = example(), {}
    system = vmc.SYSTEMS[name]
    for method in (SPRING, ADAMW):
        generator = torch.Generator().manual_seed(0)
        state = system.make(generator)
        x = torch.randn(count, system.electrons, 3, generator=generator, dtype=torch.float64)
        times[method] = (state, vmc.Walkers(x, generator).walk(state, 50), vmc.WAYS[method](state), [], [])
    for _ in range(rounds):
        for state, walkers, step, whole, own in times.values():
            begun = time.process_time()
            energies = vmc.local_energy(state, system.potential, walkers.walk(state, vmc.MOVES).x)
            middle = time.process_time()
            step(state, walkers, energies, 0.01)
            whole.append(time.process_time() - begun)
            own.append(time.process_time() - middle)
    return {method: {"step": median(whole), "optimizer": median(own)} for method, (*_, whole, own) in times.items()}


def ground_state_claims(
    courses: dict[str, Any], seconds: dict[str, dict[str, dict[str, float]]], steps: int
) -> list[Claim]:
    """Return a claim for the energy of each atom, and one for the cost of a step."""
    claims = []
    for name, course in courses.items():
        above = course.energy - example().SYSTEMS[name].exact
        inside = abs(above) + 2 * course.error < CHEMICAL_ACCURACY
        claims.append(
            Claim(
                f"Ground-state energy of {name} by SPRING, {steps} steps from start {SEED}",
                PUBLISHED[name],
                f"{course.energy:.6f} ± {course.error:.6f}, {1e3 * above:.2f} ± {1e3 * course.error:.2f} mhartree "
                f"above the exact energy: {'within' if inside else 'not within'} chemical accuracy (1.6 mhartree) by "
                f"two errors; deviation of local energies {course.deviation:.3f} hartree; {course.seconds:.0f} s",
                OURS,
            )
        )
    claims.append(
        Claim(
            "A step beside one of AdamW, on the same network and as many walkers",
            "",
            "; ".join(
                f"{name}: {1e3 * each[SPRING]['step']:.0f} ms, {each[SPRING]['step'] / each[ADAMW]['step']:.1f} times "
                f"AdamW's; without sampling and energies {1e3 * each[SPRING]['optimizer']:.0f} ms against "
                f"{1e3 * each[ADAMW]['optimizer']:.0f} ms"
                for name, each in seconds.items()
            ),
            OURS,
        )
    )
    return claims


def last_third(curve: list[float]) -> float:
    """Return the mean of the last third."""
    part = curve[-max(1, len(curve) // 3) :]
    return sum(part) / len(part)


def draw(curves: dict[str, dict[str, list[float]]]) -> Figure:
    """Plot the distance of energies to the exact one by steps, in means over five, one panel per atom."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (name, each) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for method, curve in each.items():
            means = torch.tensor(curve[: len(curve) // 5 * 5]).reshape(-1, 5).mean(1) - example().SYSTEMS[name].exact
            axes.semilogy(range(5, 5 * len(means) + 1, 5), means.abs(), label=method)
        axes.axhline(CHEMICAL_ACCURACY, color="gray", linestyle=":", label="chemical accuracy")
        axes.set(xlabel="step", ylabel="distance from the exact energy, hartree", title=name)
        axes.legend()
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train helium by both methods with several rates, then both atoms to chemical accuracy."""
    torch.set_num_threads(1)
    count, steps, seeds = (40, 12, 1) if quick else (300, 100, 1)
    vmc = example()
    exact = vmc.SYSTEMS["helium"].exact
    size = (40, 12, 8) if quick else (512, 400, 400)
    full = dict(zip(("walkers", "steps", "measurements"), size, strict=True))
    courses = {name: vmc.solve(name, SPRING, Namespace(seed=SEED, **full), progress) for name in vmc.ATOMS}
    beside = {name: step_seconds(name, full["walkers"], 3 if quick else 15) for name in vmc.ATOMS}
    work = [(method, rate, seed) for method in MOMENTUM for rate in RATES for seed in range(seeds)]
    runs = {each: train(*each, count, steps) for each in tqdm(work, desc="training", leave=False, disable=not progress)}

    def mean(method: str, rate: float, what: str = "energy") -> list[float]:
        """Return the numbers of the steps, in the mean over starts."""
        found: list[float] = torch.tensor([runs[method, rate, seed][what] for seed in range(seeds)]).mean(0).tolist()
        return found

    curves, rates, errors, deviations = {}, {}, {}, {}
    for method in MOMENTUM:
        rates[method] = min(RATES, key=lambda rate: last_third(mean(method, rate)))
        curves[method] = mean(method, rates[method])
        errors[method] = last_third(curves[method]) - exact
        deviations[method] = last_third(mean(method, rates[method], "deviation"))
    # Energies of successive steps are correlated: every other step counts.
    noise = max(deviations.values()) / math.sqrt(count * seeds * max(1, steps // 6))
    seconds = {m: min(sum(runs[m, rate, 0]["seconds"]) / steps for rate in RATES) for m in MOMENTUM}
    apart = distance_to_dense(20 if quick else 60)
    ratio = seconds[SPRING] / seconds[MINSR]
    claims = [
        Claim(
            "SPRING has a lower energy than MinSR after the same number of steps",
            "qualitative (abstract: outperforms MinSR)",
            "; ".join(
                f"{m} {1e3 * errors[m]:.1f} mhartree above the exact energy, deviation of local energies "
                f"{deviations[m]:.3f} hartree (rate {rates[m]:g})"
                for m in MOMENTUM
            )
            + f", in the mean of the last third of {steps} steps, about {1e3 * noise:.1f} mhartree of noise",
            verdict(errors[SPRING] < errors[MINSR] - 2 * noise, deviations[SPRING] < deviations[MINSR]),
        ),
        Claim(
            "A step of SPRING costs hardly more than a step of MinSR",
            "qualitative",
            f"{ratio:.2f} times as long",
            verdict(ratio < 1.2, ratio < 1.5),
        ),
        Claim(
            "A step in the space of samples is that of stochastic reconfiguration",
            "in theory",
            f"relative distance {apart:.0e}",
            verdict(apart < 1e-6),
        ),
        *ground_state_claims(courses, beside, full["steps"]),
    ]
    settings = {"walkers": count, "steps": steps, "starts": seeds, "rates": RATES, "damping": DAMPING}
    settings["ground states"] = {**full, "seed": SEED}
    data = {
        "curves": curves,
        "errors": errors,
        "deviations": deviations,
        "rates": rates,
        "apart": apart,
        "seconds": seconds,
        "ground states": {name: asdict(course) for name, course in courses.items()},
        "seconds of a step": beside,
    }
    panels = {"helium": curves, "lithium": {SPRING: courses["lithium"].energies}}
    assert all(math.isfinite(error) for error in errors.values())
    return Reproduction(claims, settings, data, draw(panels))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
