"""Patterns of torch's messages for missing or refused features, which hodiff distinguishes."""

from __future__ import annotations

import re
from enum import Enum


class Wording(Enum):
    """A message of torch: a case-insensitive pattern, and its meaning for the reader."""

    # Missing derivatives.
    NOT_IMPLEMENTED = (r"not (yet )?implemented", "an operator lacks the derivative that is asked for")
    NOT_SUPPORTED = (r"not (currently )?support|n't (yet )?support", "a way to differentiate does not go there")
    NO_REVERSE_RULE = (r"derivative for .* is not implemented", "an operator lacks a rule for reverse mode")
    NO_AUTOGRAD_FORMULA = (r"no autograd formula", "so does one made by torch.library")
    NO_FORWARD_RULE = (r"Trying to use forward AD with", "an operator lacks a rule for forward mode")
    SAMPLE_OF_GAMMA = (
        r"_standard_gamma|_dirichlet",
        "samples of Gamma and Dirichlet have a first derivative, in reverse mode only",
    )
    ORDER_OF_FUNCTION = (
        r"derivative for '(igammac?: input|zeta)'",
        "incomplete gamma and zeta functions have no derivative by their first argument",
    )
    EMBEDDING_BAG = (
        r"derivative for '_embedding_bag_backward'|forward AD with _embedding_bag",
        "bags of embeddings have a first derivative, in reverse mode only",
    )
    FORWARD_MODE = (r"forward[- ](mode )?AD", "it is forward mode that fails, for whatever reason")
    NESTED_DUAL_LEVELS = (
        r"Nested forward mode AD",
        "forward mode by torch.autograd.forward_ad is nested, which only torch.func supports",
    )

    NO_GRAPH = (
        r"(element \d+ of|differentiated) tensors does not require grad",
        "a gradient is taken where none is recorded",
    )
    NOT_IN_GRAPH = (r"not have been used in the graph", "a gradient is taken by a tensor that the graph does not have")

    HIGHER_ORDER = (
        r"higher order operator doesn't work|TransformType\.|Expected FakeTensor, got",
        "an operator that takes functions, such as torch.cond, is inside a transform",
    )

    # Functions with a missing part.
    REENTRANT_CHECKPOINT = (
        r"checkpoint is incompatible with \.grad\(\)",
        "a checkpoint with use_reentrant=True supports backward only",
    )
    ONCE_DIFFERENTIABLE = (r"once_differentiable", "its gradient is marked as a constant to further derivatives")
    NO_SETUP_CONTEXT = (r"must override the setup_context", "torch.func needs forward without ctx")
    NO_RULE = (r"must implement (the jvp|either the backward or vjp)", "it has no rule for this mode")
    NO_JVP = (r"jvp function", "its rule for forward mode is missing, or does not fit what forward does")
    NO_VMAP = (r"vmap support", "it has none for batches")
    NO_JVP_IN_BATCH = (r"flat_bdims must not be None", "its generated rule for batches finds no tensors for its jvp")
    TWO_VMAPS = (r"both generate_vmap_rule=True and", "it has two rules for batches, and torch takes neither")

    # Batches.
    BATCHING = (r"vmap|batching rule|batched|maybe_level\.has_value", "batches are the matter, for whatever reason")
    NO_BATCHING_RULE = (r"batching rule|vmap: we do not yet support", "an operator cannot be batched")
    READS_BATCHED = (
        r"data-dependent control flow|vmap over calling \.item\(\)",
        "code reads the number in a tensor that represents a batch",
    )
    CHANGES_UNBATCHED = (
        r"not possible because there exists a Tensor",
        "a batch would be written into a tensor that has none",
    )
    RANDOM = (r"randomness error mode", "random numbers under vmap, which needs randomness='same' or 'different'")

    # Unsupported tensors.
    SPARSE = (
        r"Sparse \w+ tensors do not have|unsupported for Sparse\w* tensors|expected sparse coordinate tensor layout",
        "a sparse tensor comes where torch only knows dense ones, or only some sparse ones",
    )
    JAGGED = (
        r"'NestedIntNode' object has no attribute|relation is indeterminate|cannot view shape \(.*\bj\d+"
        r"|_nested_from_padded_tensor' is not differentiable with respect to"
        # These parts are of torch 2.11 and 2.12.
        r"|dispatch_on_subclass called with NO overloaded args|numel\(\) on tensor with symbolic sizes"
        r"|NestedTensor does not support directly calling",
        "a transform, a batch or a second derivative meets a jagged nested tensor",
    )
    VIEW_WITHOUT_GRAD = (
        r"A view was created in no_grad mode and is being modified inplace",
        "a view that was made without a graph is written to, as torch's second derivatives of nested tensors do",
    )
    INFERENCE_TENSOR = (r"Inference tensors cannot be saved", "a tensor made in inference mode is part of the graph")
    REQUIRES_GRAD_INSIDE = (
        r"attempting to call Tensor\.requires_grad_\(\)",
        "code inside of a transform starts a separate graph",
    )
    NO_HOOK = (r"cannot register a hook on a tensor that doesn't require gradient", "forward mode records no graph")
    MIXED_WITH_DTENSORS = (r"got mixed torch\.Tensor and DTensor", "an operator gets a DTensor and an ordinary tensor")
    CHANGES_CAPTURED = (r"mutate a captured Tensor", "torch.func refuses to change what it has not been given")
    NO_NUMBERS = (
        r"Cannot access data pointer|Can't call numpy|numpy\(\) is not supported",
        "a transform or a graph hides the numbers",
    )
    CHANGED_IN_PLACE = (r"modified by an inplace operation", "what a graph keeps is not any more what it was")
    FREED_GRAPH = (
        r"backward through the graph a second time",
        "a graph is pulled back whose tensors were freed before",
    )
    CHANGES_ZERO = (r"ZeroTensors are immutable", "an operator in place meets a tangent that is zero, without memory")
    OTHER_DEVICE = (r"same device|expected device", "tensors of two devices meet")
    NO_NUMBERS_TO_COPY = (r"out of meta tensor", "a copy from a device without numbers")

    WRAPPER_WITHOUT_MEMORY = (
        r"set the storage of a tensor on device",
        "forward mode meets a subclass of Tensor that wraps other tensors",
    )

    COMPILED_GRADIENT = (
        r"aot_autograd does not currently support double backward",
        "a graph of compiled code, whose gradient has no derivative",
    )
    DONATED_BUFFERS = (
        r"compiled with non-empty donated buffers",
        "a second pass through compiled code, whose first one gave its memory away",
    )

    # Warnings about torch's own internals.
    BATCHES_BY_LOOP = (r"performance drop", "an operator without a batching rule runs in a loop, slow and right")
    OUTPUT_RESIZED = (r"An output with one or more elements was resized", "that loop writes into another shape")
    TORCHSCRIPT = (r"torch\.jit\.script", "rules of forward mode are loaded by a deprecated helper, on first use")
    FUNCTION_MADE = (r"should not be instantiated", "dynamo makes an instance of a Function while it traces")

    def __init__(self, pattern: str, meaning: str):
        self.pattern = f"(?i:{pattern})"
        self.meaning = meaning


