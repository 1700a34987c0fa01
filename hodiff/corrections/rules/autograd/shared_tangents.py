"""Rules for functions that copy their input, but whose tangent in torch's forward mode is the input's tangent itself.

If either tensor is changed in place later, so is the tangent of the other, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_operators.table import forms_of

_COPIES = """
    alias_copy as_strided_copy diagonal_copy expand_copy permute_copy select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy
    view_as_real_copy
"""
# Their derivative by the first argument is 1.
_REMAINDERS = "frac fmod remainder"


def _copied(function: Callable[..., Any], *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Call torch's function, and copy its results with their tangents."""
    if out is not None or not (torch.compiler.is_compiling() or in_forward_mode()):
        return UNNEEDED
    results = function(*args, **kwargs)
    return results.clone() if isinstance(results, Tensor) else type(results)(each.clone() for each in results)


for _name in (*_COPIES.split(), *_REMAINDERS.split()):
    _function = getattr(torch, _name)
    register(
        *forms_of(_name),
        routes=ROUTES[1:],
        reason="in forward mode the result shares its tangent with the input, which is wrong if either is changed in "
        "place",
        reference="a copy of the result",
    )(partial(_copied, _function))
