"""Run the benchmarks: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from benchmarks import memory
from benchmarks.machine import machine, one_core
from benchmarks.problems import Result, measure
from benchmarks.registry import TALLIES, WORKLOADS
from benchmarks.report import PEER, RESULTS, describe, peer_rows, save_json, target_table, time_table

EXPLANATION = """\
Times are medians over rounds, in each of which every contestant ran once in turn. `gradients` is the time over that
of {unit}, `/ fastest torch` the time over that of torch's fastest right way; both are
medians of the ratios within a round. `relative error` compares with {reference}; a
contestant beyond {tolerance:g} is wrong and not timed."""
ONE_CORE = "Times are those of the processor, on one core."
TARGETS = "Targets are bounds on the ratio of two times, judged by the median of the ratios within a round."
PEERS = f"""\
{PEER} Timed by `python -m benchmarks.peers` in an environment of its own, beside the same unit there, which its ratio
refers to."""


def run_workload(name: str, *, rounds: int | None, quick: bool, directory: Path | None) -> list[str]:
    """Measure one workload on one core or all cores, print its tables and save them; see `_run`."""
    with one_core() if WORKLOADS[name].one_core else nullcontext():
        return _run(name, rounds=rounds, quick=quick, directory=directory)


def _run(name: str, *, rounds: int | None, quick: bool, directory: Path | None) -> list[str]:
    """Measure one workload, print its tables and save them.

    Args:
        name: Its key in `WORKLOADS`.
        rounds: How many rounds to time, or None for its own number.
        quick: Whether to take few rounds of its quick problems.
        directory: Folder for results, from which peers' results are also read. None saves nothing.

    Returns:
        The problems and contestants of hodiff whose answers were wrong.
    """
    workload = WORKLOADS[name]
    clock = time.process_time if workload.one_core else time.perf_counter
    here = machine()
    page: list[str] = []

    def say(text: str) -> None:
        page.append(text)
        print(text, flush=True)

    say(f"# {name}: {workload.title}\n\n{describe(here)}\n")
    results: list[Result] = []
    for problem in workload.problems(quick):
        result = measure(problem, rounds or (5 if quick else workload.rounds), clock)
        peers = peer_rows(directory or RESULTS, name, problem.name)
        if not results:
            say(
                EXPLANATION.format(tolerance=problem.tolerance, unit=workload.unit, reference=workload.reference) + "\n"
            )
            if workload.one_core:
                say(ONE_CORE + "\n")
            if result.verdicts:
                say(TARGETS + "\n")
            if workload.published:
                say(workload.published + "\n")
            if peers:
                say(PEERS + "\n")
        say(f"## {result.title}\n\n{time_table(result, peers)}\n")
        if result.verdicts:
            say(target_table(result.verdicts) + "\n")
        results.append(result)
    peaks = workload.peaks(quick) if workload.peaks else []
    if peaks:
        say(f"## {workload.peaks_title}\n\n{memory.memory_table(peaks)}\n")
    if directory is not None:
        if peaks and workload.draw_peaks:
            workload.draw_peaks(peaks, directory)
        content = {
            "workload": name,
            "title": workload.title,
            "machine": here,
            "problems": [result.to_json() for result in results],
            "peaks": [asdict(peak) for peak in peaks],
        }
        save_json(directory / f"{name}.json", content)
        (directory / f"{name}.md").write_text("\n".join(page), encoding="utf-8")
    return [f"{result.problem}: {contestant}" for result in results for contestant in result.wrong()]


def run_tally(name: str, *, quick: bool, directory: Path | None) -> None:
    """Compute the counts of one tally, print its page and save it."""
    tally, here = TALLIES[name], machine()
    page = [f"# {name}: {tally.title}\n\n{describe(here)}\n"]
    print(page[0], flush=True)
    data = {}
    for title, text, rows in tally.sections(quick):
        page.append(f"## {title}\n\n{text}\n")
        data[title] = rows
        print(page[-1], flush=True)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        if tally.draw:
            tally.draw(data, directory)
        save_json(directory / f"{name}.json", {"tally": name, "title": tally.title, "machine": here, "parts": data})
        (directory / f"{name}.md").write_text("\n".join(page), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; return 1 if an answer of hodiff was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, *TALLIES], metavar="NAME")
    parser.add_argument("--rounds", type=int, help="rounds to time, instead of each workload's own number")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds of the quickest problems; saved only on --save"
    )
    parser.add_argument("--list", action="store_true", help="print the workloads and stop")
    parser.add_argument("--save", type=Path, metavar="DIR", help=f"where results go, by default {RESULTS.name}/")
    options = parser.parse_args(arguments)
    if options.list:
        titles = {name: each.title for table in (WORKLOADS, TALLIES) for name, each in table.items()}
        for name, title in titles.items():
            print(f"{name:17} {title}")
        return 0
    # A quick run must not replace thorough results.
    directory = options.save or (None if options.quick else RESULTS)
    wrong = []
    for name in options.only or [*WORKLOADS, *TALLIES]:
        if name in TALLIES:
            run_tally(name, quick=options.quick, directory=directory)
        else:
            wrong += run_workload(name, rounds=options.rounds, quick=options.quick, directory=directory)
    if directory is not None:
        print(f"Saved in {directory}.")
    for each in wrong:
        print(f"WRONG: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
