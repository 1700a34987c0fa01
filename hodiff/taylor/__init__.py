"""Taylor mode: truncated power series through a function, of any order, in one pass."""

from hodiff.taylor.differential import laplacian as laplacian
from hodiff.taylor.differential import value_grad_laplacian as value_grad_laplacian
from hodiff.taylor.directional import directional_derivatives as directional_derivatives
from hodiff.taylor.explain import Explanation as Explanation
from hodiff.taylor.explain import explain as explain
from hodiff.taylor.jet import jet as jet
from hodiff.taylor.registry import RULES as RULES
from hodiff.taylor.registry import register as register
