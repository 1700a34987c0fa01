"""Derivative tensors by univariate Taylor series: number of series, exactness, and cost.

python papers/griewank-2000-mixed/reproduce.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.race import Contestant, median_ratio, race
from hodiff.taylor import derivative_tensor
from papers.common import OURS, Claim, Reproduction, run, span, verdict

Function = Callable[[Tensor], Tensor]
ORDERS = (2, 3, 4)
# Numbers of variables by order: nested forward mode computes n^d entries.
SIZES = {2: (2, 4, 8, 16, 32), 3: (2, 4, 8, 16), 4: (2, 4, 8)}
QUICK_SIZES = {2: (2, 4), 3: (2, 3), 4: (2,)}
COUNTED = range(1, 13)


def takes_series(x: Any) -> bool:
    """Return True for Taylor series; functions are also called with tensors, to compare values."""
    return hasattr(x, "coefficients")


def directions_of(f: Function, take: Callable[[Function], object]) -> np.ndarray[Any, Any]:
    """Return the lines, (lines, n), along which `take` passes series through f."""
    seen: list[Tensor] = []

    def watched(x: Any) -> Tensor:
        if takes_series(x):
            seen.append(x.coefficients[1].detach().clone())
        return f(x)

    take(watched)
    return torch.cat(seen).numpy()


def needed(n: int, d: int) -> int:
    """Return the paper's number of series for order d in n variables."""
    return math.comb(n + d - 1, d)


def rank_of_powers(lines: np.ndarray[Any, Any], d: int) -> int:
    """Count the derivatives of order d that lines determine: the rank of all monomials at the lines."""
    monomials = [np.prod(lines[:, each], axis=1) for each in combinations_with_replacement(range(lines.shape[1]), d)]
    scaled = np.stack(monomials, 1) / np.linalg.norm(lines, axis=1, keepdims=True) ** d
    return int(np.linalg.matrix_rank(scaled))


def outer_power(a: Tensor, d: int) -> Tensor:
    """Compute the d-fold outer product of a vector with itself."""
    found = torch.ones((), dtype=a.dtype)
    for _ in range(d):
        found = found[..., None] * a
    return found


