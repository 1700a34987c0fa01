"""Coefficients that store only the directions their elements depend on, and the functions that keep them so."""

from hodiff.taylor.sparsity.dispatch import by_slots as by_slots
from hodiff.taylor.sparsity.supports import Support as Support
from hodiff.taylor.sparsity.supports import support as support