# Messages that a derivative does not exist by some route, as opposed to a mistake in the user's function.
UNAVAILABLE = (
    Wording.NOT_IMPLEMENTED,
    Wording.NOT_SUPPORTED,
    Wording.NO_AUTOGRAD_FORMULA,
    Wording.ONCE_DIFFERENTIABLE,
    Wording.NO_SETUP_CONTEXT,
    Wording.NO_RULE,
    Wording.NO_VMAP,
    Wording.NO_BATCHING_RULE,
    Wording.CHANGES_UNBATCHED,
    Wording.CHANGES_ZERO,
    Wording.SPARSE,
    Wording.JAGGED,
    Wording.VIEW_WITHOUT_GRAD,
    Wording.WRAPPER_WITHOUT_MEMORY,
    Wording.HIGHER_ORDER,
)
# The context in which a user calls compiled code to get a graph with all derivatives.
EAGER_STANCE = 'with torch.compiler.set_stance("force_eager"):'
# Warnings that could be mistaken for defects of the running code.
OF_TORCH_ITSELF = (Wording.BATCHES_BY_LOOP, Wording.OUTPUT_RESIZED, Wording.TORCHSCRIPT, Wording.FUNCTION_MADE)


def pattern_of(*wordings: Wording) -> str:
    """Return a regular expression that matches any of the messages."""
    return "|".join(each.pattern for each in wordings)


def says(said: object, *wordings: Wording) -> bool:
    """Whether an exception or a text contains any of the messages."""
    return re.search(pattern_of(*wordings), str(said)) is not None
