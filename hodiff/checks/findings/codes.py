"""Table of the defects that a check can name, by code, with their causes and remedies.

A code never changes its meaning. The hundreds are groups: 1 wrong numbers, 2 return values of a rule,
3 side effects of a rule, 4 missing rules, 5 waste, 9 results that are no defect of the function.
"""

from __future__ import annotations

from hodiff.checks.findings.missing_and_wasted import MISSING, WASTE
from hodiff.checks.findings.not_defects import NOT_DEFECTS
from hodiff.checks.findings.rule_conduct import RETURNS, SURROUNDINGS
from hodiff.checks.findings.wrong_numbers import NUMBERS

_TABLES = (NUMBERS, RETURNS, SURROUNDINGS, MISSING, WASTE, NOT_DEFECTS)

CODES = {each.code: each for table in _TABLES for each in table}
