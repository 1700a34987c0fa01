"""Interception of the inner functions of `torch.func` transforms, for objects that represent tensors in them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch._functorch import vmap as batching
from torch.autograd import functional
from torch.nn.utils import _named_member_accessor as members
from torch.utils import _pytree as pytree

# Torch's own functions, also after interception: gradients and vjp, jvp and vmap, and a module's tensor swap.
vjp_of: Callable[..., Any] = eager_transforms._vjp_with_argnums
jvp_of: Callable[..., Any] = eager_transforms._jvp_with_argnums
grad_and_value_of: Callable[..., Any] = eager_transforms.grad_and_value_impl
vmap_of: Callable[..., Any] = apis.vmap_impl
linearize_of: Callable[..., Any] = eager_transforms.linearize
swap_member: Callable[..., Any] = members.swap_tensor
# The arguments that `argnums` selects; and all arguments with those replaced.
sliced: Callable[..., Any] = eager_transforms._slice_argnums
replaced: Callable[..., Any] = eager_transforms._replace_args
# A dimension for each leaf of a structure, given for leaves or whole subtrees; None if they do not fit.
dims_of_leaves: Callable[[Any, Any], list[int | None] | None] = pytree._broadcast_to_and_flatten

# Attributes that torch looks up at each call.
_PLACES = {
    "vjp": (eager_transforms, "_vjp_with_argnums", vjp_of),
    "jvp": (eager_transforms, "_jvp_with_argnums", jvp_of),
    "grad_and_value": (eager_transforms, "grad_and_value_impl", grad_and_value_of),
    "vmap": (apis, "vmap_impl", vmap_of),
    "swap_member": (members, "swap_tensor", swap_member),
}


# Operators that trace functions, by all names in torch: operator, module, attribute.
_CONTROL_FLOW = (
    ("cond", "torch", "cond"),
    ("cond", "torch._higher_order_ops", "cond"),
    ("cond", "torch._higher_order_ops.cond", "cond"),
    ("while_loop", "torch", "while_loop"),
    ("while_loop", "torch._higher_order_ops", "while_loop"),
    ("while_loop", "torch._higher_order_ops.while_loop", "while_loop"),
    ("scan", "torch._higher_order_ops", "scan"),
    ("scan", "torch._higher_order_ops.scan", "scan"),
    ("associative_scan", "torch._higher_order_ops", "associative_scan"),
    ("associative_scan", "torch._higher_order_ops.associative_scan", "associative_scan"),
    ("map", "torch._higher_order_ops", "map"),
    ("map", "torch._higher_order_ops.map", "map"),
    ("linearize", "torch.func", "linearize"),
    ("linearize", "torch._functorch.eager_transforms", "linearize"),
)


def plain_vmap(function: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error") -> Any:
    """Return what `torch.func.vmap` returns, without interception."""
    if torch.compiler.is_compiling():
        return torch.func.vmap(function, in_dims, out_dims, randomness)
    return functools.partial(vmap_of, function, in_dims, out_dims, randomness, None)


def stand_in_front(asked: Callable[[], bool], ways: dict[str, Callable[..., Any]]) -> None:
    """Redirect calls of the transforms' inner functions in eager code, whenever `asked` returns True.

    Args:
        asked: Whether to redirect; evaluated at each call, in its thread.
        ways: The replacements, by the names of `_PLACES`; they take the same arguments.
    """
    for name, way in ways.items():
        place, attribute, own = _PLACES[name]
        setattr(place, attribute, _either(own, way, asked))


def stand_in_front_of_control_flow(asked: Callable[[], bool], ways: dict[str, Callable[..., Any]]) -> None:
    """Redirect operators that take functions in the same way; references imported earlier remain torch's own."""
    for name, module, attribute in _CONTROL_FLOW:
        place = importlib.import_module(module)
        own = getattr(place, attribute, None)
        # The attribute may also be a module of the same name.
        if isinstance(own, FunctionType):
            setattr(place, attribute, _either(own, ways[name], asked))


def look_at_trees_of_scan(look: Callable[[Any], None]) -> None:
    """Call `look` on trees that torch's `scan` gets: from 2.15 on, it ignores leaves that are not tensors."""

    def tree_flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        if not torch.compiler.is_compiling():
            look(tree)
        return pytree.tree_flatten(tree, is_leaf)

    watched = ModuleType(pytree.__name__)
    watched.__dict__.update(vars(pytree) | {"tree_flatten": tree_flatten})
    # The module is imported by name, because the package has a function of the same name.
    vars(importlib.import_module("torch._higher_order_ops.scan"))["pytree"] = watched


def look_at_arguments_of_functional(look: Callable[[Any], None]) -> None:
    """Call `look` on arguments and outputs of `torch.autograd.functional`, which detaches or drops them."""
    own = functional._as_tuple

    @functools.wraps(own)
    def as_tuple(inp: Any, *names: Any) -> Any:
        look(inp)
        return own(inp, *names)

    functional._as_tuple = as_tuple


def carry_through_vmap(carry: Callable[[Tensor, Any, Callable[[Tensor], Tensor]], Any]) -> None:
    """Call `carry(x, result, move)` on each tensor that enters or leaves `torch.func.vmap` in eager code.

    Args:
        carry: Takes a tensor, the result of `move` for it, and `move`; returns the result.
    """
    for own in (batching._add_batch_dim, batching._remove_batch_dim):

        @functools.wraps(own)
        def call(tensor: Tensor, *how: Any, own: Callable[..., Any] = own) -> Any:
            result = own(tensor, *how)
            return result if torch.compiler.is_compiling() else carry(tensor, result, lambda part: own(part, *how))

        setattr(batching, own.__name__, call)


def _either(own: Callable[..., Any], way: Callable[..., Any], asked: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not asked():
            return own(*args, **kwargs)
        return way(*args, **kwargs)

    return call
