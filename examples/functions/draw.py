"""Draw the pictures of the lessons again, all of them or those of the given numbers.

python examples/functions/draw.py
python examples/functions/draw.py 7 33
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import torch
from lesson_tools import LESSONS, PICTURES, load
from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {"font.size": 9.0, "axes.grid": False, "legend.fontsize": "small", "lines.linewidth": 1.4}


def save_picture(lesson: ModuleType, path: Path) -> None:
    """Draw the picture of a lesson, and save it."""
    torch.manual_seed(0)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 3.4), dpi=88, layout="constrained")
        lesson.draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def main() -> None:
    """Parse the lesson numbers, and draw their pictures."""
    parser = argparse.ArgumentParser(description="Remake the pictures of the lessons.")
    parser.add_argument("numbers", nargs="*", type=int, help="numbers of lessons; all by default")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="folder for the pictures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for stem, path in LESSONS.items():
        if not options.numbers or int(stem[:2]) in options.numbers:
            picture = options.folder / f"{stem}.png"
            save_picture(load(path), picture)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
