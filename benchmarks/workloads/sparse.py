"""Sparse Hessians: the cost of every stage, in seconds and in gradients, compared with dense Hessians."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import hodiff
from benchmarks.machine import one_core
from benchmarks.race import Contestant, median_ratio, race
from benchmarks.report import RESULTS, describe, table, target_table
from benchmarks.targets import Verdict
from benchmarks.workloads.potentials import EXAMPLES, lennard_jones, stillinger_weber

Function = Callable[[Tensor], Tensor]
D = torch.float64
ROUNDS = 15
TOLERANCE = 1e-6
METHODS = ("star", "acyclic")
WAYS: dict[str, dict[str, Any]] = {"": {}, ", check=False": {"check": False}, ", compile=True": {"compile": True}}
COMPILED = "hodiff, compile=True"
GRADIENT, DENSE = "one gradient", "dense, hodiff.hessian_matrix"
EXPLANATION = """\
float64, one core, seconds of the processor. `gradients` is the time of a call over that of one eager gradient, the
median of ratios within a round; a call makes a product for each color, and one more for the check. `relative error` is
that of the product with a random vector, against central differences of the gradient."""


def rosenbrock(x: Tensor) -> Tensor:
    """Compute the chained Rosenbrock function, whose Hessian is tridiagonal."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@dataclass(frozen=True)
class Stages:
    """Measurements of one function.

    Attributes:
        n: Number of unknowns.
        entries: Number of entries of the pattern.
        pattern: Seconds to find the pattern.
        coloring: Seconds of colorings, by method.
        colors: Number of colors, by method.
        milliseconds: Time of a call, by contestant.
        gradients: Ratio of that time to a gradient's.
        errors: Relative errors, by contestant.
    """

    n: int
    entries: int
    pattern: float
    coloring: dict[str, float]
    colors: dict[str, int]
    milliseconds: dict[str, float]
    gradients: dict[str, float]
    errors: dict[str, float]


def timed(call: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Return the median time of some calls, and the last result."""
    seconds = []
    for _ in range(repeats):
        begun = time.process_time()
        found = call()
        seconds.append(time.process_time() - begun)
    return median(seconds), found


def gradient(f: Function, x: Tensor) -> Tensor:
    """Compute the gradient in eager torch."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def difference(f: Function, x: Tensor, v: Tensor, step: float = 1e-6) -> Tensor:
    """Compute the Hessian's product with v by differences of gradients."""
    return (gradient(f, x + step * v) - gradient(f, x - step * v)) / (2 * step)


def stages(f: Function, x: Tensor, *, dense: bool, rounds: int) -> Stages:
    """Measure all stages of a function, and race the calls."""
    pattern_seconds, pattern = timed(lambda: hodiff.sparse.hessian_pattern(f, x))
    colorings = {method: timed(partial(hodiff.sparse.color, pattern, method)) for method in METHODS}
    ways: dict[str, Callable[[], Any]] = {}
    for method, (_, coloring) in colorings.items():
        for suffix, options in WAYS.items():
            ways[method + suffix] = partial(hodiff.sparse.hessian(f, coloring=coloring, **options), x)
    if dense:
        ways[DENSE] = partial(hodiff.hessian_matrix, f, x)
    v = torch.randn(len(x), generator=torch.Generator().manual_seed(1), dtype=D)
    expected = difference(f, x, v)
    errors = {name: float((way() @ v - expected).norm() / expected.norm()) for name, way in ways.items()}
    if wrong := {name: error for name, error in errors.items() if not error <= TOLERANCE}:
        raise hodiff.CheckError(f"sparse: {wrong} off the difference of gradients.")
    slow = {DENSE: ways.pop(DENSE)} if dense else {}
    contestants = [Contestant(GRADIENT, "unit", partial(gradient, f, x))]
    contestants += [Contestant(name, "hodiff", way) for name, way in ways.items()]
    seconds = race(contestants, rounds, "sparse", time.process_time)
    # A dense Hessian takes as long as all rounds together: it runs once and is divided by the median gradient.
    once = {name: timed(way, 1)[0] for name, way in slow.items()}
    unit = median(seconds[GRADIENT])
    return Stages(
        n=len(x),
        entries=pattern.nnz,
        pattern=pattern_seconds,
        coloring={method: took for method, (took, _) in colorings.items()},
        colors={method: coloring.num_colors for method, (_, coloring) in colorings.items()},
        milliseconds={name: 1e3 * median(each) for name, each in seconds.items()}
        | {name: 1e3 * each for name, each in once.items()},
        gradients={name: median_ratio(each, seconds[GRADIENT]) for name, each in seconds.items()}
        | {name: each / unit for name, each in once.items()},
        errors=errors,
    )


def page_of(found: Stages) -> str:
    """Return the tables of a function."""
    first = table(
        ["", "seconds", "colors"],
        [
            ["pattern", f"{found.pattern:.3f}", ""],
            *([f"{each} coloring", f"{found.coloring[each]:.3f}", f"{found.colors[each]:,}"] for each in METHODS),
        ],
    )
    products = {name: found.colors.get(name.split(",")[0], found.n) for name in found.gradients if name != GRADIENT}
    rows = [
        [
            name,
            f"{products[name]:,}" if name in products else "",
            f"{found.milliseconds[name]:.3g}",
            f"{ratio:.2f}",
            f"{ratio / products[name]:.2f}" if name in products else "",
            f"{found.errors[name]:.1e}" if name in found.errors else "",
        ]
        for name, ratio in found.gradients.items()
    ]
    second = table(["", "colors", "ms", "gradients", "gradients a color", "relative error"], rows)
    return f"n = {found.n:,}, {found.entries:,} entries.\n\n{first}\n\n{second}"


def most(name: str, measured: float, bound: float) -> Verdict:
    """Return the verdict on an upper bound."""
    return Verdict(f"{name} ≤ {bound:g}", measured, measured <= bound)


def least(name: str, measured: float, bound: float) -> Verdict:
    """Return the verdict on a lower bound."""
    return Verdict(f"{name} ≥ {bound:g}", measured, measured >= bound)


def chain(quick: bool) -> tuple[str, Any]:
    """Measure the chained Rosenbrock function."""
    n = 1000 if quick else 100_000
    x = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=D)
    found = stages(rosenbrock, x, dense=False, rounds=3 if quick else ROUNDS)
    verdicts = [
        most("seconds of pattern and star coloring", found.pattern + found.coloring["star"], 1.5),
        *(
            most(f"{each}, in gradients", found.gradients[each], 6)
            for each in (*METHODS, *(f"{method}, compile=True" for method in METHODS))
        ),
        # A tridiagonal matrix has no star coloring with fewer than 3 colors, and no acyclic coloring with fewer than 2.
        most("colors, acyclic / star", found.colors["acyclic"] / found.colors["star"], 2 / 3),
    ]
    return f"{page_of(found)}\n\n{target_table(verdicts)}", asdict(found)


