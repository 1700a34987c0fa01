"""Corrections: hodiff's own rules for torch functions (`rules`), applied wherever they are called (`mechanism`)."""

from hodiff.corrections import rules as rules
from hodiff.corrections.mechanism.corrected import corrected as corrected
from hodiff.corrections.mechanism.correction_table import table as table
from hodiff.corrections.mechanism.declining import INVALID as INVALID
from hodiff.corrections.mechanism.declining import UNNEEDED as UNNEEDED
from hodiff.corrections.mechanism.declining import Declined as Declined
from hodiff.corrections.mechanism.declining import unable as unable
from hodiff.corrections.mechanism.mode import Corrections as Corrections
from hodiff.corrections.mechanism.registry import Correction as Correction
from hodiff.corrections.mechanism.registry import register as register
from hodiff.corrections.mechanism.registry import unregister as unregister
