"""The options of all operators at a point, with their types, defaults, explanations and validators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, TypedDict

from hodiff.common.chunks import require_chunk_size
from hodiff.common.keyword_options import Default
from hodiff.common.options import require_bool, require_choice, require_int
from hodiff.common.trees import PyTree
from hodiff.operators.data.batches import require_batch_size, require_data, require_reduction
from hodiff.operators.data.distributed import require_group


class CurvatureOptions(TypedDict, total=False):
    """Options that do not depend on the kind of operator."""

    data: Annotated[
        Iterable[PyTree] | None,
        Default(
            None,
            "Batches to sum over: a list, a DataLoader or any iterable that yields the same batches in each pass."
            " A batch (tensor, tuple or dict) is passed to the function unchanged, after `args`; with a model and"
            " a loss it replaces `args`, as a pair of inputs and targets or as a whole.",
        ),
        require_data,
    ]
    reduction: Annotated[
        str,
        Default(
            "mean",
            'Reduction of the function or loss over the examples of a batch. "mean": batches are weighted by '
            'their number of examples, so that a smaller last batch counts less; "sum": batches are added.',
        ),
        require_reduction,
    ]
    batch_size: Annotated[
        Callable[[PyTree], int] | None,
        Default(
            None,
            "Function that returns the number of examples in a batch. By default, the divisor of the mean in "
            "torch's loss, which excludes ignored labels, if the operator has such a loss; else the length of the"
            " batch's first tensor.",
        ),
        require_batch_size,
    ]
    compile: Annotated[
        bool | str,
        Default(
            False,
            "Whether to capture the linearized product as one graph and compile it with `torch.compile`. The "
            "first product takes seconds and is compared with the eager product; if they disagree, or the "
            "function cannot be captured, hodiff warns and products run eagerly. `at` reuses the graph, with the "
            "tensors that the function then closes over; other numbers or modes compile another graph, with "
            'the exceptions that `hodiff.compile_gradient` lists. "dynamic" leaves the batch size open, which is the '
            "first dimension of the arguments after the point: another size reuses the graph if the function allows "
            "it, and its first product is compared with the eager product, too.",
        ),
        partial(require_choice, choices=(True, False, "dynamic")),
    ]
    process_group: Annotated[
        Any,
        Default(
            None,
            "Process group of `torch.distributed` over whose ranks the operator is summed. Each rank has its own "
            "`data`, which may be empty, and the same `x` and `v`.",
        ),
        require_group,
    ]
    cache: Annotated[
        bool | str,
        Default(
            "auto",
            'Whether to keep the linearizations of batches for the next product: "auto" keeps as many as '
            "`memory_budget` allows, True all, False none. Without data the single linearization is always kept.",
        ),
        partial(require_choice, choices=(True, False, "auto")),
    ]
    memory_budget: Annotated[
        int,
        Default(
            2**30,
            "Memory for kept linearizations in bytes, 1 GiB by default; a linearization counts with the size of "
            "its intermediate results.",
        ),
        partial(require_int, least=0, remedy="it counts bytes"),
    ]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'Number of columns of a block that are multiplied together: a positive int, None for all, or "auto" '
            "for as many as keep intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    check_deterministic: Annotated[
        bool,
        Default(
            True,
            "Whether to evaluate the function twice on a batch at the first use, and to refuse a function whose "
            "values differ; the error names dropout, batch norm or other state as the cause. Batches that are not"
            " kept are compared from pass to pass.",
        ),
        require_bool,
    ]
    randomness: Annotated[
        str,
        Default(
            "error",
            'Treatment of random numbers in the function: "error", or "fixed" for the curvature of one draw, such'
            " as of the dropout masks in training mode. Each batch has its own draw, which is the same in all "
            "products and at all points. The operator draws a seed when it is constructed, and otherwise leaves "
            "torch's generators unchanged.",
        ),
        partial(require_choice, choices=("error", "fixed")),
    ]
    progress: Annotated[
        bool,
        Default(
            False,
            "Whether to show a progress bar for each pass over the data.",
        ),
        require_bool,
    ]
    correct: Annotated[
        bool,
        Default(
            True,
            "Whether hodiff's rules replace torch's wrong and missing ones, as in `hodiff.hvp`.",
        ),
        require_bool,
    ]
