"""Rules by kind; importing this package enters all of them."""

from hodiff.taylor.rules import (
    activations as activations,
)
from hodiff.taylor.rules import (
    arithmetic as arithmetic,
)
from hodiff.taylor.rules import (
    constants as constants,
)
from hodiff.taylor.rules import (
    contractions as contractions,
)
from hodiff.taylor.rules import (
    extremes as extremes,
)
from hodiff.taylor.rules import (
    functions as functions,
)
from hodiff.taylor.rules import (
    gradients as gradients,
)
from hodiff.taylor.rules import (
    linear as linear,
)
from hodiff.taylor.rules import (
    moments as moments,
)
from hodiff.taylor.rules import (
    norms as norms,
)
from hodiff.taylor.rules import (
    ordering as ordering,
)
from hodiff.taylor.rules import (
    piecewise as piecewise,
)
from hodiff.taylor.rules import (
    products as products,
)
from hodiff.taylor.rules import (
    softmax as softmax,
)
from hodiff.taylor.rules import (
    strides as strides,
)
from hodiff.taylor.rules.learning import (
    attention as attention,
)
from hodiff.taylor.rules.learning import (
    classification as classification,
)
from hodiff.taylor.rules.learning import (
    embedding as embedding,
)
from hodiff.taylor.rules.learning import (
    losses as losses,
)
from hodiff.taylor.rules.learning import (
    normalization as normalization,
)
from hodiff.taylor.rules.matrices import (
    determinants as determinants,
)
from hodiff.taylor.rules.matrices import (
    factorizations as factorizations,
)
from hodiff.taylor.rules.matrices import (
    solutions as solutions,
)