def error_of(n: int, d: int) -> float:
    """Return the largest error relative to the largest entry, for exp and log of a linear form."""
    generator = torch.Generator().manual_seed(10 * n + d)
    a, x = (torch.rand(n, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    s = a @ x
    answers = {
        torch.exp: torch.exp(s) * outer_power(a, d),
        torch.log: (-1) ** (d - 1) * math.factorial(d - 1) / s**d * outer_power(a, d),
    }
    worst = 0.0
    for function, right in answers.items():
        found = derivative_tensor(lambda x, function=function: function((a * x).sum()), d)(x)
        worst = max(worst, float((found - right).abs().max() / right.abs().max()))
    return worst


class Multiplications(TorchDispatchMode):
    """Mode that counts the elements that torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Products with a scalar do not count: doubling is an addition.
        if (
            func in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
            and isinstance(args[1], Tensor)
            and args[1].ndim
        ):
            self.count += result.numel()
        return result


def counted_univariate(n: int, d: int) -> int:
    """Count the multiplications of a product of two numbers along all lines, one after another, values included."""
    x, line = torch.tensor([[2.0], [3.0]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    count = 0

    def product(x: Any) -> Tensor:
        nonlocal count
        u, v = x.unbind(0)
        with Multiplications() as counter:
            result: Tensor = u * v
        count += counter.count if takes_series(x) else 0
        return result

    for _ in range(needed(n, d)):
        hodiff.taylor.jet(product, (x,), ([line] * d,))
    return count


def counted_multivariate(n: int, d: int) -> int:
    """Count the multiplications of a product of two polynomials in n variables, truncated at degree d."""
    by_degree = [needed(n, k) for k in range(d + 1)]
    return sum(a * b for i, a in enumerate(by_degree) for j, b in enumerate(by_degree) if i + j <= d)


def helmholtz(n: int) -> tuple[Function, Tensor]:
    """Return the energy of a mixture of n components, and their amounts."""
    generator = torch.Generator().manual_seed(n)
    b = torch.rand(n, generator=generator, dtype=torch.float64) / (4 * n)
    A = torch.rand(n, n, generator=generator, dtype=torch.float64)
    A = A + A.T
    x = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)

    def energy(x: Tensor) -> Tensor:
        volume = (b * x).sum()
        root = math.sqrt(2)
        mixing = (x * torch.log(x / (1 - volume))).sum()
        quotient = (x * torch.matmul(x, A)).sum() / (2 * root * volume)
        return mixing - quotient * torch.log((1 + (1 + root) * volume) / (1 + (1 - root) * volume))

    return energy, x


def network(n: int) -> tuple[Function, Tensor]:
    """Return a network n-64-64-1 with tanh, and a point."""
    generator = torch.Generator().manual_seed(n)
    W1, W2, w3 = (
        torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])
        for shape in ((n, 64), (64, 64), (64,))
    )

    def output(x: Tensor) -> Tensor:
        return (torch.tanh(torch.matmul(torch.tanh(torch.matmul(x, W1)), W2)) * w3).sum()

    return output, torch.randn(n, generator=generator, dtype=torch.float64)


FUNCTIONS = {"Helmholtz energy": helmholtz, "network": network}


def nested(f: Function, d: int, innermost: Any = torch.func.jacfwd) -> Function:
    """Return d-fold forward mode; with `torch.func.grad` innermost, forward over reverse mode."""
    found = innermost(f)
    for _ in range(d - 1):
        found = torch.func.jacfwd(found)
    return found


def times_of(make: Callable[[int], tuple[Function, Tensor]], n: int, d: int, rounds: int) -> dict[str, float]:
    """Race the tensor by series against nesting; return seconds, ratios and the relative difference."""
    f, x = make(n)
    ways = {
        "series": derivative_tensor(f, d),
        "forward": nested(f, d),
        "over reverse": nested(f, d, torch.func.grad),
    }
    tensors = {name: way(x) for name, way in ways.items()}
    apart = float((tensors["series"] - tensors["forward"]).abs().max() / tensors["forward"].abs().max())
    contestants = [
        Contestant(name, "unit" if name == "series" else "torch", lambda way=way: way(x)) for name, way in ways.items()
    ]
    seconds = race(contestants, rounds, f"order {d}, n = {n}", time.process_time)
    return {
        "seconds": float(np.median(seconds["series"])),
        "forward": median_ratio(seconds["forward"], seconds["series"]),
        "over reverse": median_ratio(seconds["over reverse"], seconds["series"]),
        "apart": apart,
    }


def draw(products: dict[int, dict[int, float]], times: dict[str, dict[int, dict[int, dict[str, float]]]]) -> Figure:
    """Plot ratios of multiplications and of seconds."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for d, ratios in products.items():
        left.plot([*ratios], [*ratios.values()], ".-", label=f"order {d}")
    left.axhline(1, color="gray", linewidth=0.8)
    left.set(xlabel="variables", ylabel="univariate / multivariate", title="multiplications of a product")
    left.legend()
    for style, (name, by_order) in zip(("-", "--"), times.items(), strict=True):
        for color, (d, by_size) in enumerate(by_order.items()):
            ratios = [each["forward"] for each in by_size.values()]
            right.loglog([*by_size], ratios, f".{style}", color=f"C{color}", label=f"{name}, order {d}")
    right.axhline(1, color="gray", linewidth=0.8)
    right.set(xlabel="variables", ylabel="nested jacfwd / series", title="seconds of a tensor")
    right.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    right.minorticks_off()
    right.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Count series, compare with closed forms, and time."""
    torch.set_num_threads(1)
    sizes = QUICK_SIZES if quick else SIZES
    cases = [(n, d) for d in ORDERS for n in sizes[d] if n <= 16]
    lines = {}
    for n, d in cases:
        x = torch.ones(n, dtype=torch.float64)
        lines[n, d] = directions_of(lambda x: (x * x).sum(), lambda f, x=x, d=d: derivative_tensor(f, d)(x))
    as_many = all(len(lines[n, d]) == needed(n, d) for n, d in cases)
    small = [(n, d) for n, d in cases if needed(n, d) <= 400]
    determined = all(rank_of_powers(lines[n, d], k) == needed(n, k) for n, d in small for k in range(1, d + 1))
    errors = {f"n = {n}, order {d}": error_of(n, d) for n, d in cases}

    counted = COUNTED if not quick else range(1, 4)
    checked = [(n, d) for n in (1, 2, 3) for d in ORDERS]
    formula = {(n, d): 1 + needed(n, d) * d * (d + 3) // 2 for n in counted for d in ORDERS}
    # All lines share the value, so it is counted once.
    agrees = all(counted_univariate(n, d) - needed(n, d) + 1 == formula[n, d] for n, d in checked if n in counted)
    products = {d: {n: formula[n, d] / counted_multivariate(n, d) for n in counted} for d in ORDERS}
    ratios = [ratio for by_size in products.values() for ratio in by_size.values()]

    bar = tqdm(
        [(name, d, n) for name in FUNCTIONS for d in ORDERS for n in sizes[d]], disable=not progress, leave=False
    )
    times: dict[str, dict[int, dict[int, dict[str, float]]]] = {name: {d: {} for d in ORDERS} for name in FUNCTIONS}
    for name, d, n in bar:
        times[name][d][n] = times_of(FUNCTIONS[name], n, d, 3 if quick else 15)
    every = [each for by_order in times.values() for by_size in by_order.values() for each in by_size.values()]
    forward, reverse = [each["forward"] for each in every], [each["over reverse"] for each in every]
    assert max(each["apart"] for each in every) < 1e-9

    some = [(0, 1, 2), (0, 0, 1, 1)]
    parts = {
        n: [
            len(
                directions_of(lambda x: (x * x).sum(), lambda f, n=n, part=part: hodiff.partial(f, part)(torch.ones(n)))
            )
            for part in some
        ]
        for n in ((5, 20) if quick else (5, 20, 100))
    }
    independent = len({tuple(each) for each in parts.values()}) == 1
    least, most = min(sizes[2]), {d: max(sizes[d]) for d in ORDERS}
    by_order = "; ".join(
        f"order {d}: {span([times[name][d][most[d]]['forward'] for name in FUNCTIONS])} at n = {most[d]}"
        for d in ORDERS
    )
    claims = [
        Claim(
            "All derivatives of order d and less follow from (n + d - 1 over d) univariate series of order d",
            "in theory",
            f"as many for orders 2 to 4 and n from {least} to {max(n for n, _ in cases)}; the ranks are full for each "
            "lower order, too",
            verdict(as_many and determined),
        ),
        Claim(
            "Derivatives are combinations of the series' coefficients with exact rational factors",
            "explicit formulas (abstract)",
            f"relative error {max(errors.values()):.0e} at most, in float64",
            verdict(max(errors.values()) < 1e-12, max(errors.values()) < 1e-9),
        ),
        Claim(
            "A product takes similar or fewer operations than a product of multivariate series",
            "similar or lower computational counts (abstract)",
            f"{span([*products[2].values()], 2)}, {span([*products[3].values()], 2)} and "
            f"{span([*products[4].values()], 2)} times as many multiplications, orders 2, 3 and 4, n from 1 to "
            f"{max(counted)}",
            verdict(agrees and max(ratios) < 1.3, agrees and max(ratios) < 2),
        ),
        Claim(
            "A tensor takes no more operations than by recursive forward mode",
            "similar or lower computational counts (abstract)",
            f"nested forward mode takes {by_order} times as long; {span(forward)} over all n",
            verdict(min(forward) > 0.8, sum(each > 1 for each in forward) > len(forward) / 2),
        ),
        Claim(
            "A part of the tensor needs a part of the series",
            "qualitative (abstract)",
            f"{parts[5][0]} lines for d³/dx dy dz and {parts[5][1]} for d⁴/dx² dy², in 5 variables and in "
            f"{max(parts)}; the tensors need {needed(max(parts), 3):,} and {needed(max(parts), 4):,} in {max(parts)}",
            verdict(independent),
        ),
        Claim(
            "Comparison with forward mode over a gradient, for one output",
            "",
            f"that takes {span(reverse)} times as long as series",
            OURS,
        ),
    ]
    settings = {"orders": ORDERS, "sizes": sizes, "functions": [*FUNCTIONS], "clock": "processor"}
    data = {"errors": errors, "products": products, "times": times, "lines of parts": parts}
    return Reproduction(claims, settings, data, draw(products, times))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
