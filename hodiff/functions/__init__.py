"""Functions with derivatives of every order, by every route."""

from hodiff.functions.activations import Swish as Swish
from hodiff.functions.activations import swish as swish
from hodiff.functions.elementwise import ElementwiseFunction as ElementwiseFunction
from hodiff.functions.nesting import nestable_jvp as nestable_jvp
