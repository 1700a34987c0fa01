"""torch's operator database as functions of the tensors that they are differentiated in.

The database is a private part of torch, meant for its own tests: importing it changes global switches of torch, so that
only the audit's worker processes do.
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
from hodiff.torch_internals.operator_database import operator_database, parameter_names
from hodiff.torch_internals.operators import batch_norm_with_update, native_batch_norm

_METHODS = (MethodDescriptorType, WrapperDescriptorType)
# Beyond these the database only repeats itself.
_LISTED = 200
# Larger samples are taken only where there are no others.
_ELEMENTS = 10_000

# Samples of the database whose derivatives are not well defined, and why.
ILL_POSED = dict.fromkeys(
    (f"nn.functional.max_unpool{n}d" for n in (1, 2, 3)),
    "indices repeat, and then the result depends on the order of writing; the variant 'grad' has distinct ones",
)
ILL_POSED["as_strided.partial_views"] = "depends on memory around its argument"
ILL_POSED["round.decimals_3"] = "steps of a thousandth, which differences take for a slope"

# The places of labels, 1 or -1, that the database would differentiate in: any other value gives another function.
LABELS = {"nn.functional.hinge_embedding_loss": 1, "nn.functional.cosine_embedding_loss": 2}

# Operators whose further outputs are what their reverse rule keeps, or diagnostics; torch gives those no gradient.
FIRST_OUTPUT_ONLY = frozenset({
    "native_layer_norm",
    "native_batch_norm",
    native_batch_norm.__name__,
    batch_norm_with_update.__name__,
    "linalg.lstsq",
})


def database() -> dict[str, Any]:
    """Torch's operators by name; variants are called "name.variant".

    Returns:
        The entries, which are `OpInfo` objects of torch.

    Raises:
        HodiffError: If this build of torch has no database.
    """
    try:
        # The database sets the seed within dropout and the like; the audit wants to see that they are random.
        entries = operator_database(_as_it_is, _seed_all)
    except Exception as error:  # whatever its many imports raise
        raise HodiffError(
            f"audit: torch {torch.__version__} has no operator database here ({type(error).__name__}: {error}). "
            "Use a build of torch with torch.testing._internal, and install the package expecttest that it needs."
        ) from error
    return {name_of(op): op for op in entries}


def name_of(op: Any) -> str:
    """An operator's name, with its variant."""
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def _seed_all(seed: int) -> None:
    """All that the database's generators of samples draw from."""
    seed_everywhere(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the database draws from NumPy's global generator)


def _as_it_is(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def samples(name: str, op: Any, count: int) -> list[Sample]:
    """Some of an operator's samples in float64, chosen at random, the same in every run."""
    seed = zlib.crc32(name.encode())
    with seeded(seed):
        _seed_all(seed)
        everything = list(itertools.islice(_differentiable(op), _LISTED))
    listed = [sample for sample in everything if sample.size <= _ELEMENTS] or everything
    # The database runs through products of options, of which samples at equal distances would see the same ones.
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
    """Whether a call of the database is one of the torch function, with nothing around it."""
    mark = object()
    try:
        untouched = process(mark) is mark
    except (AttributeError, IndexError, TypeError):
        untouched = False
    wrapped = op.gradcheck_wrapper.__name__ not in {"<lambda>", "wrapper_set_seed"}
    return untouched and not wrapped and op.name not in FIRST_OUTPUT_ONLY


def call_of(name: str) -> Callable[..., Any]:
    """An operator of the database as its samples call it, a function of `(input, args, kwargs)`."""
    return next(_differentiable(database()[name])).call


def _moves(leaf: Any) -> bool:
    return is_buffer(leaf) and leaf.requires_grad and leaf.dtype == torch.float64 and not leaf.is_nested


def _call(op: Any, process: Callable[[Any], Any]) -> Callable[..., Any]:
    # As torch's own gradient checks do: the wrapper makes arguments symmetric, triangular or positive where they have
    # to be, and what follows it makes eigenvectors and the like unique.
    seeded = op.gradcheck_wrapper.__name__ == "wrapper_set_seed"
    wrapper = _as_it_is if seeded else op.gradcheck_wrapper
    function = _by_attribute(op.op.__name__) if isinstance(op.op, _METHODS) else op.op

    def call(input: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = process(wrapper(function, input, *args, **kwargs))
        return output[0] if op.name in FIRST_OUTPUT_ONLY else output

    return call


def _by_attribute(name: str) -> Callable[..., Any]:
    """A method of tensors as one of whatever stands in the place of a tensor."""
    return lambda first, *rest, **named: getattr(first, name)(*rest, **named)
