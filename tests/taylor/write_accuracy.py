"""`python tests/taylor/write_accuracy.py` writes docs/reference/taylor_accuracy.md and mpmath's coefficients."""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from taylor.accuracy import ORDER, TRUTHS, errors, exact_coefficients  # noqa: E402
from taylor.hard_points import HARD  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "taylor_accuracy.md"
HEAD = """\
# Accuracy of Taylor mode

The tables list errors of Taylor coefficients of elementary functions, in units in the last place (ulp), for each order.
The reference is mpmath with fifty digits. An entry is the largest error over a few points near poles, in tails and at
saturation, on a CPU. [hard_points.py](../../tests/taylor/hard_points.py) lists the points, and
`python tests/taylor/write_accuracy.py` writes this page.

The rounding of the point limits the accuracy of a coefficient that nearly vanishes by cancellation. Its unit is the
change of the coefficient if the point changes by one ulp. Order 0 is torch's own value.
"""


def table(dtype):
    lines = [f"| function | {' | '.join(map(str, range(ORDER + 1)))} |", f"|{' --- |' * (ORDER + 2)}"]
    for name in HARD:
        cells = [formatted(error) for error in errors(name, dtype)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def formatted(error):
    return f"{error:.1f}" if error < 1000 else f"{error:.0e}"


def main():
    rows = [f"{json.dumps(name)}: {json.dumps(exact_coefficients(name))}" for name in HARD]
    TRUTHS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    parts = [HEAD, "## float64\n", table(torch.float64), "\n## float32\n", table(torch.float32)]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
