"""Rules by kind; importing this package enters all of them."""

from hodiff.taylor.rules import (
    activations,
    arithmetic,
    constants,
    contractions,
    functions,
    gradients,
    linear,
    norms,
    ordering,
    piecewise,
    softmax,
)
from hodiff.taylor.rules.learning import layers, losses
from hodiff.taylor.rules.matrices import determinants, solutions

# Every file of rules; add new files here.
FAMILIES = (
    *(activations, arithmetic, constants, contractions, functions, gradients, linear, norms, ordering),
    *(piecewise, softmax, layers, losses, determinants, solutions),
)
