"""Four methods in the plane: their end points, and trust-region radii against SciPy's."""

import runpy
from pathlib import Path

import pytest
import torch
from scipy.optimize._trustregion_ncg import CGSteihaugSubproblem

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "newton_in_two_dimensions.py"))
PROBLEMS = EXAMPLE["PROBLEMS"]


def test_quick_run_prints_end_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figures" / "newton.png"
    EXAMPLE["main"](["--quick", "--output", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ends = {(row[0], row[1]): row[-1] for row in rows if row and row[0] in {"rosenbrock", "himmelblau"}}
    assert ends.pop(("rosenbrock", "gradient")) == "way"
    assert ends.pop(("himmelblau", "Newton")) == "saddle"
    assert set(ends.values()) == {"minimum"}
    assert len(ends) == 6


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.f.__name__)
def test_trust_region_radii_match_scipy(problem, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    solve = CGSteihaugSubproblem.solve

    def recorded(self, radius):
        used.append(radius)
        return solve(self, radius)

    monkeypatch.setattr(CGSteihaugSubproblem, "solve", recorded)
    path = EXAMPLE["by_minimize"](problem, "trust-ncg").path
    assert EXAMPLE["trust_radii"](problem.f, path) == pytest.approx(used)
    assert len(set(used)) > 1


def test_stationary_points_are_classified() -> None:
    """Himmelblau's saddle and maximum are roots of cubic equations, given here to four digits."""
    places = {
        "minimum": (3.0, 2.0),
        "saddle": (0.0867, 2.8843),
        "maximum": (-0.2708, -0.9230),
        "on its way": (1.0, 1.0),
    }
    for kind, place in places.items():
        path = EXAMPLE["newton"](EXAMPLE["Problem"](PROBLEMS[1].f, place, 1.0, ()), 5 * (kind != "on its way")).path
        assert (path[-1] - torch.tensor(place)).norm() < 1e-4
        assert EXAMPLE["kind"](PROBLEMS[1].f, path[-1]) == kind
