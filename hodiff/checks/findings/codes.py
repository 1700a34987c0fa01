"""The defects that a check can name: a code each, what causes it, and what to do about it.

A code never changes its meaning. Hundreds group what belongs together: 1 numbers that are wrong, 2 what a rule returns,
3 what a rule does to its surroundings, 4 what is missing, 5 waste, 9 what is no defect of the function.
"""

from __future__ import annotations

from hodiff.checks.findings.missing_and_wasted import MISSING, WASTE
from hodiff.checks.findings.not_defects import NOT_DEFECTS
from hodiff.checks.findings.rule_conduct import RETURNS, SURROUNDINGS
from hodiff.checks.findings.wrong_numbers import NUMBERS

_TABLES = (NUMBERS, RETURNS, SURROUNDINGS, MISSING, WASTE, NOT_DEFECTS)

CODES = {each.code: each for table in _TABLES for each in table}
