"""hodiff's own rules for torch functions, applied wherever they are called."""

from hodiff.corrections.autograd import checkpoints, custom_functions, grad_mode
from hodiff.corrections.declining import INVALID as INVALID
from hodiff.corrections.declining import UNNEEDED as UNNEEDED
from hodiff.corrections.declining import Declined as Declined
from hodiff.corrections.declining import unable as unable
from hodiff.corrections.distances import absolute, cdist, norms
from hodiff.corrections.elementwise import (
    activations,
    foreach,
    kinks,
    logarithms,
    powers,
    recorded,
    singular,
    softmax,
    tails,
)
from hodiff.corrections.elementwise.written import enter_in_place
from hodiff.corrections.indexing import embedding, overwriting, prod, reductions, views
from hodiff.corrections.layers import (
    attention,
    convolution,
    flex,
    normalization,
    pooling,
    weight_norm,
)
from hodiff.corrections.linalg import determinants, eigenvectors, exponential, multiplication, solve, symmetric
from hodiff.corrections.losses import class_weights, constant_targets, cross_entropy, ctc, margins, masked_terms
from hodiff.corrections.mode import Corrections as Corrections
from hodiff.corrections.mode import corrected as corrected
from hodiff.corrections.operators import decomposed, renamed
from hodiff.corrections.operators.operator_rules import enter_operators
from hodiff.corrections.programs import control_flow, scripts
from hodiff.corrections.recurrent import networks
from hodiff.corrections.registry import Correction as Correction
from hodiff.corrections.registry import keep_as_own
from hodiff.corrections.registry import register as register
from hodiff.corrections.registry import table as table
from hodiff.corrections.registry import unregister as unregister
from hodiff.corrections.sampling import dropout, grid_sample
from hodiff.corrections.sparse import constructors
from hodiff.corrections.special import airy, bessel, gamma, modified_bessel, polynomials

# Every file of rules. Importing a file registers its rules; add new files here.
FAMILIES = {
    "autograd": (checkpoints, custom_functions, grad_mode),
    "distances": (absolute, cdist, norms),
    "elementwise functions": (
        *(activations, foreach, kinks, logarithms, powers),
        *(recorded, singular, softmax, tails),
    ),
    "indexing": (embedding, overwriting, prod, reductions, views),
    "layers": (attention, convolution, flex, normalization, pooling, weight_norm),
    "linear algebra": (determinants, eigenvectors, exponential, multiplication, solve, symmetric),
    "losses": (class_weights, constant_targets, cross_entropy, ctc, margins, masked_terms),
    "operators of captured graphs": (renamed, decomposed),
    "programs": (control_flow, scripts),
    "recurrent networks": (networks,),
    "sampling": (dropout, grid_sample),
    "sparse tensors": (constructors,),
    "special functions": (airy, bessel, gamma, modified_bessel, polynomials),
}

enter_in_place()
enter_operators()
keep_as_own()
