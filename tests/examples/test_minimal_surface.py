"""A minimal surface: against Scherk's surface, the area's derivatives by formulas, and the whole example."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "minimal_surface.py"))


def test_distance_to_scherk_surface_falls_quadratically_with_the_mesh() -> None:
    distances = []
    for side in (7, 15):
        film = EXAMPLE["Film"](side)
        x, seen = EXAMPLE["newton"](film, EXAMPLE["start"](film))
        assert seen[-1].residual <= EXAMPLE["TOLERANCE"] < seen[0].residual
        distances.append((film.whole(x) - EXAMPLE["scherk"](*film.places())).abs().max().item())
    assert distances[0] / distances[1] == pytest.approx(4, rel=0.15)


def test_area_of_tilted_planes_matches_closed_form() -> None:
    """The plane 2 x + 3 y over a square of area 4 has the area 4 √14."""
    film = EXAMPLE["Film"](5, lambda x, y: 2 * x + 3 * y)
    x = EXAMPLE["start"](film)
    torch.testing.assert_close(film.whole(x), film.frame(*film.places()))
    assert film.area(x).item() == pytest.approx(4 * 14**0.5, rel=1e-14)


def test_hessian_pattern_couples_six_neighbours() -> None:
    film = EXAMPLE["Film"](6)
    x = torch.sin(torch.arange(36, dtype=torch.float64))
    pattern = hodiff.sparse.hessian_pattern(film.area, x)
    assert pattern.sum(1).max() == 7
    found = hodiff.sparse.hessian(film.area, format="scipy")(x)
    dense = torch.autograd.functional.hessian(film.area, x).numpy()
    assert abs(found.toarray() - dense).max() < 1e-13 * abs(dense).max()


def test_unconverged_newton_raises() -> None:
    film = EXAMPLE["Film"](5, EXAMPLE["waves"])
    with pytest.raises(hodiff.ConvergenceError, match=r"residual .* after 1 steps"):
        EXAMPLE["newton"](film, EXAMPLE["start"](film), most=1)


def test_quick_run_prints_and_saves_results(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick", "--frame", "waves")
    residuals = [float(each) for each in re.findall(r"^ +\d+ +\d\.\d+ +(\S+)", text, re.MULTILINE)]
    assert 3 <= len(residuals) < 10
    assert residuals[-1] <= 1e-8 < residuals[0]
