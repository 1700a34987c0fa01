"""Shampoo's approximation of the second moment of gradients, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.operators.kfac.blocks import Block, KroneckerBlock, spectrum
from hodiff.operators.kfac.example_factors import ExampleFactors
from hodiff.operators.kfac.layers import Source
from hodiff.operators.linearized.likelihoods import Likelihood


class ShampooOperator(ExampleFactors):
    r"""Shampoo's matrix: a Kronecker product of roots of second moments for each weight.

    With $G_n$ the gradients of a weight (p, q) in each example, for each column of the loss's root, as in
    `hodiff.operators.EKFACOperator`, and R a diagonal for embeddings,

    $$ F = \sum_n \operatorname{vec} G_n \operatorname{vec} G_n^\top \approx L^{1/2} \otimes R^{1/2}, \qquad
       L = \sum_n G_n G_n^\top, \quad R = \sum_n G_n^\top G_n $$

    with the scale of `hodiff.EmpiricalFisherOperator` for the given targets. Multiplied by the largest rank of the
    $G_n$, it is an upper bound of F. Its inverse root is the preconditioner of `hodiff.optim.Shampoo`, which uses the
    gradients of batches instead of examples. The block of a vector, such as a bias or a weight with p = 1 or q = 1, is
    exact. The factors take one pass over the data. The inputs of every layer must have examples along their first
    dimension. `hodiff.operators.KFOCOperator` has the nearest Kronecker products.

    Args:
        model: As in `hodiff.KFACOperator`.
        loss: As in `hodiff.KFACOperator`.
        x: As in `hodiff.KFACOperator`.
        *args: As in `hodiff.KFACOperator`.
        fisher: "empirical", for gradients of the given targets, "exact" or "monte-carlo"; `hodiff.KFACOperator`
            explains this and the further options.
        samples: Number of targets that "monte-carlo" draws for each output; 1 by default.
        likelihood: Distribution of the targets for "monte-carlo", required if the loss is not one of torch's.
        generator: Generator of the drawn targets; by default a generator seeded with 0.
        bias: Whether a layer's weight and bias are two blocks, "separate", or one, "joined".
        norm: Blocks of normalization layers, "full" or "diagonal".
        data: Batches to sum over, instead of `args`.
        reduction: Reduction of the loss over the examples of a batch, "mean" or "sum".
        batch_size: Function that returns the divisor of a batch's mean, for losses that are not torch's.
        chunk_size: Number of gradients that are pulled back together: a positive int, None for all, or "auto".
        check: Whether to refuse models that are not deterministic, or use a parameter outside its layer.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.
        process_group: Process group whose ranks each have a part of the `data`, also for sharded parameters.

    Attributes:
        blocks: Each block, with its factors `A` $= R^{1/2}$ (groups, q, q) and `B` $= L^{1/2}$ (groups, p, p), or
            diagonals.

    Raises:
        InputError: As for `hodiff.KFACOperator`.

    Example:
        >>> import torch, hodiff
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> x, inputs, targets = {"weight": torch.eye(2)}, torch.diag(torch.tensor([2.0, 1.0])), torch.zeros(2, 2)
        >>> loss = lambda outputs, targets: (outputs - targets).square().sum() / 2
        >>> A = hodiff.operators.ShampooOperator(layer, loss, x, inputs, targets, reduction="sum")
        >>> A.blocks[0].A, A.diagonal().value  # the gradients are diag(4, 0) and diag(0, 1)
        (tensor([[[4., 0.],
                 [0., 1.]]]), tensor([16.,  4.,  4.,  1.]))

    Source: V. Gupta, T. Koren & Y. Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018, lemma 8
    and theorem 7.
    """

    @leave_inference_mode
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        x: PyTree,
        *args: Any,
        fisher: str = "empirical",
        samples: int | None = None,
        likelihood: Likelihood | None = None,
        generator: torch.Generator | None = None,
        bias: str = "separate",
        norm: str = "full",
        data: Iterable[PyTree] | None = None,
        reduction: str = "mean",
        batch_size: Callable[[PyTree], int] | None = None,
        chunk_size: int | str | None = "auto",
        check: bool = True,
        progress: bool = False,
        correct: bool = True,
        process_group: Any = None,
    ):
        super().__init__(
            model,
            loss,
            x,
            *args,
            fisher=fisher,
            samples=samples,
            likelihood=likelihood,
            generator=generator,
            bias=bias,
            norm=norm,
            data=data,
            reduction=reduction,
            batch_size=batch_size,
            chunk_size=chunk_size,
            check=check,
            progress=progress,
            correct=correct,
            process_group=process_group,
        )

    @leave_inference_mode
    def _compute(self) -> tuple[Block, ...]:
        with torch.no_grad(), refused(type(self).__name__):
            pairs = self._second_moments(dict.fromkeys(self._all_sources, (None, None)))
            owned = self._joint.owned([source.layout for source in pairs])
            return tuple(_block(source, *pair) for source, pair in compress(pairs.items(), owned))


def _block(source: Source, left: Tensor, right: Tensor) -> KroneckerBlock:
    _, p, q = source.layout.shape
    # The second moment of vectors needs no approximation.
    if q == 1:
        return KroneckerBlock(source.layout, torch.ones_like(right), left)
    if p == 1:
        return KroneckerBlock(source.layout, right, torch.ones_like(left))
    return KroneckerBlock(source.layout, _root(right), _root(left))


def _root(moments: Tensor) -> Tensor:
    """Compute the square root of a factor; rounding errors of eigenvalues 0 do not become eigenvalues."""
    values, vectors = spectrum(moments)
    noise = values.shape[1] * torch.finfo(values.dtype).eps * values.amax(1, keepdim=True)
    roots = values.sqrt().masked_fill_(values <= noise, 0.0)
    return roots if vectors is None else (vectors * roots[:, None]) @ vectors.mT
