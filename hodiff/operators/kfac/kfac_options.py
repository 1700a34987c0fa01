"""The options of the Kronecker-factored operators, validated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hodiff.common.options import require_bools, require_choice, require_chunk_size, require_generator, require_int
from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.operators.data.batches import require_batch_size, require_data, require_reduction
from hodiff.operators.linearized.likelihoods import Likelihood

EXACT, MONTE_CARLO, EMPIRICAL = "exact", "monte-carlo", "empirical"
EXPAND, REDUCE = "expand", "reduce"
JOINED, SEPARATE = "joined", "separate"
FULL, DIAGONAL = "full", "diagonal"


@dataclass(frozen=True)
class KroneckerOptions:
    """Options of the Kronecker-factored operators; `hodiff.KFACOperator` explains them.

    Args:
        caller: Name of the operator in messages.
    """

    caller: str
    fisher: str
    samples: int | None
    likelihood: Likelihood | None
    generator: torch.Generator | None
    sharing: str
    bias: str
    norm: str
    data: Iterable[PyTree] | None
    reduction: str
    batch_size: Callable[[PyTree], int] | None
    chunk_size: int | str | None
    check: bool
    progress: bool
    correct: bool

    def __post_init__(self) -> None:
        require_choice(self.caller, "fisher", self.fisher, (EXACT, MONTE_CARLO, EMPIRICAL))
        require_int(self.caller, "samples", self.samples, 1, optional=True)
        if self.likelihood is not None and not isinstance(self.likelihood, Likelihood):
            raise InputError(
                f"{self.caller}: likelihood: expected a hodiff.operators.Likelihood or None, got "
                f"{describe(self.likelihood)}; it defines how to sample targets of your own loss."
            )
        require_generator(self.caller, "generator", self.generator)
        require_choice(self.caller, "sharing", self.sharing, (EXPAND, REDUCE))
        require_choice(self.caller, "bias", self.bias, (JOINED, SEPARATE))
        require_choice(self.caller, "norm", self.norm, (FULL, DIAGONAL))
        require_data(self.caller, "data", self.data)
        require_reduction(self.caller, self.reduction)
        require_batch_size(self.caller, "batch_size", self.batch_size)
        require_chunk_size(self.caller, "chunk_size", self.chunk_size)
        require_bools(self.caller, check=self.check, progress=self.progress, correct=self.correct)
