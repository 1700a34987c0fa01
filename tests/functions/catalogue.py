"""All cases from every file of `cases/`; a Function joins the contract tests when a file lists it."""

import importlib
from pathlib import Path

from functions.case import FunctionCase

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))

_BY_FAMILY: dict[str, list[FunctionCase]] = {
    family: importlib.import_module(f"functions.cases.{family}").CASES for family in FAMILIES
}
CASES = [case for cases in _BY_FAMILY.values() for case in cases]


def family_of(case: FunctionCase) -> str:
    """Return the name of the file that defines a case."""
    return next(family for family, cases in _BY_FAMILY.items() if any(case is each for each in cases))
