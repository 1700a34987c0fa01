"""Command ``python -m hodiff audit``, which prints the audit as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hodiff.audit.database_audit import audit, reproductions
from hodiff.audit.jets.jet_audit import JetAudit, jet_audit, jets_on_file
from hodiff.audit.jets.jet_page import jet_page
from hodiff.audit.mutated.mutated_audit import MutatedAudit, mutated_audit, mutated_on_file
from hodiff.audit.page import markdown_page
from hodiff.checks.torch_verdicts import AuditTable, audit_on_file, versions_on_file
from hodiff.errors import InputError

# Options without effect in each mode, and the mode that an option needs.
_WITHOUT_EFFECT = {
    "on_file": "op uncorrected corrected samples jobs time_limit seed mutate script order cases",
    "script": "uncorrected corrected json markdown",
    "mutate": "samples",
    "jets": "uncorrected corrected",
}
_NEEDS = {"order": "jets", "cases": "mutate"}
_DEFAULTS = {"jobs": 2, "time_limit": 120.0, "seed": 0, "order": 5, "cases": 6}


def add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the subcommands of a parser."""
    parser = commands.add_parser(
        "audit",
        help="which operators of torch have right second derivatives",
        description="Audit torch's operators by every route, by torch alone and with hodiff's corrections.",
        epilog="Samples are float64. Names are those of torch's operator database, such as nn.functional.layer_norm or "
        "layer_norm. Exit status 1 if an entry is wrong, raises, is not finite or timed out (with "
        "corrections, if on), and with --script if a script was written; 2 if the command could not run.",
    )
    parser.add_argument("--op", action="append", metavar="NAME", help="only this operator; may be repeated")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--uncorrected", action="store_true", help="torch alone")
    which.add_argument("--corrected", action="store_true", help="with hodiff's corrections alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole table here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here; else to standard output")
    parser.add_argument("--on-file", action="store_true", help="audit nothing: the page of the audits on file")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (2)")
    parser.add_argument("--samples", type=int, metavar="N", help="most samples of an operator (6; with --jets 2)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds an operator (120)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random directions (0)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--mutate", action="store_true", help="calls that the database leaves out, and their scripts")
    kind.add_argument("--jets", action="store_true", help="Taylor mode, along curves")
    kind.add_argument("--script", action="store_true", help="a script of torch alone that reproduces what is wrong")
    parser.add_argument("--order", type=int, metavar="K", help="with --jets: the highest order, 1 to 5 (5)")
    parser.add_argument("--cases", type=int, metavar="N", help="with --mutate: calls an operator (6)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run_audit)


def run_audit(options: argparse.Namespace) -> int:
    """Run the command; return the exit status: 0 without defects, 1 with defects."""
    _require_fitting(options)
    if options.jets:
        return _run_jets(options)
    if options.on_file:
        versions = [audit_on_file(version) for version in versions_on_file()]
        _write(options, audit_on_file(), markdown_page(audit_on_file(), versions, mutated_on_file()))
        return 0
    if options.mutate:
        return _run_mutated(options)
    if options.script:
        return _write_scripts(options)
    table = audit(
        options.op,
        correct=_runs(options),
        samples=6 if options.samples is None else options.samples,
        **_common(options),
    )
    _write(options, table, markdown_page(table))
    return 1 if table.defects(table.runs[-1]) else 0


def _require_fitting(options: argparse.Namespace) -> None:
    """Reject options that would have no effect, and fill in defaults."""
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    for mode, ignored in _WITHOUT_EFFECT.items():
        for name in ignored.split():
            if {mode, name} <= given:
                raise InputError(
                    f"audit: {_flag(name)}: expected no {_flag(name)} with {_flag(mode)}, where it has no effect. "
                    "Leave out one of them."
                )
    for name, mode in _NEEDS.items():
        if name in given and mode not in given:
            raise InputError(
                f"audit: {_flag(name)}: expected {_flag(mode)} with {_flag(name)}, got none. Add {_flag(mode)}, or "
                f"leave out {_flag(name)}."
            )
    vars(options).update({name: value for name, value in _DEFAULTS.items() if name not in given})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _common(options: argparse.Namespace) -> dict[str, Any]:
    names = ("jobs", "time_limit", "seed")
    return {name: getattr(options, name) for name in names} | {"progress": not options.quiet}


def _runs(options: argparse.Namespace) -> bool | str:
    return False if options.uncorrected else True if options.corrected else "both"


def _run_mutated(options: argparse.Namespace) -> int:
    """Run the audit with invented samples; the exit status is 1 if there are silent errors."""
    found = mutated_audit(
        options.op,
        correct=_runs(options),
        cases=options.cases,
        **_common(options) | {"time_limit": max(options.time_limit, 20.0 * options.cases)},
    )
    _write(options, found, f"{found}\n")
    return 1 if found.silent else 0


def _write_scripts(options: argparse.Namespace) -> int:
    """Write a script for each operator; the exit status is 1 if one is wrong, raises or could not be judged."""
    if not options.op:
        raise InputError("audit: --op: --script expects the names of operators, got none. Pass --op NAME.")
    found = reproductions(options.op, samples=6 if options.samples is None else options.samples, **_common(options))
    text = "\n\n".join(found.values())
    sys.stdout.write(text)
    return 0 if all("nothing to reproduce" in each for each in found.values()) else 1


def _run_jets(options: argparse.Namespace) -> int:
    """Run the audit of Taylor mode; the exit status is 1 if an operator is off or too slow."""
    if options.on_file:
        _write(options, jets_on_file(), jet_page(jets_on_file()))
        return 0
    found = jet_audit(
        options.op,
        order=options.order,
        samples=2 if options.samples is None else options.samples,
        **_common(options),
    )
    _write(options, found, jet_page(found))
    return 1 if found.defects else 0


def _write(options: argparse.Namespace, table: AuditTable | MutatedAudit | JetAudit, page: str) -> None:
    if options.json:
        options.json.write_text(table.to_json(), encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)
