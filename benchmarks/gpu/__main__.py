"""Measure hodiff on a GPU within eight minutes: every section in a process of its own, with a time limit.

python -m benchmarks.gpu            all sections, saved in benchmarks/results/gpu/ under the card's name
python -m benchmarks.gpu small      tiny problems, also without a GPU, to see that the sections run; nothing is saved
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.report import RESULTS, describe, number, save_json, table

# Module, function and seconds of each section; together at most eight minutes.
SECTIONS = {
    "attention": ("attention", "measure", 150),
    "linear cross-entropy": ("networks", "linear_cross_entropy", 40),
    "MLP": ("networks", "mlp", 25),
    "ResNet-18": ("networks", "resnet", 35),
    "GPT-2": ("networks", "language", 60),
    "Laplacian": ("networks", "laplacian", 30),
    "optimizers": ("networks", "optimizers", 45),
    "operator database": ("parity", "measure", 95),
}
EXPLANATION = """\
Times are medians in milliseconds over rounds in which every contestant ran once in turn, `wall` with the host's time,
`kernels` by torch's profiler, in a call of its own. `ratio` is to the first row of a problem. `peak` is memory beyond
what was allocated before, in MiB; `first` the seconds of the first call; `error` the largest relative error to the
formula in float64."""


def run(name: str, small: bool, rows: list[dict[str, Any]]) -> str:
    """Run a section and append its rows; return a remark on how it ended, empty if it ended well."""
    # Small problems run on busy machines, to see that they run.
    limit = SECTIONS[name][2] * (8 if small else 1)
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, *(["small"] if small else [])]
    remark = ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(command, stdout=out, stderr=errors, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            remark = f"stopped after {limit:g} s"
        else:
            errors.seek(0)
            remark = f"failed: {errors.read().strip().splitlines()[-1]}" if code else ""
        out.seek(0)
        rows += [json.loads(line) for line in out if line.startswith("{")]
    return remark


def page(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a section."""
    cells = [
        [
            f"{row['problem']}: {row['name']}" if row["name"] else row["problem"],
            *(number(row[key], form) for key, form in FORMS.items()),
            row["remark"],
        ]
        for row in rows
    ]
    return f"## {name}\n\n{table(['', *HEADER, ''], cells)}\n"


HEADER = ("wall", "ratio", "kernels", "peak", "first", "error")
FORMS = {
    "milliseconds": ".3g",
    "ratio": ".2f",
    "device": ".3g",
    "mebibytes": ".0f",
    "first": ".1f",
    "error": ".1e",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; return 1 if a section failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("size", nargs="?", choices=["full", "small"], default="full")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--save", type=Path, metavar="DIR", help="where results go, by default results/gpu/")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    small = options.size == "small"
    if options.section:
        module, function, _ = SECTIONS[options.section]
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(small)
        return 0
    if not small and not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device; `small` runs without one.", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    here = {"card": card, "cuda": str(torch.version.cuda), **machine()}
    pages = [f"# {card}{', small problems' if small else ''}\n\n{describe(here)}\n\n{EXPLANATION}\n"]
    print(pages[0], flush=True)
    found: dict[str, Any] = {}
    failed = False
    for name in options.only or SECTIONS:
        start = time.monotonic()
        rows: list[dict[str, Any]] = []
        remark = run(name, small, rows)
        failed |= remark.startswith("failed")
        ended = f"{remark or 'done'}, {time.monotonic() - start:.0f} s"
        found[name] = {"ended": ended, "rows": rows}
        pages.append(f"{page(name, rows)}\n{ended}\n")
        print(pages[-1], flush=True)
    directory = options.save or (None if small else RESULTS / "gpu")
    if directory is not None:
        file = re.sub(r"\W+", "-", card.lower()).strip("-")
        save_json(directory / f"{file}.json", {"machine": here, "sections": found})
        (directory / f"{file}.md").write_text("\n".join(pages), encoding="utf-8")
        print(f"Saved in {directory}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
