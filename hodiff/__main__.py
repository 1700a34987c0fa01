"""The command line: ``python -m hodiff check`` and ``python -m hodiff audit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hodiff.checks.command.check_command import add_check
from hodiff.errors import HodiffError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those of the command line by default.

    Returns:
        The exit status: 0 if all is right, 1 if something is not, 2 if the command could not be run.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except HodiffError as error:
        sys.stderr.write(f"hodiff: {error}\n")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hodiff", description="Higher derivatives in PyTorch, checked.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_check(commands)
    _add_audit(commands)
    return parser


def _add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "audit",
        help="which operators of torch have right second derivatives",
        description="Audit torch's operators by every route, by torch alone and with hodiff's corrections.",
        epilog="Exit status 1 if an entry is wrong, raises, is not finite or timed out (with corrections, if on).",
    )
    parser.add_argument("--op", action="append", metavar="NAME", help="only this operator; may be repeated")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--uncorrected", action="store_true", help="torch alone")
    which.add_argument("--corrected", action="store_true", help="with hodiff's corrections alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole table here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here; else to standard output")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=6, metavar="N", help="most samples of an operator (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds an operator (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random directions (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    from hodiff.checks import audit

    table = audit(
        options.op,
        correct=False if options.uncorrected else True if options.corrected else "both",
        samples=options.samples,
        jobs=options.jobs,
        time_limit=options.time_limit,
        seed=options.seed,
        progress=not options.quiet,
    )
    if options.json:
        options.json.write_text(table.to_json(), encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(str(table), encoding="utf-8")
    else:
        sys.stdout.write(str(table))
    return 1 if table.defects(table.runs[-1]) else 0


if __name__ == "__main__":
    sys.exit(main())