def atoms(quick: bool) -> tuple[str, Any]:
    """Measure two potentials with a cutoff."""
    texts, data = [], {}
    for make in (lennard_jones, stillinger_weber):
        found = make(40 if quick else 1000)
        measured = stages(found.energy, found.x, dense=True, rounds=2 if quick else 5)
        verdicts = [
            most(f"{each}, in gradients a color", measured.gradients[each] / measured.colors[each], 1.5)
            for each in METHODS
        ]
        verdicts += [least(f"dense / {each}", _ratio(measured, DENSE, each), 20) for each in METHODS]
        verdicts.append(most("colors, acyclic / star", measured.colors["acyclic"] / measured.colors["star"], 0.6))
        texts.append(f"### {found.name}\n\n{page_of(measured)}\n\n{target_table(verdicts)}")
        data[found.name] = asdict(measured)
    return "\n\n".join(texts), data


def _ratio(found: Stages, over: str, under: str) -> float:
    return found.milliseconds[over] / found.milliseconds[under]


def film(quick: bool) -> tuple[str, Any]:
    """Run the example `minimal_surface` on a fine grid."""
    example = runpy.run_path(str(EXAMPLES / "minimal_surface.py"))
    side = 20 if quick else 300
    surface = example["Film"](side)
    begun = time.process_time()
    x, seen = example["newton"](surface, example["start"](surface))
    seconds = time.process_time() - begun
    off = (surface.whole(x) - example["scherk"](*surface.places())).abs().max().item()
    rows = [[f"{i}", f"{each.residual:.1e}", f"{each.step:g}", f"{each.seconds:.2f}"] for i, each in enumerate(seen)]
    text = (
        f"{side} x {side} heights, from the surface of least Dirichlet energy; with patterns and colorings, and "
        f"SciPy's `splu`: {seconds:.2f} s. The largest distance to Scherk's surface is {off:.1e}.\n\n"
        + table(["iteration", "residual", "step", "seconds"], rows)
        + "\n\n"
        + target_table([most("seconds to a residual of 1e-8", seconds, 10)])
    )
    return text, {"side": side, "seconds": seconds, "distance": off, "residuals": [each.residual for each in seen]}


