"""Command ``python -m hodiff check package.module:Name --inputs "randn(3, 4)"``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from hodiff.checks.check import check
from hodiff.checks.command.expressions import dtype_named, read_inputs, read_loss
from hodiff.checks.command.targets import load_target
from hodiff.checks.report.report import Report
from hodiff.errors import InputError

EXAMPLES = """\
examples:
  python -m hodiff check my_package.losses:Focal --inputs "randn(4, 3), randint(0, 3, (4,)), 2.0"
  python -m hodiff check my_package.models:model --inputs "randn(5, 3)" --loss "mse_loss(output, randn(5, 1))"

--inputs and --loss are Python expressions with the names of torch and torch.nn.functional: randn, tensor, mse_loss.
Their tensors are seeded, and float64 unless they name a dtype. --loss is an expression in output, the module's output.
Both may also name an object, package.module:Name or path/to/file.py:Name: --inputs a tensor, a tuple, or a function
without arguments that returns the inputs; --loss a function of the output.

exit status: 0 without errors (warnings are none), 1 with errors, 2 if the check could not be run"""

# Options with the names of the arguments of `check`.
_PASSED_ON = (
    *("order", "vmap", "compile", "scipy", "seed", "approximate"),
    *("ulps", "method", "correct", "wrt", "fixed", "explore"),
)


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the subcommands of a parser."""
    parser = commands.add_parser(
        "check",
        help="what is wrong with the derivatives of a function",
        description="Check the derivatives of a Function, function or module by every route.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="package.module:Name or path/to/file.py:Name")
    parser.add_argument("--inputs", required=True, metavar="EXPRESSION", help='arguments: "randn(3, 4), randn(4)"')
    parser.add_argument("--order", type=int, default=2, metavar="K", help="highest order of derivative (%(default)s)")
    parser.add_argument("--no-vmap", action="store_false", dest="vmap", help="skip batching")
    parser.add_argument("--no-scipy", action="store_false", dest="scipy", help="skip SciPy's differences")
    parser.add_argument(
        "--compile", nargs="?", const=True, default=False, metavar="BACKEND", help="check torch.compile, too (slow)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of inputs and directions (%(default)s)")
    parser.add_argument(
        "--dtype", default="float64", metavar="NAME", help="of floating-point inputs and modules (%(default)s)"
    )
    parser.add_argument("--approximate", action="store_true", help="the function declares surrogate derivatives")
    parser.add_argument(
        "--explore", action="store_true", help="invent inputs around the given one: zeros, ties, sizes, layouts, dtypes"
    )
    parser.add_argument(
        "--autocast", metavar="NAME", help="check it as torch.autocast to this dtype of 16 bits runs it"
    )
    parser.add_argument("--reference", metavar="TARGET", help="the same function for float64, for one of low precision")
    parser.add_argument(
        "--ulps", type=float, metavar="X", help="error allowed to it, in units of its rounding (half of the digits)"
    )
    parser.add_argument(
        "--method",
        default="auto",
        metavar="auto|matrices|directions",
        help="all elements, or random directions, or what the size asks for (%(default)s)",
    )
    parser.add_argument(
        "--loss",
        metavar="EXPRESSION",
        help='of a module\'s output, "mse_loss(output, randn(5, 1))": finds the submodule',
    )
    parser.add_argument(
        "--torch-alone",
        action="store_false",
        dest="correct",
        help="judge torch's own derivatives, not those that hodiff takes",
    )
    parser.add_argument("--wrt", metavar="both|parameters|inputs", help="what a module is differentiated by (both)")
    parser.add_argument(
        "--fixed", type=_positions, default=(), metavar="0,2", help="positions of a module's inputs that are constants"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as JSON here; without FILE to standard output, in place of the text",
    )
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    """Run the command; return the exit status: 0 without errors, 1 with errors."""
    dtype = dtype_named(options.dtype)
    torch.manual_seed(options.seed)
    function = load_target(options.target)
    if isinstance(function, torch.nn.Module):
        function = function.to(dtype)
    generator = torch.Generator().manual_seed(options.seed)
    inputs = read_inputs(options.inputs, dtype, generator)
    report = _check(function, inputs, options, generator)
    if options.json == "-":
        sys.stdout.write(report.to_json(indent=2) + "\n")
    else:
        report.print()
    if options.json and options.json != "-":
        _write(Path(options.json), report.to_json(indent=2) + "\n")
    return 0 if report.ok else 1


def _check(function: Any, inputs: Any, options: argparse.Namespace, generator: torch.Generator) -> Report:
    reference = None if options.reference is None else load_target(options.reference, what="--reference")
    return check(
        function,
        inputs,
        **{name: getattr(options, name) for name in _PASSED_ON},
        reference=reference.double() if isinstance(reference, torch.nn.Module) else reference,
        loss=None if options.loss is None else read_loss(options.loss, generator),
        autocast=None if options.autocast is None else dtype_named(options.autocast, "--autocast"),
    )


def _positions(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"check: --json: cannot write {str(path)!r}: {error.strerror}.") from error
