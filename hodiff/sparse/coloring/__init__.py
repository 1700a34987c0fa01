"""Coloring of sparse matrices, so that few products give all of their entries.

- `color`: the function; `patterns`, its input; `coloring`, its result.
- `problems`: the coloring problem of each method; `parts`, the split of entries between rows and columns.
- `orders`, `loops`: orders of vertices and greedy colorings, compiled or `interpreted`; `bounds`, lower bounds, and
  colorings of bands; `neutral`, colors that are not needed.
- `gathers`, `substitution`: recovery of entries from products; `entries`, recovery with tensors; `layouts`, formats of
  the matrix.
"""

from hodiff.sparse.coloring.color import color as color
from hodiff.sparse.coloring.coloring import Coloring as Coloring
from hodiff.sparse.coloring.entries import Gather as Gather
from hodiff.sparse.coloring.substitution import Substitution as Substitution
