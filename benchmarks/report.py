"""Reports of results: JSON for programs, Markdown tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.problems import Result, Row
from benchmarks.targets import Verdict

RESULTS = Path(__file__).parent / "results"
PEER = "†"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table, with the first column to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cells[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([line(header), rule, *map(line, rows)])


def number(value: float | None, form: str) -> str:
    """Format a number, or return an empty string for None."""
    return "" if value is None else format(value, form)


def time_table(result: Result, peers: Sequence[Row] = ()) -> str:
    """Return a table of the times of one problem, including rows of peers timed in another environment."""
    rows = [
        [
            row.name,
            number(row.milliseconds, ".3g") if row.milliseconds is not None or row.group == "unit" else "wrong",
            number(row.gradients, ".2f"),
            number(row.of_fastest_torch, ".2f"),
            *([row.remark] if result.remarks_title else [number(row.relative_error, ".1e")]),
        ]
        for row in [*result.rows, *peers]
    ]
    last = result.remarks_title or "relative error"
    return table(["", "ms", "gradients", "/ fastest torch", last], rows)


def target_table(verdicts: Sequence[Verdict]) -> str:
    """Return a table of targets and measured ratios."""
    rows = [[each.target, number(each.ratio, ".3g") or "wrong", "met" if each.met else "missed"] for each in verdicts]
    return table(["target", "measured", ""], rows)


# Workloads that show the peers' times of another workload.
SAME_PEERS = {"operators": "hvp", "taylor_sparse": "taylor"}


def peer_rows(directory: Path, workload: str, problem: str) -> list[Row]:
    """Read the rows that `python -m benchmarks.peers` saved for a problem, if any."""
    path = directory / "peers.json"
    if not path.exists():
        return []
    workload = SAME_PEERS.get(workload, workload)
    found = json.loads(path.read_text(encoding="utf-8")).get(workload, {}).get(problem, {"rows": []})
    # Peers were timed with another torch than the one in this table: only ratios to the gradient are comparable.
    return [
        Row(**{**row, "name": f"{row['name']} {PEER}", "of_fastest_torch": None})
        for row in found["rows"]
        if row["group"] in {"peer", "peer gradient"}
    ]


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def describe(machine: dict[str, str | int]) -> str:
    """Describe the machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine.items())
