"""Rules for the supports of torch's operators, a file for each kind."""

from typing import Any

import torch

from hodiff.sparse.detection.call import RULES, Rule
from hodiff.sparse.detection.rules import contractions as contractions
from hodiff.sparse.detection.rules import elementwise as elementwise
from hodiff.sparse.detection.rules import reductions as reductions
from hodiff.sparse.detection.rules import sums as sums
from hodiff.sparse.detection.rules import windows as windows
from hodiff.torch_operators.operator import Kind
from hodiff.torch_operators.table import short_names

# Rules of operators without a rule of their own. Views show memory whose supports are known.
_BY_KIND: dict[str, Rule] = {
    **dict.fromkeys(short_names(Kind.POINTWISE), elementwise.elementwise),
    **dict.fromkeys(short_names(Kind.MOVES, views=False), elementwise.moving),
    **dict.fromkeys(short_names(Kind.REDUCES), reductions.reduced),
    **dict.fromkeys(short_names(Kind.MATRIX), contractions.of_matrices),
    **dict.fromkeys(short_names(Kind.STEP), elementwise.steps),
}


def rule_of(name: str, func: Any) -> Rule | None:
    """Return the rule of an operator with a plain name, or None."""
    found = RULES.get(name) or _BY_KIND.get(name)
    return elementwise.elementwise if found is None and torch.Tag.pointwise in func.tags else found
