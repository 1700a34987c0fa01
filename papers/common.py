"""Shared code of the scripts: the command line, the parts of a reproduction, and saving results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.machine import machine
from papers.tables import OURS as OURS
from papers.tables import claims_table, update_index, update_readme


@dataclass(frozen=True)
class Claim:
    """Statement of a paper, with the outcome of its reproduction.

    Attributes:
        claim: The statement in our words.
        published: The paper's own number, or "qualitative" where it gives none.
        measured: Our number.
        verdict: "reproduced", "partly" or "not"; `OURS` for statements that are not in the paper.
    """

    claim: str
    published: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Reproduction:
    """Results of a script: claims, the main claim first; settings; all results as plain numbers; a figure."""

    claims: list[Claim]
    settings: dict[str, Any]
    data: dict[str, Any]
    figure: Figure


Reproduce = Callable[[bool, bool], Reproduction]


def verdict(reproduced: bool, partly: bool = False) -> str:
    """Return the verdict of a comparison."""
    return "reproduced" if reproduced else "partly" if partly else "not"


def span(values: Sequence[float], digits: int = 1) -> str:
    """Format the range of some numbers."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def run(script: str, description: str, reproduce: Reproduce) -> None:
    """Run a script as the main program.

    A full run is saved next to the script and shown in both READMEs. A quick run is saved only in the folder `--out`.

    Args:
        script: `__file__` of the script.
        description: Docstring of the script.
        reproduce: Function that is called as `reproduce(quick, progress)`.
    """
    folder = Path(script).resolve().parent
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="solve a smaller problem, in less than half a minute")
    parser.add_argument(
        "--out", type=Path, help="folder for results.json and figure.png; full runs default to the script's folder"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args()
    start = time.perf_counter()
    found = reproduce(options.quick, sys.stderr.isatty() and not options.no_progress)
    results = {
        "paper": folder.name,
        "quick": options.quick,
        "seconds": round(time.perf_counter() - start, 1),
        "machine": machine(),
        "settings": found.settings,
        "claims": [asdict(claim) for claim in found.claims],
        "data": found.data,
    }
    tqdm.write(f"{folder.name}, {results['seconds']} s\n\n{claims_table(results)}\n")
    out = options.out or (None if options.quick else folder)
    if out is not None:
        save(results, found.figure, out)
    if out == folder:
        update_readme(folder)
        update_index(folder.parent)


def save(results: dict[str, Any], figure: Figure, out: Path) -> None:
    """Write `results.json` and `figure.png`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(rounded(results), indent=1) + "\n", encoding="utf-8")
    figure.savefig(out / "figure.png", dpi=90)
    tqdm.write(f"{out / 'results.json'}\n{out / 'figure.png'}")


def rounded(value: Any) -> Any:
    """Convert to plain numbers with six digits, more than any comparison uses."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
