"""hodiff's own rules for torch functions, applied wherever they are called."""

from hodiff.corrections.mode import Corrections as Corrections
from hodiff.corrections.registry import table as table
