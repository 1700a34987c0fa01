"""A minimal surface (the soap film in a bent frame), by Newton's method with sparse Hessians.

    python examples/minimal_surface.py
    python examples/minimal_surface.py --frame waves --side 300

A film takes the shape of least area. The unknowns are heights on a grid, each cell is cut into two triangles, and the
sum of their areas is minimised. A height shares triangles with six others, so a row of the Hessian has at most seven
entries. `hodiff.sparse.hessian` takes as many products for 90,000 unknowns as for 900. Newton's method solves with the
matrix by SciPy's `splu`, and halves steps that do not lower the area. It starts from the surface of least Dirichlet
energy, a quadratic function that takes one Newton step.

The frame "scherk" belongs to Scherk's surface, log(cos x / cos y). The script prints the largest distance to it, which
falls as the square of the mesh size. The residual is the largest derivative of the area in one height, over the area of
a cell.

Source: J. Nitsche, Lectures on Minimal Surfaces, vol. 1 (1989), section 81, for Scherk's surface; problem MINSURF of E.
Dolan, J. More & T. Munson, Benchmarking Optimization Software with COPS 3.0 (2004).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import splu
from torch import Tensor

import hodiff

mpl.use("Agg")
import matplotlib.pyplot as plt

TOLERANCE = 1e-8
HALVINGS = 30


def scherk(x: Tensor, y: Tensor) -> Tensor:
    """Compute Scherk's surface, which is minimal within |x|, |y| < pi/2."""
    return torch.log(torch.cos(x) / torch.cos(y))


def waves(x: Tensor, y: Tensor) -> Tensor:
    """Compute a frame that goes up and down three times."""
    return 0.5 * torch.sin(3 * torch.atan2(y, x))


FRAMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"scherk": scherk, "waves": waves}


