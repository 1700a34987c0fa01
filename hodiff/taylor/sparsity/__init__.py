"""Coefficients that store only the directions their elements depend on, and the functions that keep them so."""

from hodiff.taylor.sparsity.dispatch import by_slots as by_slots
from hodiff.taylor.sparsity.moving_directions import Support as Support
from hodiff.taylor.sparsity.moving_directions import support as support
