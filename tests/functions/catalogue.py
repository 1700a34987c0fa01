"""All cases, from every file of `cases/`: a Function joins the contract by being listed in one."""

import importlib
from pathlib import Path

from functions.case import FunctionCase

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))

CASES: list[FunctionCase] = [
    case for family in FAMILIES for case in importlib.import_module(f"functions.cases.{family}").CASES
]


def by_name(name: str) -> FunctionCase:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
