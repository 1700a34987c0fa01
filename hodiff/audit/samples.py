"""Samples of torch's operator database, as functions of the tensors that they are differentiated by.

The database is a private part of torch, meant for its own tests. Importing it changes global switches of torch, so only
the audit's worker processes import it.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hodiff.checks.mutations.sample import Sample, is_buffer
from hodiff.common.randomness import seed_everywhere, seeded
from hodiff.errors import HodiffError
from hodiff.torch_internals.operators import (
    batch_norm_with_update,
    native_batch_norm,
    operator_database,
    parameter_names,
)

_METHODS = (MethodDescriptorType, WrapperDescriptorType)
# Number of samples after which the database only repeats itself.
_LISTED = 200
# Size above which samples are used only if there are no smaller samples.
_ELEMENTS = 10_000

# Samples of the database whose derivatives are not well defined, and why.
ILL_POSED = dict.fromkeys(
    (f"nn.functional.max_unpool{n}d" for n in (1, 2, 3)),
    "indices repeat, and then the result depends on the order of writing; the variant 'grad' has distinct ones",
)
ILL_POSED["as_strided.partial_views"] = "depends on memory around its argument"
ILL_POSED["round.decimals_3"] = "steps of a thousandth, which differences take for a slope"

# Positions of labels, 1 or -1, that the database would differentiate by: other values select another function.
LABELS = {"nn.functional.hinge_embedding_loss": 1, "nn.functional.cosine_embedding_loss": 2}

# Operators whose further outputs, saved values or diagnostics, have no gradient in torch.
FIRST_OUTPUT_ONLY = frozenset({
    "native_layer_norm",
    "native_batch_norm",
    native_batch_norm.__name__,
    batch_norm_with_update.__name__,
    "linalg.lstsq",
})


def database() -> dict[str, Any]:
    """Return the `OpInfo` entries of torch's operators by name; variants are called "name.variant"."""
    try:
        # The database sets the seed within random operators such as dropout; the audit must see that they are random.
        entries = operator_database(_as_it_is, _seed_all)
    except Exception as error:  # its many imports may raise anything
        raise HodiffError(
            f"audit: torch {torch.__version__} has no operator database here ({type(error).__name__}: {error}). "
            "Install what it imports, `pip install expecttest` (the extra `audit` of hodiff), in a build of torch with "
            "torch.testing._internal."
        ) from error
    return {name_of(op): op for op in entries}


def name_of(op: Any) -> str:
    """Return an operator's name, with its variant."""
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def _seed_all(seed: int) -> None:
    """Seed all generators that the database's samples use."""
    seed_everywhere(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the database draws from NumPy's global generator)


def _as_it_is(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def samples(name: str, op: Any, count: int) -> list[Sample]:
    """Return up to `count` of an operator's samples in float64, chosen at random, equal in every run."""
    seed = zlib.crc32(name.encode())
    with seeded(seed):
        _seed_all(seed)
        everything = list(itertools.islice(_differentiable(op), _LISTED))
    listed = [sample for sample in everything if sample.size <= _ELEMENTS] or everything
    # The database enumerates products of options, in which samples at equal distances would share options.
    picked = random.Random(seed).sample(range(len(listed)), min(count, len(listed)))
    return [listed[i] for i in sorted(picked)]


def _differentiable(op: Any) -> Iterator[Sample]:
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        leaves, structure = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        held = LABELS.get(op.name)
        places = tuple(i for i, leaf in enumerate(leaves) if _moves(leaf) and i != held)
        if any(leaves[i].numel() for i in places):
            values = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            process = sample.output_process_fn_grad
            yield Sample(
                _call(op, process),
                values,
                structure,
                places,
                parameters=parameter_names(op),
                direct=_is_direct(op, process),
            )


def _is_direct(op: Any, process: Callable[[Any], Any]) -> bool:
    """Whether the database calls the torch function without a wrapper."""
    mark = object()
    try:
        untouched = process(mark) is mark
    except (AttributeError, IndexError, TypeError):
        untouched = False
    wrapped = op.gradcheck_wrapper.__name__ not in {"<lambda>", "wrapper_set_seed"}
    return untouched and not wrapped and op.name not in FIRST_OUTPUT_ONLY


def call_of(name: str) -> Callable[..., Any]:
    """Return an operator as the database's samples call it, a function of `(input, args, kwargs)`."""
    return next(_differentiable(database()[name])).call


def _moves(leaf: Any) -> bool:
    return is_buffer(leaf) and leaf.requires_grad and leaf.dtype == torch.float64 and not leaf.is_nested


def _call(op: Any, process: Callable[[Any], Any]) -> Callable[..., Any]:
    # Follow torch's own gradient checks: the wrapper makes arguments symmetric, triangular or positive if necessary,
    # and `process` makes outputs such as eigenvectors unique.
    seeded = op.gradcheck_wrapper.__name__ == "wrapper_set_seed"
    wrapper = _as_it_is if seeded else op.gradcheck_wrapper
    function = _by_attribute(op.op.__name__) if isinstance(op.op, _METHODS) else op.op

    def call(input: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = process(wrapper(function, input, *args, **kwargs))
        return output[0] if op.name in FIRST_OUTPUT_ONLY else output

    return call


def _by_attribute(name: str) -> Callable[..., Any]:
    """Return a method of tensors that also works for objects that replace tensors."""
    return lambda first, *rest, **named: getattr(first, name)(*rest, **named)
