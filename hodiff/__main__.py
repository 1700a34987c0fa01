"""The command line: ``python -m hodiff check`` and ``python -m hodiff audit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hodiff.audit.audit_command import add_audit
from hodiff.checks.command.check_command import add_check
from hodiff.errors import HodiffError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: By default the arguments of the command line.

    Returns:
        The exit status: 0 if all checks pass, 1 if one fails, 2 if the command could not be run.
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
    add_audit(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
