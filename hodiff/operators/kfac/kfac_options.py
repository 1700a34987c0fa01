"""The options of the Kronecker-factored operators, with their types, defaults, explanations and validators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, TypedDict

import torch

from hodiff.common.chunks import require_chunk_size
from hodiff.common.keyword_options import Default
from hodiff.common.options import require_bool, require_choice, require_generator, require_int
from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.operators.data.batches import require_batch_size, require_data, require_reduction
from hodiff.operators.linearized.likelihoods import Likelihood

EXACT, MONTE_CARLO, EMPIRICAL = "exact", "monte-carlo", "empirical"
EXPAND, REDUCE = "expand", "reduce"
JOINED, SEPARATE = "joined", "separate"
FULL, DIAGONAL = "full", "diagonal"


def _require_likelihood(caller: str, argument: str, value: Any) -> None:
    if value is not None and not isinstance(value, Likelihood):
        raise InputError(
            f"{caller}: {argument}: expected a hodiff.operators.Likelihood or None, got {describe(value)}; it tells "
            "how targets of a loss of your own are drawn."
        )


class KroneckerOptions(TypedDict, total=False):
    """Options of the Kronecker-factored operators: the approximated matrix, the method and the data."""

    fisher: Annotated[
        str,
        Default(
            EXACT,
            'Gradients that B averages. "exact": columns of the square root of the loss\'s Hessian in the outputs '
            "(or of the Fisher information, if the outputs are probabilities or their logarithms), one pullback "
            'for each column; "monte-carlo": gradients for targets drawn from the model\'s prediction, `samples` '
            'pullbacks; "empirical": gradients for the given targets, one pullback.',
        ),
        partial(require_choice, choices=(EXACT, MONTE_CARLO, EMPIRICAL)),
    ]
    samples: Annotated[
        int | None,
        Default(None, 'Number of targets that "monte-carlo" draws for each output; 1 by default.'),
        partial(require_int, least=1, optional=True),
    ]
    likelihood: Annotated[
        Likelihood | None,
        Default(None, 'Distribution of the targets for "monte-carlo", required if the loss is not one of torch\'s.'),
        _require_likelihood,
    ]
    generator: Annotated[
        torch.Generator | None,
        Default(None, "Generator of the drawn targets; by default a generator seeded with 0."),
        require_generator,
    ]
    sharing: Annotated[
        str,
        Default(
            EXPAND,
            "Treatment of positions that share a layer's weights, such as tokens, pixels or repeated calls: "
            '"expand" treats each position as an example of its own, "reduce" first averages inputs and sums '
            "gradients over the positions.",
        ),
        partial(require_choice, choices=(EXPAND, REDUCE)),
    ]
    bias: Annotated[
        str,
        Default(
            JOINED,
            '"joined": a layer\'s weight and bias are one block (the inputs get a last element 1); "separate": '
            "they are two blocks.",
        ),
        partial(require_choice, choices=(JOINED, SEPARATE)),
    ]
    norm: Annotated[
        str,
        Default(
            FULL,
            'Blocks of normalization layers, which have no Kronecker structure: "full" is the exact block of their '
            'parameters, "diagonal" its diagonal.',
        ),
        partial(require_choice, choices=(FULL, DIAGONAL)),
    ]
    data: Annotated[
        Iterable[PyTree] | None,
        Default(
            None,
            "Batches to sum over, instead of `args`: a list, a DataLoader or any iterable that yields the same "
            "batches in each pass. A batch is a pair of inputs and targets, or an object that is passed to both "
            "functions as a whole.",
        ),
        require_data,
    ]
    reduction: Annotated[
        str,
        Default("mean", 'Reduction of the loss over the examples of a batch, "mean" or "sum", as for other operators.'),
        require_reduction,
    ]
    batch_size: Annotated[
        Callable[[PyTree], int] | None,
        Default(None, "Function that returns the divisor of a batch's mean, for losses that are not torch's."),
        require_batch_size,
    ]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'Number of gradients that are pulled back together: a positive int, None for all, or "auto" for as '
            "many as keep them within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    check: Annotated[
        bool,
        Default(
            True,
            "Whether to evaluate the first batch twice, to refuse a model that is not deterministic, and to "
            "compare the gradients of the parameters with those computed from the layers' inputs and outputs, to "
            "refuse a model that uses a parameter outside its layer.",
        ),
        require_bool,
    ]
    progress: Annotated[
        bool,
        Default(False, "Whether to show a progress bar for each pass over the data."),
        require_bool,
    ]
    correct: Annotated[
        bool,
        Default(True, "Whether hodiff's rules replace torch's wrong and missing ones."),
        require_bool,
    ]
