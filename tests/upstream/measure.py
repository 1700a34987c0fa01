"""Measure with the installed torch which corrected functions and which reported derivatives are wrong.

python tests/upstream/measure.py

It writes `tests/upstream/torch-VERSION.json`. Each call runs in its own process, as some end the process.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
# Seconds for a call.
LIMIT = 20.0


def call_name(f: Any) -> str:
    """Name of the torch function of a call."""
    from hodiff.corrections.mechanism.registry import name_of

    try:
        return name_of(f)
    except AttributeError:
        return str(getattr(f, "__name__", type(f).__name__))


def defects_of(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Statuses of the routes of one call that are wrong by torch alone, and right inside `hodiff.corrected()`.

    Other calls have no derivative to compare, such as functions that read one triangle of a symmetric matrix.
    """
    from corrections.calls import CONSTANTS

    from hodiff.audit.audit_sample import audit_sample
    from hodiff.checks.mutations.sample import Sample

    leaves, structure = tree_flatten((args, kwargs))
    places = tuple(
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not any(leaf is each for each in CONSTANTS)
    )
    sample = Sample(lambda args, kwargs: f(*args, **kwargs), tuple(leaves), structure, places)
    found = audit_sample(sample, correct=False, seed=0)
    defects = {route: verdict.status for route, verdict in found.items() if verdict.is_defect}
    if not defects:
        return {}
    corrected = audit_sample(sample, correct=True, seed=0)
    return {route: status for route, status in defects.items() if corrected[route].status == "right"}


def _answer(pipe: Connection, function: Any, *args: Any) -> None:
    try:
        pipe.send(function(*args))
    except Exception as error:
        pipe.send({"call": type(error).__name__})


def apart(function: Any, *args: Any) -> Any:
    """Result of a function in a process of its own, or how the process ended."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, function, *args))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(LIMIT) else {"call": "timed out"}
    except EOFError:
        return {"call": "ended the process"}
    finally:
        process.kill()
        process.join()


def chosen_calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Up to two calls of each fault that the audits of torch's database do not show."""
    from corrections.calls import CALLS
    from upstream.faults import audited_operators, faults

    for _, functions in faults():
        if not audited_operators(functions):
            matches = (call for call in CALLS if call_name(call[0]) in functions)
            yield from islice(matches, 2)


def main() -> None:
    from corrections.public_reports import REPORTS, TAILS, is_wrong
    from upstream.witnesses import WITNESSES

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    calls: dict[str, dict[str, str]] = {}
    for f, args, kwargs in tqdm(list(chosen_calls())):
        found = apart(defects_of, f, args, kwargs)
        calls.setdefault(call_name(f), {}).update(found)
    wrong = {name: apart(is_wrong, report) for name, report in REPORTS.items()}
    wrong |= {name: apart(is_wrong, report, 0.0) for name, report in (TAILS | WITNESSES).items()}
    version = torch.__version__.split("+")[0]
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(calls.items())]
    text = (
        f'{{"torch": "{version}",\n"calls": {{\n'
        + ",\n".join(lines)
        + f'\n}},\n"reports": {json.dumps(wrong, indent=0)}}}\n'
    )
    (HERE / f"torch-{version}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    main()
