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
            'Which gradients B is made of. "exact": columns of the square root of the loss\'s Hessian in the outputs '
            "(of the Fisher information, where the outputs are probabilities or their logarithms), one pull each; "
            '"monte-carlo": gradients for targets drawn from what the model predicts, as many pulls as `samples`; '
            '"empirical": gradients for the given targets, one pull.',
        ),
        partial(require_choice, choices=(EXACT, MONTE_CARLO, EMPIRICAL)),
    ]
    samples: Annotated[
        int | None,
        Default(None, 'How many targets "monte-carlo" draws for each output; 1 by default.'),
        partial(require_int, least=1, optional=True),
    ]
    likelihood: Annotated[
        Likelihood | None,
        Default(None, 'For "monte-carlo", the distribution of another loss than torch\'s.'),
        _require_likelihood,
    ]
    generator: Annotated[
        torch.Generator | None,
        Default(None, "Where the drawn targets come from; None for a generator seeded with 0."),
        require_generator,
    ]
    sharing: Annotated[
        str,
        Default(
            EXPAND,
            "What becomes of the places that share a layer's weights, such as tokens, pixels, or repeated calls: "
            '"expand" takes each for an example of its own, "reduce" averages inputs and adds gradients up over them '
            "first.",
        ),
        partial(require_choice, choices=(EXPAND, REDUCE)),
    ]
    bias: Annotated[
        str,
        Default(
            JOINED,
            'Whether a layer\'s weight and bias are one block ("joined": inputs get a last element 1), or two '
            '("separate").',
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
            "Batches to sum over, instead of `args`: a list, a DataLoader, any iterable that yields the same batches "
            "on each walk, pairs of inputs and targets or batches that go to both functions as a whole.",
        ),
        require_data,
    ]
    reduction: Annotated[
        str,
        Default("mean", 'What the loss does over the examples of a batch, "mean" or "sum", as for other operators.'),
        require_reduction,
    ]
    batch_size: Annotated[
        Callable[[PyTree], int] | None,
        Default(None, "Tells what a batch's mean is divided by, where the loss is none of torch's."),
        require_batch_size,
    ]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'Gradients that are pulled back together: a positive int, None for all, or "auto" for as many as keep '
            "them within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    check: Annotated[
        bool,
        Default(
            True,
            "Whether the first batch is evaluated twice, to refuse a model that differs, and gradients of the "
            "parameters are compared with those that the layers' inputs and outputs tell, to refuse one that uses "
            "a parameter elsewhere.",
        ),
        require_bool,
    ]
    progress: Annotated[
        bool,
        Default(False, "Whether each pass over the data shows a progress bar."),
        require_bool,
    ]
    correct: Annotated[
        bool,
        Default(True, "Whether hodiff's rules take the place of torch's where those are wrong or missing."),
        require_bool,
    ]
