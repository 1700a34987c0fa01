"""Coefficients that hold the directions alone that their elements depend on, and how torch's functions keep them so."""

from hodiff.taylor.sparsity.dispatch import by_slots as by_slots
from hodiff.taylor.sparsity.supports import Support as Support
from hodiff.taylor.sparsity.supports import support as support
