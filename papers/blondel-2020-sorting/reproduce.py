"""Soft ranks and soft sorting: exactness, time n log n, and applications.

python papers/blondel-2020-sorting/reproduce.py
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine, make_classification
from sklearn.linear_model import HuberRegressor
from sklearn.naive_bayes import GaussianNB
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from hodiff.functions import soft_rank, soft_sort
from papers.common import Claim, Reproduction, run, verdict

OURS, PAIRS, TRANSPORT = "soft_rank", "all pairs", "optimal transport"


def by_scipy(x: np.ndarray, temperature: float) -> np.ndarray:
    """Compute soft ranks as a quadratic program: on the permutahedron, k entries sum to at least 1 + ... + k."""
    n = len(x)
    rows = [row for row in itertools.product((0, 1), repeat=n) if 0 < sum(row) < n]
    A = np.array(rows, dtype=float)
    least = np.array([sum(row) * (sum(row) + 1) / 2 for row in rows])
    found = minimize(
        lambda y: ((y - x / temperature) ** 2).sum() / 2,
        np.full(n, (n + 1) / 2),
        jac=lambda y: y - x / temperature,
        method="SLSQP",
        constraints=[
            {"type": "ineq", "fun": lambda y: A @ y - least, "jac": lambda y: A},
            {"type": "eq", "fun": lambda y: y.sum() - n * (n + 1) / 2, "jac": lambda y: np.ones((1, n))},
        ],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ranks: np.ndarray = found.x
    return ranks


def exactness(cases: int) -> dict[str, float]:
    """Return the largest distances of ranks from SciPy's, of Jacobians from differences, and of limits from theory."""
    generator = torch.Generator().manual_seed(0)
    apart: dict[str, list[float]] = {"SciPy": [], "differences": [], "ranks": [], "means": []}
    for case in range(cases):
        x = torch.randn(5, dtype=torch.float64, generator=generator)
        temperature = (0.1, 0.3, 1.0)[case % 3]
        apart["SciPy"].append(np.abs(soft_rank(x, temperature).numpy() - by_scipy(x.numpy(), temperature)).max())
        J = torch.func.jacrev(lambda x, t=temperature: soft_rank(x, t))(x)
        step = 1e-6 * torch.eye(5, dtype=torch.float64)
        differences = (soft_rank(x + step, temperature) - soft_rank(x - step, temperature)).T / 2e-6
        apart["differences"].append((J - differences).abs().max().item())
        gap = x.sort().values.diff().min().item()
        apart["ranks"].append((soft_rank(x, gap) - x.argsort().argsort() - 1).abs().max().item())
        apart["means"].append((soft_rank(x, 1e9) - 3).abs().max().item())
    return {name: max(values) for name, values in apart.items()}


def all_pairs(x: Tensor) -> Tensor:
    """Compute ranks by soft comparisons of all pairs."""
    return 0.5 + torch.sigmoid(x[:, :, None] - x[:, None, :]).sum(dim=2)


def transport(x: Tensor, iterations: int = 10, strength: float = 0.1) -> Tensor:
    """Compute ranks by an entropic transport of the numbers to n places, with a fixed number of Sinkhorn iterations."""
    n = x.shape[-1]
    places = torch.linspace(0, 1, n, dtype=x.dtype)
    logits = -(torch.sigmoid(x)[:, :, None] - places).square() / strength
    f, g = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(iterations):
        f = -torch.logsumexp(logits + g[:, None, :], dim=2)
        g = -torch.logsumexp(logits + f[:, :, None], dim=1)
    plan = (logits + f[:, :, None] + g[:, None, :]).exp()
    return plan @ torch.arange(1, n + 1, dtype=x.dtype)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {OURS: soft_rank, PAIRS: all_pairs, TRANSPORT: transport}


