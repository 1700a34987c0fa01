"""Coloring sparse matrices, so that few products give all of their entries.

- `color`: the function; `patterns`, what it takes; `coloring`, what it gives.
- `problems`: what each method colors; `parts`, which entries rows and columns share out.
- `orders`, `loops`: orders of vertices and greedy colorings, compiled or `interpreted`; `bounds`, what needs no search;
  `neutral`, colors that are not needed.
- `gathers`, `substitution`: how entries come back from products; `entries`, the same with tensors; `layouts`, the
  matrix.
"""

from hodiff.sparse.coloring.color import color as color
from hodiff.sparse.coloring.coloring import Coloring as Coloring
from hodiff.sparse.coloring.gathers import Gather as Gather
from hodiff.sparse.coloring.substitution import Substitution as Substitution
