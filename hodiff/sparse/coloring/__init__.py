"""Coloring of sparse matrices, so that few products give all of their entries.

- `color`: the function; `compressed_patterns`, its input and formats of the matrix; `coloring`, its result.
- `coloring_problems`: the coloring problem of each method.
- `vertex_orders`, `loops`: orders of vertices and greedy colorings, compiled or `interpreted`.
- `entries`, `substitution`: recovery of entries from products.
"""

from hodiff.sparse.coloring.color import color as color
from hodiff.sparse.coloring.coloring import Coloring as Coloring
from hodiff.sparse.coloring.entries import Gather as Gather
from hodiff.sparse.coloring.substitution import Substitution as Substitution
