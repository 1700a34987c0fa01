"""All cases, from every file of `cases/`: a Function joins the contract by being listed in one."""

import importlib
from pathlib import Path

from functions.case import FunctionCase

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))

_BY_FAMILY: dict[str, list[FunctionCase]] = {
    family: importlib.import_module(f"functions.cases.{family}").CASES for family in FAMILIES
}
CASES = [case for cases in _BY_FAMILY.values() for case in cases]


def family_of(case: FunctionCase) -> str:
    """The file that a case comes from."""
    return next(family for family, cases in _BY_FAMILY.items() if any(case is each for each in cases))