@dataclass
class Film:
    """Frame around a square grid over [-1, 1]^2, with `side` x `side` unknown heights inside."""

    side: int
    frame: Callable[[Tensor, Tensor], Tensor] = scherk
    edge: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.edge = self.frame(*self.places())
        self.edge[1:-1, 1:-1] = 0

    @property
    def mesh(self) -> float:
        """Length of a cell."""
        return 2 / (self.side + 1)

    def places(self) -> tuple[Tensor, ...]:
        """Return the coordinates x and y of the grid, including its edge."""
        axis = torch.linspace(-1, 1, self.side + 2, dtype=torch.float64)
        return torch.meshgrid(axis, axis, indexing="xy")

    def whole(self, heights: Tensor) -> Tensor:
        """Return heights (side * side,) within the frame."""
        return self.edge + F.pad(heights.view(self.side, self.side), (1, 1, 1, 1))

    def squared_slopes(self, heights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute squared slopes of the two triangles of each cell."""
        u = self.whole(heights)
        along, across = u.diff(dim=1) / self.mesh, u.diff(dim=0) / self.mesh
        return along[:-1] ** 2 + across[:, :-1] ** 2, along[1:] ** 2 + across[:, 1:] ** 2

    def area(self, heights: Tensor) -> Tensor:
        """Compute the area, which is minimised."""
        lower, upper = self.squared_slopes(heights)
        return self.mesh**2 / 2 * ((1 + lower).sqrt() + (1 + upper).sqrt()).sum()

    def energy(self, heights: Tensor) -> Tensor:
        """Compute Dirichlet's energy, a quadratic function that is the area of flat films up to a constant."""
        lower, upper = self.squared_slopes(heights)
        return self.mesh**2 / 4 * (lower + upper).sum()


@dataclass(frozen=True)
class Iteration:
    """Record of one point of Newton's method."""

    value: float
    residual: float
    step: float
    seconds: float


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and gradient."""
    x = x.detach().requires_grad_()
    value = f(x)
    (slopes,) = torch.autograd.grad(value, x)
    return value.detach(), slopes


def newton_step(H: Any, slopes: Tensor) -> Tensor:
    """Return the Newton step for a sparse, positive definite H."""
    factors = splu(H.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    return -torch.from_numpy(factors.solve(slopes.numpy()))


def start(film: Film) -> Tensor:
    """Return the heights of least energy, by one step."""
    flat = torch.zeros(film.side**2, dtype=torch.float64)
    H = hodiff.sparse.hessian(film.energy, format="scipy")(flat)
    return newton_step(H, gradient(film.energy, flat)[1])


def newton(film: Film, x: Tensor, most: int = 50) -> tuple[Tensor, list[Iteration]]:
    """Find the heights of least area from a start."""
    hessian = hodiff.sparse.hessian(film.area, format="scipy")
    begun, step, seen = time.process_time(), 0.0, []
    for _ in range(most):
        value, slopes = gradient(film.area, x)
        residual = slopes.abs().max().item() / film.mesh**2
        seen.append(Iteration(value.item(), residual, step, time.process_time() - begun))
        if residual <= TOLERANCE:
            return x, seen
        direction = newton_step(hessian(x), slopes)
        descent, step = (slopes @ direction).item(), 1.0
        for _ in range(HALVINGS):
            # Near the minimum the area falls by less than rounding errors.
            if film.area(x + step * direction) <= value + 1e-4 * step * descent + 1e-14 * value.abs():
                break
            step /= 2
        x = x + step * direction
    raise hodiff.ConvergenceError(f"minimal_surface: residual {seen[-1].residual:.1e} after {most} steps.")


def check() -> str:
    """Run hodiff's check on the area: all routes, gradgradcheck, SciPy's Hessian."""
    film = Film(3, waves)
    return hodiff.assert_differentiable(film.area, start(film), vmap=False).summary


def draw(film: Film, x: Tensor, coloring: hodiff.sparse.Coloring, path: Path) -> None:
    """Draw the surface, and the colored pattern of the Hessian of a small grid."""
    figure = plt.figure(figsize=(10, 4.4), layout="constrained")
    left: Any = figure.add_subplot(1, 2, 1, projection="3d")
    across, along = film.places()
    left.plot_surface(across, along, film.whole(x), cmap="viridis", rcount=60, ccount=60)
    left.set(title=f"{film.side} x {film.side} heights")
    right = figure.add_subplot(1, 2, 2)
    pattern = coloring.pattern
    shown = np.full(coloring.shape, np.nan)
    shown[pattern.rows, pattern.columns] = coloring.colors[pattern.columns]
    right.imshow(shown, cmap="tab10", interpolation="nearest")
    side = math.isqrt(coloring.shape[0])
    right.set(title=f"Hessian of {side} x {side}: {coloring.num_colors} colors of columns", xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the film, and print the iterations."""
    parser = argparse.ArgumentParser(description="The soap film in a bent frame, by sparse Newton steps.")
    parser.add_argument("--frame", choices=FRAMES, default="scherk", help="frame that holds the film")
    parser.add_argument("--side", type=int, default=150, help="number of heights along a side of the grid")
    parser.add_argument("--quick", action="store_true", help="use a grid of 20 x 20")
    parser.add_argument("--output", type=Path, default=Path("figures/minimal_surface.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    film = Film(20 if options.quick else options.side, FRAMES[options.frame])
    begun = time.process_time()
    x = start(film)
    pattern = hodiff.sparse.hessian_pattern(film.area, x)
    star, acyclic = (hodiff.sparse.color(pattern, method) for method in ("star", "acyclic"))
    print(f"{star}, or {acyclic.num_colors} by substitution; {time.process_time() - begun:.2f} s with the start\n")
    x, seen = newton(film, x)
    print(f"{'iteration':>9}{'area':>20}{'residual':>12}{'step':>8}{'seconds':>10}")
    for i, each in enumerate(seen):
        print(f"{i:9}{each.value:20.14f}{each.residual:12.1e}{each.step:8.3g}{each.seconds:10.2f}")
    if options.frame == "scherk":
        print(f"\nlargest distance to Scherk's surface {(film.whole(x) - scherk(*film.places())).abs().max():.2e}")
    small = Film(8)
    heights = torch.zeros(64, dtype=torch.float64)
    draw(film, x, hodiff.sparse.color(hodiff.sparse.hessian_pattern(small.area, heights)), options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
