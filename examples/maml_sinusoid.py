"""MAML and its family on sine waves, the regression problem of Finn et al., 2017, section 5.1.

    python examples/maml_sinusoid.py --quick
    python examples/maml_sinusoid.py --shots 5 10 --seeds 2 --learners maml,fomaml,anil,meta-sgd,reptile

A task is a sine wave of amplitude in [0.1, 5] and phase in [0, pi], given at K points in [-5, 5]. A network with two
hidden layers of 40 learns weights from which one gradient step on those points fits the wave. The script trains it,
prints the error after one step on 600 new waves, and plots the error after up to ten steps. First it compares a
meta-gradient with finite differences, and the second derivative of the meta-loss with gradgradcheck and with SciPy's
Hessian. If they disagree, it prints an error and ends with exit status 1.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from tqdm import tqdm

import hodiff
from hodiff.checks import along_directions
from hodiff.meta import ANIL, FOMAML, MAML, MetaLearner, MetaSGD, Reptile

mpl.use("Agg")
import matplotlib.pyplot as plt

Tasks = tuple[Tensor, Tensor, Tensor, Tensor]
Parameters = dict[str, Tensor]

INNER_RATE, META_RATE, META_BATCH, TEST_TASKS, TEST_STEPS = 0.01, 1e-3, 25, 600, 10
DIFFERENCES_AGREE_TO = 1e-6  # relative; central differences of step 1e-5 in float64
COMPILED_AGREES_TO = 1e-3  # relative, in float32
COMPILE_FROM = 5000  # steps from which compilation, which takes half a minute, pays


def mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Compute the loss of both the inner and the outer problem."""
    return (prediction - target).square().mean()


LEARNERS: dict[str, Callable[[nn.Module], MetaLearner]] = {
    "maml": lambda network: MAML(network, mean_squared_error, INNER_RATE),
    "fomaml": lambda network: FOMAML(network, mean_squared_error, INNER_RATE),
    "anil": lambda network: ANIL(network, mean_squared_error, INNER_RATE),
    "meta-sgd": lambda network: MetaSGD(network, mean_squared_error, INNER_RATE),
    "reptile": lambda network: Reptile(network, mean_squared_error, INNER_RATE, steps=5),
}


def draw_tasks(count: int, shots: int, queries: int, generator: torch.Generator) -> Tasks:
    """Draw sine waves, each with its own points."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    amplitude, phase = uniform(0.1, 5.0, count, 1, 1), uniform(0.0, math.pi, count, 1, 1)
    x = uniform(-5.0, 5.0, count, shots + queries, 1)
    y = amplitude * (x - phase).sin()
    return x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:]


def make_network() -> nn.Module:
    """Return a network with two hidden layers of ReLU."""
    layers = [nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)]
    return nn.Sequential(*layers)


def check_second_order(shots: int, seed: int) -> str:
    """Run hodiff's check on MAML's meta-loss, in float64."""
    torch.manual_seed(seed)
    learner = MAML(make_network().double(), mean_squared_error, INNER_RATE)
    tasks = tuple(each.double() for each in draw_tasks(2, shots, shots, torch.Generator().manual_seed(seed)))
    point = {name: each.detach() for name, each in learner.named_parameters()}

    def meta_loss(parameters: Parameters) -> Tensor:
        loss: Tensor = functional_call(learner, parameters, (tasks,))
        return loss

    few = along_directions(meta_loss, point, count=1, size=1e-3)
    return hodiff.assert_differentiable(few, torch.zeros(1, dtype=torch.float64), vmap=False).summary


def check_meta_gradient(shots: int, seed: int) -> float:
    """Return the relative distance of MAML's directional meta-gradient from a central difference, in float64."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    learner = MAML(make_network().double(), mean_squared_error, INNER_RATE)
    support_x, support_y, query_x, query_y = (each.double() for each in draw_tasks(5, shots, shots, generator))
    tasks = support_x, support_y, query_x, query_y
    point = {name: each.detach() for name, each in learner.named_parameters()}
    direction = {name: torch.randn(each.shape, generator=generator).double() for name, each in point.items()}

    def value(t: float) -> float:
        moved = {name: each + t * direction[name] for name, each in point.items()}
        with torch.no_grad():
            return functional_call(learner, moved, (tasks,)).item()

    gradients = torch.autograd.grad(learner(tasks), list(learner.parameters()))
    slope = torch.stack([(g * v).sum() for g, v in zip(gradients, direction.values(), strict=True)]).sum().item()
    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    distance = abs(slope - difference) / abs(difference)
    if not distance <= DIFFERENCES_AGREE_TO:
        raise hodiff.CheckError(f"the meta-gradient is {distance:.1e} away from differences: {slope} and {difference}.")
    return distance


def make_meta_gradient(learner: MetaLearner, steps: int) -> Callable[[Parameters, Tasks], tuple[Parameters, Tensor]]:
    """Return meta-gradient and meta-loss as a function of the parameters, compiled if that pays."""
    eager = grad_and_value(lambda parameters, tasks: functional_call(learner, parameters, (tasks,)))
    if steps < COMPILE_FROM:
        return eager
    compiled = torch.compile(eager, fullgraph=True)
    verified: list[bool] = []

    def meta_gradient(parameters: Parameters, tasks: Tasks) -> tuple[Parameters, Tensor]:
        gradients, loss = compiled(parameters, tasks)
        if not verified:
            expected, _ = eager(parameters, tasks)
            for name, each in expected.items():
                distance = ((gradients[name] - each).norm() / each.norm().clamp_min(1e-6)).item()
                if not distance <= COMPILED_AGREES_TO:
                    raise hodiff.CheckError(f"compiled and eager gradients of {name} differ by {distance:.1e}.")
            verified.append(True)
        return gradients, loss

    return meta_gradient


