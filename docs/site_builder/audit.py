"""The data of the page "Is your torch wrong?": the audits on file, as a script that a page reads from disk as well."""

from __future__ import annotations

import json

from hodiff.checks.torch_verdicts import VANISHING
from site_builder.layout import ROOT

DATA = ROOT / "hodiff" / "checks" / "data"

# A letter for each verdict, and what the page calls it. The letters are those of static/audit.js.
LETTERS = {
    "right": "r",
    "wrong": "w",
    "raises": "x",
    "non-finite": "n",
    "random": "d",
    "not smooth": "k",
    "not differentiable": "-",
    "timed out": "t",
}
RUNS = ("torch", "corrected")


def audit_script() -> str:
    """A JavaScript file that defines AUDIT: versions, routes, and by operator and version the verdicts and errors."""
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DATA.glob("torch-*.json"), key=_version)]
    routes = list(next(iter(tables[0]["operators"].values()))["torch"])
    names = sorted({name for table in tables for name in table["operators"]})
    data = {
        "versions": [table["torch"] for table in tables],
        "routes": routes,
        "verdicts": {letter: verdict for verdict, letter in LETTERS.items()},
        "operators": {name: [_of(table["operators"].get(name), routes) for table in tables] for name in names},
    }
    return f"const AUDIT = {json.dumps(data, separators=(',', ':'))};\n"


def _version(path: object) -> tuple[int, ...]:
    return tuple(int(part) for part in str(path).rpartition("torch-")[2].removesuffix(".json").split("."))


def _of(entry: dict[str, dict[str, dict[str, object]]] | None, routes: list[str]) -> list[object] | None:
    """For each run a word of letters, one a route; then, by run and route, errors of what is wrong and messages."""
    if entry is None:
        return None
    words = ["".join(LETTERS[str(entry[run][route]["status"])] for route in routes) for run in RUNS]
    more: dict[str, list[str]] = {}
    for run_index, run in enumerate(RUNS):
        for route_index, route in enumerate(routes):
            verdict = entry[run][route]
            if verdict["status"] in {"wrong", "raises", "non-finite", "timed out"}:
                error = verdict["error"]
                shown = verdict["status"] == "wrong" and isinstance(error, float) and error <= VANISHING
                more[f"{run_index}{route_index}"] = [
                    f"{error:.0e}" if shown else "",
                    str(verdict["detail"])[:160],
                ]
    return [*words, more]
