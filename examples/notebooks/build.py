"""Run the notebooks of this folder, from scripts in jupytext's percent format to `.ipynb` with outputs.

    python examples/notebooks/build.py                 # all of them
    python examples/notebooks/build.py 01 04           # those whose names begin so
    python examples/notebooks/build.py --check         # run, and write nothing
    python examples/notebooks/build.py --words         # only the words changed: keep the outputs

The script fails if a cell raises or warns, or if an output contains a path of this machine. Outputs do not depend on
the time and place of the run, so running again changes only the outputs of changed code.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
MOST_BYTES = 400_000
SECONDS = 900  # time limit of a cell, on a busy machine
LANGUAGE = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
PATHS = re.compile(r"(/home/|/Users/|/tmp/|/root/|site-packages|[A-Z]:\\\\)")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def sources(prefixes: list[str]) -> list[Path]:
    """Return the scripts whose names begin with one of the prefixes; all scripts without prefixes."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    return [each for each in found if not prefixes or each.name.startswith(tuple(prefixes))]


def unrun(source: Path) -> nbformat.NotebookNode:
    """Return the notebook of a script without outputs, with fixed cell names."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(LANGUAGE)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata = nbformat.from_dict({})
    return notebook


def run(source: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs."""
    notebook = unrun(source)
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = tidied(cell.outputs)
    notebook.metadata = nbformat.from_dict(LANGUAGE)
    return notebook


def reworded(source: Path) -> nbformat.NotebookNode:
    """Return the notebook with its present outputs; exit if the code changed."""
    notebook, before = unrun(source), nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    code, ran = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (notebook, before))
    if [cell.source for cell in code] != [cell.source for cell in ran]:
        sys.exit(f"{source.name}: its code changed; run it without --words")
    for cell, old in zip(code, ran, strict=True):
        cell.outputs, cell.execution_count = tidied(old.outputs), old.execution_count
    return notebook


def tidied(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join the pieces of a stream, and shorten text next to HTML or SVG to one line."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
            continue
        kept.append(output)
        data = output.get("data", {})
        if "text/plain" in data and data.keys() & {"text/html", "image/svg+xml"}:
            first = data["text/plain"].strip().partition("\n")[0]
            data["text/plain"] = f"{first.partition('(')[0]}(...)" if "(" in first else first
    return kept


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """Find warnings, paths and addresses in outputs, and notebooks that are too large."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            text = output.get("text", "") + "".join(
                str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")
            )
            if output.get("name") == "stderr":
                found.append(f"a warning: {text.strip()[:400]}")
            found += [f"{match} in {text[:80]!r}" for match in {*PATHS.findall(text), *ADDRESS.findall(text)}]
    size = len(nbformat.writes(notebook).encode())
    if size > MOST_BYTES:
        found.append(f"{size:,} bytes, more than {MOST_BYTES:,}")
    return found


def main() -> None:
    """Run the chosen notebooks, and print how long they took."""
    parser = argparse.ArgumentParser(description="Run the notebooks.")
    parser.add_argument("prefixes", nargs="*", help="beginnings of the names of notebooks; all by default")
    parser.add_argument("--check", action="store_true", help="run the notebooks, but write nothing")
    parser.add_argument("--words", action="store_true", help="update the text, and keep the outputs")
    options = parser.parse_args()
    # One core; kernels inherit both variables.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    failed = False
    logging.getLogger("traitlets").setLevel(logging.ERROR)
    for source in sources(options.prefixes):
        start, spent = time.perf_counter(), _of_children()
        notebook = reworded(source) if options.words else run(source)
        said = complaints(notebook)
        failed |= bool(said)
        size = len(nbformat.writes(notebook).encode()) // 1000
        seconds, cpu = time.perf_counter() - start, _of_children() - spent
        print(f"{source.stem:36}{seconds:6.1f} s{cpu:6.1f} s of CPU{size:6} kB", *said, sep="\n    ", flush=True)
        if not options.check:
            nbformat.write(notebook, source.with_suffix(".ipynb"))
    sys.exit(failed)


def _of_children() -> float:
    """Return the CPU seconds that kernels took so far, which mean more than a clock on a busy machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
