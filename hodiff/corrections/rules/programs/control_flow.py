"""Rules for operators that take functions, in plain Python, which every transform differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.mode import Corrections
from hodiff.corrections.mechanism.registry import register
from hodiff.errors import InputError
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.wrapped_tensors import below_derivatives, is_batched
from hodiff.torch_internals.compilers.tracing import run_as_python
from hodiff.torch_internals.interception import active_function_modes

_plainly = partial(
    register,
    routes=ROUTES,
    reason="second derivatives treat its gradient as a constant, and no transform supports it",
    reference="an equivalent function in plain Python",
)


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    """Run the branch that is taken; in a batch run both, and select by row."""
    if not _varies(pred):
        return true_fn(*operands) if pred else false_fn(*operands)
    taken, spec = pytree.tree_flatten(true_fn(*operands))
    other, _ = pytree.tree_flatten(false_fn(*operands))
    rows = [torch.where(pred.reshape(()), a, b) for a, b in zip(taken, other, strict=True)]
    return pytree.tree_unflatten(rows, spec)


def _varies(pred: Any) -> bool:
    """Whether the condition differs between the rows of a batch."""
    return isinstance(pred, Tensor) and is_batched(below_derivatives(pred))


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
    **_: Any,
) -> Any:
    """Run a while loop, with the same number of steps for all rows of a batch."""
    result: Any = tuple(carried_inputs)
    flat: Sequence[Any] = carried_inputs
    while _goes_on(cond_fn(*flat, *additional_inputs)):
        result = body_fn(*flat, *additional_inputs)
        flat = pytree.tree_leaves(result)
    return result


def _goes_on(condition: Any) -> bool:
    if _varies(condition):
        raise InputError(
            "while_loop: cond_fn: expected one answer for the whole batch, got one for each row of torch.func.vmap; "
            "run a fixed number of steps and freeze finished rows with torch.where, or loop over the batch."
        )
    return bool(condition)


def _scan(
    combine_fn: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    """Loop over the first dimension, carry a state and stack the outputs."""

    def advanced(carry: Any, row: Sequence[Tensor]) -> Any:
        result = combine_fn(*pytree.tree_leaves(carry), *row, *additional_inputs)
        return result if _is_of_user(combine_fn) else (result[: len(init)], result[len(init) :])

    carry: Any = init
    rows = []
    for step in range(xs[0].shape[0]):
        carry, row = advanced(carry, [each[step] for each in xs])
        rows.append(row)
    if rows:
        stacked = _stacked(rows)
    else:
        # torch 2.15 accepts zero steps; a step on zeros then gives the structure of the outputs.
        form, row = advanced(init, [each.new_zeros(each.shape[1:]) for each in xs])
        carry = pytree.tree_unflatten(list(init), pytree.tree_structure(form))
        stacked = pytree.tree_map(lambda leaf: None if leaf is None else leaf[:0], _stacked([row]))
    return (carry, stacked) if _is_of_user(combine_fn) else (*carry, *stacked)


def _is_of_user(combine_fn: Any) -> bool:
    """Whether a function returns trees, as a user's in torch's wrapper, and not leaves, as an exported one."""
    return isinstance(combine_fn, partial)


def _map(
    f: Callable[..., Any], xs: Sequence[Tensor], pos_args: Sequence[Any] = (), mutated_arg_indices: str = ""
) -> Any:
    """Loop over the first dimension and stack the results."""
    del mutated_arg_indices  # what f writes to, new in torch 2.15; a loop writes to it as well
    return _stacked([f(*(each[step] for each in xs), *pos_args) for step in range(xs[0].shape[0])])


def _associative_scan(combine_fn: Any, xs: Sequence[Tensor], additional_inputs: Sequence[Any] = ()) -> Any:
    """Combine the elements along the first dimension cumulatively, one after the other."""
    first = [each[0] if len(each) else each for each in xs]
    rows = [pytree.tree_unflatten(first, combine_fn.keywords["spec"]) if _is_of_user(combine_fn) else first]
    if not len(xs[0]):
        return rows[0]
    for step in range(1, xs[0].shape[0]):
        rows.append(combine_fn(*pytree.tree_leaves(rows[-1]), *(each[step] for each in xs), *additional_inputs))
    return _stacked(rows)


def _stacked(trees: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *trees)


def _in_the_mode(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for an operator called outside torch's wrapper, as in an exported program."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return UNNEEDED
        with Corrections():
            return run(*args, **kwargs)

    return rule


# Names of torch's operators, with the names that users call, and the rules.
_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "cond": ("torch.cond", _cond),
    "while_loop": ("torch.ops.higher_order.while_loop", _while_loop),
    "scan": ("torch.ops.higher_order.scan", _scan),
    "map_impl": ("torch.ops.higher_order.map", _map),
    "associative_scan": ("torch.ops.higher_order.associative_scan", _associative_scan),
}

for _operator, (_name, _run) in _OPERATORS.items():
    if hasattr(torch.ops.higher_order, _operator):
        _plainly(getattr(torch.ops.higher_order, _operator), name=_name)(_in_the_mode(_run))

run_as_python(
    lambda: (
        not torch.compiler.is_compiling() and any(isinstance(mode, Corrections) for mode in active_function_modes())
    ),
    {
        "_cond_op_wrapper": _cond,
        "_while_loop_op_wrapper": _while_loop,
        "run_flattened_scan": _scan,
        "run_flattened_map": None,  # its function takes trees, which only the wrapper knows
        "run_flattened_associative_scan": _associative_scan,
    },
)
