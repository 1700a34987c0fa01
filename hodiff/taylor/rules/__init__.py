"""Rules by kind; importing this room enters them all."""

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
    functions as functions,
)
from hodiff.taylor.rules import (
    gradients as gradients,
)
from hodiff.taylor.rules import (
    linear as linear,
)
from hodiff.taylor.rules import (
    losses as losses,
)
from hodiff.taylor.rules import (
    matrices as matrices,
)
from hodiff.taylor.rules import (
    normalization as normalization,
)
from hodiff.taylor.rules import (
    piecewise as piecewise,
)