def train(learner: MetaLearner, shots: int, steps: int, seed: int, label: str, progress: bool) -> float:
    """Train by Adam on new tasks at every step, and return the seconds."""
    generator = torch.Generator().manual_seed(seed)
    parameters: Parameters = {**dict(learner.named_parameters())}
    optimizer = torch.optim.Adam(parameters.values(), lr=META_RATE, fused=True)
    if steps >= COMPILE_FROM:
        torch.compiler.reset()  # Graphs of other learners would count towards the recompile limit.
    meta_gradient = make_meta_gradient(learner, steps)
    start = time.perf_counter()
    bar = tqdm(range(steps), desc=label, leave=False, disable=not progress, mininterval=0.5)
    with torch.no_grad():
        for step in bar:
            gradients, loss = meta_gradient(parameters, draw_tasks(META_BATCH, shots, shots, generator))
            for name, each in parameters.items():
                each.grad = gradients[name]
            optimizer.step()
            if progress and step % 1000 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
    return time.perf_counter() - start


def evaluate(learner: MetaLearner, shots: int, seed: int) -> Tensor:
    """Return mean squared errors on new tasks, drawn per seed, after 0, 1, ... steps: (steps + 1, tasks)."""
    tasks = draw_tasks(TEST_TASKS, shots, 100, torch.Generator().manual_seed(10_000 + seed))
    # Learned rates may be unstable for more steps than they were learned for.
    most = learner.steps if isinstance(learner, MetaSGD) else TEST_STEPS
    rows = []
    with torch.no_grad():
        for steps in range(most + 1):
            adapted = learner.adapt_all(tasks[:2], steps)
            rows.append(learner.losses(adapted.params, tasks[2:], {})[0])
    return torch.stack(rows)


def spread(errors: Tensor) -> Tensor:
    """Return the half-width of the 95% confidence interval of the mean over tasks."""
    return 1.96 * errors.std(dim=-1) / math.sqrt(errors.shape[-1])


def summary(runs: list[Tensor]) -> str:
    """Format the median over networks of the mean error after one step, and its range."""
    means = torch.stack([errors[1].mean() for errors in runs])
    median = means.quantile(0.5)
    return f"median of {len(runs)} after one step {median:.3f}, from {means.min():.3f} to {means.max():.3f}"


def plot(curves: dict[str, Tensor], path: Path) -> None:
    """Plot error by number of inner steps, with its confidence band."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for label, errors in curves.items():
        mean, half = errors.mean(dim=1), spread(errors)
        (line,) = axes.plot(mean, marker="o", markersize=3, label=label)
        axes.fill_between(range(len(mean)), mean - half, mean + half, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="gradient steps on the new task", ylabel="mean squared error", yscale="log")
    axes.set_title(f"Adapting to {TEST_TASKS} new sine waves")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="MAML and its family on sine waves.")
    parser.add_argument("--steps", type=int, default=70_000, help="number of meta-steps")
    parser.add_argument("--quick", action="store_true", help="take 1,000 meta-steps")
    parser.add_argument("--shots", type=int, nargs="+", default=[5], help="number of points of each wave (K)")
    parser.add_argument("--seeds", type=int, default=1, help="number of networks for each learner")
    parser.add_argument("--learners", default="maml", help=f"comma-separated names, from {','.join(LEARNERS)}")
    parser.add_argument("--output", type=Path, default=Path("figures/maml_sinusoid.png"), help="path of the figure")
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args()
    options.learners = options.learners.split(",")
    unknown = set(options.learners) - set(LEARNERS)
    if unknown:
        parser.error(f"--learners: expected some of {','.join(LEARNERS)}, got {','.join(sorted(unknown))}")
    options.steps = 1000 if options.quick else options.steps
    return options


def main() -> None:
    """Check, train, evaluate and draw."""
    options = parse_options()
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    distance = check_meta_gradient(options.shots[0], seed=0)
    print(f"MAML's meta-gradient is {distance:.1e} (relative) away from finite differences")
    print(f"{check_second_order(options.shots[0], seed=0)}\n")
    print(f"mean squared error on {TEST_TASKS} new waves, with 95% confidence, after {options.steps:,} meta-steps")
    print(f"{'':24}{'no step':>18}{'one step':>18}{f'{TEST_STEPS} steps':>18}{'ms per meta-step':>18}")
    curves = {}
    for shots in options.shots:
        for name in options.learners:
            runs = []
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                label = f"{name}, K={shots}, seed {seed}"
                learner = LEARNERS[name](make_network())
                seconds = train(learner, shots, options.steps, seed, label, progress)
                errors = curves[label] = evaluate(learner, shots, seed)
                runs.append(errors)
                shown = [errors[i : i + 1] for i in (0, 1, TEST_STEPS)]
                cells = [f"{each.mean():.3f} ± {spread(each[0]):.3f}" if len(each) else "-" for each in shown]
                cells.append(f"{1000 * seconds / max(options.steps, 1):.2f}")
                print(f"{label:24}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
            if len(runs) > 1:
                print(f"{name}, K={shots}: {summary(runs)}\n", flush=True)
    plot(curves, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Derivatives disagree: {disagreement}")
