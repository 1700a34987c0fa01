"""hodiff's own rules for torch functions, by family; importing this folder registers all of them."""

from hodiff.common.tensor_rules import register_for_tensors
from hodiff.corrections.mechanism.in_place_variants import enter_in_place
from hodiff.corrections.mechanism.operator_rules import enter_operators
from hodiff.corrections.mechanism.registry import keep_as_own
from hodiff.corrections.rules.autograd import checkpoints, custom_functions, grad_mode
from hodiff.corrections.rules.distances import absolute, cdist, norms
from hodiff.corrections.rules.distances.lengths import LENGTHS
from hodiff.corrections.rules.distances.smooth_functions import of_lengths
from hodiff.corrections.rules.elementwise import (
    activations,
    foreach,
    kinks,
    logarithms,
    powers,
    singular,
    softmax,
    tails,
)
from hodiff.corrections.rules.indexing import all_dimensions, embedding, overwriting, prod, reductions, views
from hodiff.corrections.rules.layers import (
    attention,
    convolution,
    flex,
    normalization,
    pooling,
    weight_norm,
)
from hodiff.corrections.rules.linalg import (
    determinants,
    eigenvectors,
    exponential,
    multiplication,
    solve,
    symmetric,
)
from hodiff.corrections.rules.losses import class_weights, constant_targets, cross_entropy, ctc, margins, masked_terms
from hodiff.corrections.rules.programs import captured_operators, control_flow, scripts
from hodiff.corrections.rules.recurrent import networks
from hodiff.corrections.rules.sampling import dropout, grid_sample
from hodiff.corrections.rules.sparse import constructors
from hodiff.corrections.rules.special import airy, bessel, gamma, modified_bessel, polynomials

# Every file of rules. Importing a file registers its rules; add new files here.
FAMILIES = {
    "autograd": (checkpoints, custom_functions, grad_mode),
    "distances": (absolute, cdist, norms),
    "elementwise functions": (
        *(activations, foreach, kinks, logarithms, powers),
        *(singular, softmax, tails),
    ),
    "indexing": (all_dimensions, embedding, overwriting, prod, reductions, views),
    "layers": (attention, convolution, flex, normalization, pooling, weight_norm),
    "linear algebra": (
        *(determinants, eigenvectors, exponential),
        *(multiplication, solve, symmetric),
    ),
    "losses": (class_weights, constant_targets, cross_entropy, ctc, margins, masked_terms),
    "programs": (captured_operators, control_flow, scripts),
    "recurrent networks": (networks,),
    "sampling": (dropout, grid_sample),
    "sparse tensors": (constructors,),
    "special functions": (airy, bessel, gamma, modified_bessel, polynomials),
}

register_for_tensors(LENGTHS, of_lengths)
# The rules below follow from the rules of the functions, which the imports above have registered.
enter_in_place()
enter_operators()
keep_as_own()
