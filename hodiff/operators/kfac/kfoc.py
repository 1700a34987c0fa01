"""KFOC, the nearest Kronecker products to the layers' blocks, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from hodiff.common.options import require_amount, require_int
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.operators.kfac.blocks import Block, KroneckerBlock
from hodiff.operators.kfac.example_factors import ExampleFactors
from hodiff.operators.kfac.layers import Source
from hodiff.operators.linearized.likelihoods import Likelihood


class KFOCOperator(ExampleFactors):
    r"""Kronecker-factored optimal curvature, KFOC: the nearest Kronecker product to each layer's block.

    With $G_n$ the gradients of a weight in each example, for each column of the loss's root, as in
    `hodiff.operators.EKFACOperator`,

    $$ F = \sum_n \operatorname{vec} G_n \operatorname{vec} G_n^\top, \qquad
       \min_{A, B} \|F - B \otimes A\|_F $$

    The minimum is the largest singular pair of F with its numbers rearranged to a matrix $(p^2, q^2)$. The power
    method computes it, with one pass over the data for each iteration:

    $$ B \leftarrow \frac{\sum_n G_n A\, G_n^\top}{\|\cdot\|_F}, \qquad
       A \leftarrow \frac{\sum_n G_n^\top B\, G_n}{\|\cdot\|_F} $$

    Both factors stay positive semi-definite. The block of a vector is exact. The A of an embedding is diagonal, and
    the product is the nearest of these. The inputs of every layer must have examples along their first dimension.

    Args:
        model: As in `hodiff.KFACOperator`.
        loss: As in `hodiff.KFACOperator`.
        x: As in `hodiff.KFACOperator`.
        *args: As in `hodiff.KFACOperator`.
        fisher: "exact", "monte-carlo" or "empirical"; `hodiff.KFACOperator` explains this and the further options.
        samples: Number of targets that "monte-carlo" draws for each output; 1 by default.
        likelihood: Distribution of the targets for "monte-carlo", required if the loss is not one of torch's.
        generator: Generator of the drawn targets; by default a generator seeded with 0.
        bias: Whether a layer's weight and bias are one block, "joined", or two, "separate".
        norm: Blocks of normalization layers, "full" or "diagonal".
        iterations: Largest number of passes over the data.
        tolerance: Relative change of the factors at which the power method stops; 1e-5 by default.
        data: Batches to sum over, instead of `args`.
        reduction: Reduction of the loss over the examples of a batch, "mean" or "sum".
        batch_size: Function that returns the divisor of a batch's mean, for losses that are not torch's.
        chunk_size: Number of gradients that are pulled back together: a positive int, None for all, or "auto".
        check: Whether to refuse models that are not deterministic, or use a parameter outside its layer.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.
        process_group: Process group whose ranks each have a part of the `data`, also for sharded parameters.

    Attributes:
        blocks: Each block, with its factors `A` (groups, q, q) and `B` (groups, p, p), or diagonals.

    Raises:
        InputError: As for `hodiff.KFACOperator`.
        HodiffWarning: As a warning, if factors change by more than the tolerance in the last pass.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> x = {"0.weight": model[0].weight}
        >>> problem = model, torch.nn.functional.cross_entropy, x, torch.randn(8, 3), torch.randint(2, (8,))
        >>> exact = hodiff.GaussNewtonOperator(*problem).to_dense()
        >>> kinds = hodiff.operators.KFOCOperator, hodiff.KFACOperator
        >>> errors = [(kind(*problem).to_dense() - exact).norm() for kind in kinds]
        >>> bool(errors[0] < errors[1])
        True

    Source: D. Schnaus, J. Lee & R. Triebel, "Kronecker-factored optimal curvature", Bayesian Deep Learning workshop,
    NeurIPS 2021; A. Koroko et al., "Efficient approximations of the Fisher matrix in neural networks using Kronecker
    product singular value decomposition", 2022; C. Van Loan & N. Pitsianis, "Approximation with Kronecker products",
    1993.
    """

    @leave_inference_mode
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        x: PyTree,
        *args: Any,
        fisher: str = "exact",
        samples: int | None = None,
        likelihood: Likelihood | None = None,
        generator: torch.Generator | None = None,
        bias: str = "joined",
        norm: str = "full",
        iterations: int = 100,
        tolerance: float = 1e-5,
        data: Iterable[PyTree] | None = None,
        reduction: str = "mean",
        batch_size: Callable[[PyTree], int] | None = None,
        chunk_size: int | str | None = "auto",
        check: bool = True,
        progress: bool = False,
        correct: bool = True,
        process_group: Any = None,
    ):
        require_int("KFOCOperator", "iterations", iterations, 1)
        require_amount("KFOCOperator", "tolerance", tolerance)
        self.iterations, self.tolerance = iterations, tolerance
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
        with torch.no_grad(), refused("KFOCOperator"):
            units = {source: self._identities(source) for source in self._all_sources}
            for _ in range(self.iterations):
                before, sums = units, self._second_moments(units)
                units = {source: (_unit(left), _unit(right)) for source, (left, right) in sums.items()}
                pairs = zip(before.values(), units.values(), strict=True)
                change = max(float((b - a).norm()) for old, new in pairs for a, b in zip(old, new, strict=True))
                if change <= self.tolerance:
                    break
            else:
                warn(
                    f"KFOCOperator: factors changed by {change:.1g} in pass {self.iterations}, more than the tolerance "
                    f"{self.tolerance:g}; pass a larger iterations= or tolerance=.",
                    HodiffWarning,
                    levels_to_the_caller(),
                )
            # For a unit A, the first sum is the nearest B.
            blocks = [KroneckerBlock(source.layout, before[source][1], sums[source][0]) for source in sums]
            return tuple(compress(blocks, self._joint.owned([each.layout for each in blocks])))

    def _identities(self, source: Source) -> tuple[Tensor, Tensor]:
        """Return multiples of the identity of unit norm for B and A."""
        shapes = (each.shape for each in self._empty(source))
        ones = (
            torch.ones(shape[:2], dtype=self.dtype, device=self.device).diag_embed()
            if len(shape) == 3
            else torch.ones(shape, dtype=self.dtype, device=self.device)
            for shape in shapes
        )
        left, right = map(_unit, ones)
        return left, right


def _unit(factor: Tensor) -> Tensor:
    """Divide the matrices of a factor by their Frobenius norms; zeros stay zeros."""
    norms = torch.linalg.vector_norm(factor.flatten(1), dim=1).view(-1, *[1] * (factor.dim() - 1))
    return torch.where(norms > 0, factor / norms, factor)