def _anew(x: Tensor) -> Any:
    """Compute a Hessian whose pattern is not known yet."""
    return hodiff.sparse.hessian(rosenbrock)(x)


def growth(quick: bool) -> tuple[str, Any]:
    """Measure sparse and dense Hessians of the chain by n."""
    rows = []
    for n in (10, 30, 100, 300, 1000, 3000) if quick else (10, 100, 1000, 3000, 10_000, 100_000, 1_000_000):
        x = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=D)
        first = timed(partial(_anew, x), 1)[0]
        hessian = hodiff.sparse.hessian(rosenbrock)
        hessian(x)
        row = {"n": n, "first": first, "later": timed(partial(hessian, x), 5)[0]}
        if n <= (300 if quick else 3000):
            row["dense"] = timed(partial(hodiff.hessian_matrix, rosenbrock, x))[0]
        rows.append(row)
    shown = [
        [
            f"{row['n']:,}",
            *(f"{1e3 * row[name]:.3g}" if name in row else "" for name in ("first", "later", "dense")),
        ]
        for row in rows
    ]
    heads = ["n", "first call, with pattern and coloring, ms", "later calls, ms", "dense, ms"]
    return f"The chained Rosenbrock function.\n\n{table(heads, shown)}", rows


def _milliseconds(result: dict[str, Any], start: str) -> float:
    """Return the time of the contestant whose name begins with `start`."""
    found: float = next(row["milliseconds"] for row in result["rows"] if row["name"].startswith(start))
    return found


def beside_asdex(quick: bool) -> tuple[str, Any]:
    """Report `python -m benchmarks.peers --only sparse`, which races asdex and hodiff in its own process."""
    del quick
    path = RESULTS / "peers.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "sparse" not in found:
        return "Not measured: `make bench-peers` makes the environment that it needs.", {}
    texts = [
        f"{describe(found['sparse machine'])}. Pattern and coloring once, then calls in turns; hodiff's are with the "
        "check, asdex has none."
    ]
    verdicts = []
    for name, result in found["sparse"].items():
        before = found["sparse preparation"][name]
        rows = [
            [
                row["name"],
                f"{before[who]['seconds']:.3f}" if (who := row["name"].split(", ")[0]) in before else "",
                f"{before[who]['colors']:,}" if who in before else "",
                f"{row['milliseconds']:.3g}",
                f"{row['gradients']:.2f}",
            ]
            for row in result["rows"]
        ]
        heads = ["", "pattern and coloring, s", "colors", "a call, ms", "gradients"]
        texts.append(f"### {result['title']}\n\n{table(heads, rows)}")
        ratio = _milliseconds(result, COMPILED) / _milliseconds(result, "asdex")
        verdicts.append(most(f"{result['title']}: {COMPILED} / asdex", ratio, 3))
    return "\n\n".join([*texts, target_table(verdicts)]), {
        each: found[each] for each in ("sparse", "sparse preparation")
    }


PARTS: dict[str, Callable[[bool], tuple[str, Any]]] = {
    "Chained Rosenbrock function": chain,
    "Atoms with a cutoff": atoms,
    "Minimal surface": film,
    "n against time": growth,
    "Beside asdex": beside_asdex,
}


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield heading, text and data of every part of the page."""
    with one_core():
        for i, (title, part) in enumerate(PARTS.items()):
            text, data = part(quick)
            yield title, text if i else f"{EXPLANATION}\n\n{text}", data


def draw(data: dict[str, Any], directory: Path) -> None:
    """Plot seconds against n, with asdex's if they were measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = data["n against time"]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, label in (("dense", "dense"), ("first", "sparse, first call"), ("later", "sparse, later calls")):
        chosen = [row for row in rows if name in row]
        axes.loglog([row["n"] for row in chosen], [row[name] for row in chosen], "o-", label=label)
    if peers := data["Beside asdex"]:
        chains = {int(name.removeprefix("chain-")): each for name, each in peers["sparse"].items() if "chain" in name}
        for who, label in (("asdex", "asdex, compiled"), (COMPILED, "sparse, compiled")):
            times = [_milliseconds(each, who) for each in chains.values()]
            axes.loglog(list(chains), [1e-3 * each for each in times], "s--", label=label)
    axes.set(xlabel="n", ylabel="seconds", title="Hessian of the chained Rosenbrock function")
    axes.legend()
    figure.savefig(directory / "sparse.png", dpi=88)
    plt.close(figure)