def times(sizes: dict[str, list[int]], batch: int, rounds: int, progress: bool) -> dict[str, dict[int, float]]:
    """Return the least processor seconds of ranks and their gradient, by way and length."""
    found: dict[str, dict[int, float]] = {name: {} for name in WAYS}
    work = [(name, n) for name, lengths in sizes.items() for n in lengths]
    for name, n in tqdm(work, desc="times", leave=False, disable=not progress):
        x = torch.randn(batch, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
        weights = torch.linspace(-1, 1, n)
        seconds = []
        for _ in range(rounds):
            start = time.process_time()
            torch.autograd.grad((WAYS[name](x) * weights).sum(), x)
            seconds.append(time.process_time() - start)
        found[name][n] = min(seconds)
    return found


def growth(curve: dict[int, float]) -> float:
    """Fit the exponent of n in the time, over the larger half of lengths."""
    lengths = list(curve)[(len(curve) - 1) // 2 :]
    return float(np.polyfit(np.log(lengths), np.log([curve[n] for n in lengths]), 1)[0])


def rankings(quick: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return points and the ranks of their classes by naive Bayes, as the paper's benchmark was made."""
    made = {
        f"{classes} classes": make_classification(
            600, 10, n_informative=6, n_classes=classes, n_clusters_per_class=1, random_state=classes
        )
        for classes in (5, 8)
    }
    sets = {"iris": load_iris(return_X_y=True), "wine": load_wine(return_X_y=True), **made}
    if not quick:
        sets["breast cancer"] = load_breast_cancer(return_X_y=True)
        pixels, labels = load_digits(return_X_y=True)
        sets["digits"] = (pixels[:600, 8:56], labels[:600])
    found = {}
    for name, (X, labels) in sets.items():
        X = (X - X.mean(0)) / (X.std(0) + 1e-9)
        scores = GaussianNB(var_smoothing=1e-2).fit(X, labels).predict_log_proba(X)
        ranks = scores.argsort(1).argsort(1) + 1.0
        found[name] = torch.from_numpy(X), torch.from_numpy(ranks)
    return found


def label_ranking(X: Tensor, ranks: Tensor, temperature: float | None, steps: int, seed: int) -> float:
    """Fit a linear model by least squares, perhaps through soft ranks; return Spearman's correlation on new data."""
    train, test = split(len(X), seed)
    inputs = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
    w = torch.zeros(inputs.shape[1], ranks.shape[1], dtype=X.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.05)
    for _ in range(steps):
        outputs = inputs[train] @ w
        found = outputs if temperature is None else soft_rank(outputs, temperature)
        loss = (found - ranks[train]).square().mean() + 1e-4 * w.square().sum()
        (w.grad,) = torch.autograd.grad(loss, w)
        optimizer.step()
    predicted = (inputs[test] @ w.detach()).argsort(1).argsort(1) + 1.0
    n = ranks.shape[1]
    return (1 - 6 * (predicted - ranks[test]).square().sum(1) / (n * (n**2 - 1))).mean().item()


def split(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split the points into three fifths for fitting and the rest for evaluation."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: n * 3 // 5], order[n * 3 // 5 :]


def best_temperature(X: Tensor, ranks: Tensor, steps: int, seed: int) -> float:
    """Return the best of three temperatures on a split of the fitting points."""
    train, _ = split(len(X), seed)
    return max((0.1, 1.0, 10.0), key=lambda t: label_ranking(X[train], ranks[train], t, steps, seed))


def regression(share: float, seed: int, steps: int) -> dict[str, float]:
    """Return R² on clean held-out points by method, with noise in a share of the training targets."""
    X, y = load_diabetes(return_X_y=True)
    X, y = X / X.std(0), (y - y.mean()) / y.std()
    random = np.random.default_rng(seed)
    order = random.permutation(len(X))
    train, test = order[:350], order[350:]
    bad = random.permutation(train)[: round(share * len(train))]
    noisy = y.copy()
    noisy[bad] += 5 * np.abs(random.standard_normal(len(bad)))  # one-sided, so that errors do not average out
    inputs = torch.from_numpy(np.column_stack([X, np.ones(len(X))]))
    targets = torch.from_numpy(noisy)
    kept = round(0.5 * len(train))

    def r2(predicted: np.ndarray) -> float:
        return float(1 - ((predicted - y[test]) ** 2).mean() / y[test].var())

    def trimmed(temperature: float | None) -> float:
        """Fit the half of all points with the least losses, softly; all points without temperature."""

        def loss(w: Tensor) -> Tensor:
            losses = (inputs[train] @ w - targets[train]).square() / 2
            least = losses if temperature is None else soft_sort(losses, temperature)[:kept]
            return least.mean() + 1e-3 * w.square().sum()

        w = torch.zeros(inputs.shape[1], dtype=torch.float64)
        w = hodiff.optimize.minimize(loss, w, method="l-bfgs-b", options={"maxiter": steps}).x
        return r2((inputs[test] @ w).numpy())

    huber = HuberRegressor(max_iter=1000).fit(X[train], noisy[train])
    # Losses of good points differ by less than one, those of bad points reach 30; soft_sort pools gaps above one.
    return {"least squares": trimmed(None), "soft trimmed": trimmed(1.0), "Huber": r2(huber.predict(X[test]))}


def draw(seconds: dict[str, dict[int, float]], scores: dict[str, Any], robust: dict[str, Any]) -> Figure:
    """Plot times by length, label rankings, and R² by the share of bad targets."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, curve in seconds.items():
        left.loglog(list(curve), list(curve.values()), marker=".", label=name)
    left.set(xlabel="n", ylabel="seconds, with gradient")
    left.legend(fontsize=7)
    places = np.arange(len(scores))
    for index, name in enumerate(("with", "without")):
        middle.bar(places + 0.4 * index, [each[name] for each in scores.values()], 0.4, label=f"{name} soft ranks")
    middle.set_xticks(places + 0.2, list(scores), rotation=30, fontsize=7)
    middle.set(ylabel="Spearman's correlation", ylim=(0, 1))
    middle.legend(fontsize=7)
    for name in next(iter(robust.values())):
        right.plot([float(share) for share in robust], [each[name] for each in robust.values()], marker=".", label=name)
    right.set(xlabel="share of bad targets", ylabel="R² on clean points", ylim=(-1, 1))
    right.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Compare ranks with SciPy's, time them, and use them in two applications."""
    torch.set_num_threads(1)
    cases, steps, splits, batch, rounds = (6, 60, 1, 8, 1) if quick else (60, 100, 2, 8, 3)
    lengths = [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 51200]
    sizes = {OURS: lengths[:4] if quick else lengths, PAIRS: lengths[: 3 if quick else 4]}
    sizes[TRANSPORT] = lengths[: 2 if quick else 3]
    exact = exactness(cases)
    seconds = times(sizes, batch, rounds, progress)
    scores = {}
    for name, (X, ranks) in tqdm(rankings(quick).items(), desc="rankings", leave=False, disable=not progress):
        chosen = [1.0 if quick else best_temperature(X, ranks, steps, seed) for seed in range(splits)]
        scores[name] = {
            "with": float(np.mean([label_ranking(X, ranks, t, steps, seed) for seed, t in enumerate(chosen)])),
            "without": float(np.mean([label_ranking(X, ranks, None, steps, seed) for seed in range(splits)])),
            "temperatures": chosen,
        }
    robust = {}
    for share in (0.0, 0.4) if quick else (0.0, 0.1, 0.2, 0.3, 0.4):
        runs = [regression(share, seed, 200) for seed in range(2 if quick else 6)]
        robust[str(share)] = {name: float(np.mean([each[name] for each in runs])) for name in runs[0]}

    longest = {name: max(set(seconds[OURS]) & set(seconds[name])) for name in (PAIRS, TRANSPORT)}
    faster = {name: seconds[name][n] / seconds[OURS][n] for name, n in longest.items()}
    powers = {name: growth(curve) for name, curve in seconds.items()}
    better = sum(each["with"] > each["without"] + 0.002 for each in scores.values())
    worse = sum(each["with"] < each["without"] - 0.002 for each in scores.values())
    clean, bad = robust["0.0"], robust["0.4"]
    claims = [
        Claim(
            "Soft ranks are computed and differentiated exactly",
            "in theory",
            f"{exact['SciPy']:.0e} from SciPy's solution of the quadratic program, Jacobians "
            f"{exact['differences']:.0e} from differences",
            verdict(exact["SciPy"] < 1e-5 and exact["differences"] < 1e-6, exact["SciPy"] < 1e-3),
        ),
        Claim(
            "Soft ranks tend to the ranks at a small temperature, and to their mean at a large temperature",
            "in theory",
            f"{exact['ranks']:.0e} and {exact['means']:.0e} apart",
            verdict(exact["ranks"] < 1e-9 and exact["means"] < 1e-6, exact["ranks"] < 1e-3),
        ),
        Claim(
            "Soft ranks take time n log n, and are an order of magnitude faster than other soft ranks",
            "an order of magnitude (abstract)",
            f"time grows as n to the {powers[OURS]:.2f}, all pairs as {powers[PAIRS]:.2f}; "
            + ", ".join(f"{faster[name]:.0f} times as fast as {name} at n = {n}" for name, n in longest.items()),
            # n log n grows as the power 1.1 over these lengths.
            verdict(powers[OURS] < 1.3 and min(faster.values()) > 10, powers[OURS] < 1.3 and max(faster.values()) > 3),
        ),
        Claim(
            "A layer of soft ranks improves label ranking on most data sets",
            "qualitative",
            f"Spearman's correlation is better on {better} of {len(scores)} data sets, worse on {worse}",
            verdict(better > len(scores) / 2 and better > 2 * worse, better > worse),
        ),
        Claim(
            "Soft trimmed least squares is robust to outliers, and least squares is not",
            "qualitative",
            f"R² with 0 and 40 % bad targets: {clean['soft trimmed']:.2f}, {bad['soft trimmed']:.2f}; least squares "
            f"{clean['least squares']:.2f}, {bad['least squares']:.2f}; Huber {clean['Huber']:.2f}, {bad['Huber']:.2f}",
            verdict(
                bad["soft trimmed"] > clean["least squares"] - 0.15
                and bad["soft trimmed"] > max(bad["least squares"] + 0.1, bad["Huber"] - 0.05),
                bad["soft trimmed"] > bad["least squares"],
            ),
        ),
    ]
    settings = {"batch": batch, "steps": steps, "splits": splits, "data sets": list(scores)}
    data = {"exact": exact, "seconds": seconds, "powers": powers, "rankings": scores, "regression": robust}
    return Reproduction(claims, settings, data, draw(seconds, scores, robust))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
