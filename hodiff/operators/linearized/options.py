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
            "Batches to sum over: a list, a DataLoader, any iterable that yields the same batches on each walk. "
            "Each goes to the function as it comes, tensor, tuple or dict, after `args`; to a model and a loss "
            "instead of `args`, as a pair of inputs and targets or as a whole.",
        ),
        require_data,
    ]
    reduction: Annotated[
        str,
        Default(
            "mean",
            'What the function or loss does over the examples of a batch. "mean": batches are weighted by their '
            'number of examples, so that a smaller last one counts less; "sum": they are added.',
        ),
        require_reduction,
    ]
    batch_size: Annotated[
        Callable[[PyTree], int] | None,
        Default(
            None,
            "Tells how many examples a batch holds; by default what a loss of torch divides its mean by, such as the "
            "labels that it does not ignore, where an operator has such a loss, and else the length of the batch's "
            "first tensor.",
        ),
        require_batch_size,
    ]
    compile: Annotated[
        bool | str,
        Default(
            False,
            "Whether to capture the linearized product as one graph and compile it with `torch.compile`. The "
            "first product takes seconds and is compared with the eager one; where they disagree, or the function "
            "cannot be captured, a warning says so and products stay eager. `at` uses the graph again, with the "
            "tensors that the function then closes over; other numbers or modes make another, as in "
            '`hodiff.compile_gradient`. "dynamic" leaves the size of batches open, which is the first dimension of '
            "what follows the point: another size takes no other graph where the function allows it, and its first "
            "product is compared with the eager one, too.",
        ),
        partial(require_choice, choices=(True, False, "dynamic")),
    ]
    process_group: Annotated[
        Any,
        Default(
            None,
            "Sum over the ranks of this `torch.distributed` group, each with its own `data`, which may be empty, "
            "and with the same `x` and `v`.",
        ),
        require_group,
    ]
    cache: Annotated[
        bool | str,
        Default(
            "auto",
            'Whether linearizations of batches are kept for the next product: "auto" as many as `memory_budget` '
            "allows, True all, False none. Without data the one linearization is always kept.",
        ),
        partial(require_choice, choices=(True, False, "auto")),
    ]
    memory_budget: Annotated[
        int,
        Default(
            2**30,
            "Bytes, 1 GiB by default; linearizations are counted by the size of their intermediate results.",
        ),
        partial(require_int, least=0, remedy="it counts bytes"),
    ]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'Columns of a block that are multiplied together: a positive int, None for all, or "auto" for as many '
            "as keep intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    check_deterministic: Annotated[
        bool,
        Default(
            True,
            "Whether the first use evaluates the function twice on a batch and refuses one that differs, naming "
            "dropout, batch norm or other state as the cause; batches that are not kept are compared from pass to "
            "pass.",
        ),
        require_bool,
    ]
    randomness: Annotated[
        str,
        Default(
            "error",
            'What random numbers in a function mean: "error", or "fixed" for the curvature of one draw, such as of the '
            "dropout masks of training mode: each batch has its own, the same in all products and at all points. The "
            "operator draws a seed when it is made, and leaves torch's generators otherwise as they are.",
        ),
        partial(require_choice, choices=("error", "fixed")),
    ]
    progress: Annotated[
        bool,
        Default(
            False,
            "Whether each pass over the data shows a progress bar.",
        ),
        require_bool,
    ]
    correct: Annotated[
        bool,
        Default(
            True,
            "Whether hodiff's rules take the place of torch's where those are wrong or missing, as in `hodiff.hvp`.",
        ),
        require_bool,
    ]
