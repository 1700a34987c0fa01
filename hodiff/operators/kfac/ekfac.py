"""EKFAC, K-FAC with corrected eigenvalues, as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch

from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.operators.data.batches import Size
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import Block, EigenBlock, KroneckerBlock
from hodiff.operators.kfac.kfac import KFACOperator
from hodiff.operators.kfac.layers import Source


class EKFACOperator(KFACOperator):
    r"""K-FAC with corrected eigenvalues, EKFAC: the best diagonal in the eigenvectors of K-FAC's blocks.

    With $A = Q_A \Lambda_A Q_A^\top$ and $B = Q_B \Lambda_B Q_B^\top$ the factors of `hodiff.KFACOperator`, and
    $G_n = \sum_r g_{nr} a_{nr}^\top$ the gradients of the weight in each example, for each column of the loss's root,

    $$ F \approx (Q_B \otimes Q_A) \operatorname{diag}(\Lambda) (Q_B \otimes Q_A)^\top, \qquad
       \Lambda_{ij} = \sum_n \big(Q_B^\top G_n Q_A\big)_{ij}^2 $$

    Of all matrices with these eigenvectors it is nearest to the exact block F in the Frobenius norm, so at least as
    near as K-FAC. It needs a second pass over the data. The inputs of every layer must have examples along their first
    dimension.

    Args:
        model: As in `hodiff.KFACOperator`.
        loss: As in `hodiff.KFACOperator`.
        x: As in `hodiff.KFACOperator`.
        *args: As in `hodiff.KFACOperator`.
        fisher: "exact", "monte-carlo" or "empirical"; `hodiff.KFACOperator` explains this and the further options.
        samples: Number of targets that "monte-carlo" draws for each output; 1 by default.
        likelihood: Distribution of the targets for "monte-carlo", required if the loss is not one of torch's.
        generator: Generator of the drawn targets; by default a generator seeded with 0.
        sharing: Treatment of positions that share a layer's weights in A and B, "expand" or "reduce".
        bias: Whether a layer's weight and bias are one block, "joined", or two, "separate".
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
        blocks: Each layer's block, with eigenvectors `left` $Q_B$ and `right` $Q_A$ (None for the identity), and
            `values` (groups, p, q).

    Raises:
        InputError: As for `hodiff.KFACOperator`.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> x = dict(model.named_parameters())
        >>> problem = model, torch.nn.functional.cross_entropy, x, torch.randn(8, 3), torch.randint(2, (8,))
        >>> exact = hodiff.GaussNewtonOperator(*problem)
        >>> traces = hodiff.EKFACOperator(*problem).trace().value, exact.to_dense().trace().item()
        >>> abs(traces[0] - traces[1]) < 1e-6 * traces[1]  # as the diagonal of each block is, in its eigenvectors
        True

    Source: T. George, C. Laurent, X. Bouthillier, N. Ballas & P. Vincent, "Fast approximate natural gradient descent in
    a Kronecker-factored eigenbasis", NeurIPS 2018, section 3.
    """

    evaluates_once = False

    @leave_inference_mode
    def _compute(self) -> tuple[Block, ...]:
        with torch.no_grad(), refused(type(self).__name__):
            bases = dict(zip(self._all_sources, self._bases(self._factors()), strict=True))
            values = {source: torch.zeros_like(basis.values) for source, basis in bases.items()}
            sizes = Size()
            for batch, recorded in self._recorded_batches():
                kept = {source: self._inputs(source, recorded) for source in bases}
                for _, found in self._pulled(batch, recorded):
                    for source, g in found.items():
                        one = moments.of_examples(source, bases[source], kept[source], g)
                        values[source].add_(one, alpha=batch.size.weight)
                sizes += batch.size
            self._joint.sum_(list(values.values()))
            scale = self._scale(self._joint.sizes(sizes))
            blocks = [
                EigenBlock(basis.layout, basis.left, basis.right, values[source] * scale)
                for source, basis in bases.items()
            ]
            return tuple(compress(blocks, self._joint.owned([each.layout for each in blocks])))

    def _bases(self, blocks: Sequence[KroneckerBlock]) -> list[EigenBlock]:
        """Return the eigenvectors of all blocks; each rank of sharded parameters computes those of its own."""
        owned = self._joint.owned([each.layout for each in blocks])
        if all(owned) and self.domain.shards is None:
            return [each.eigen for each in blocks]
        found = []
        for block, own in zip(blocks, owned, strict=True):
            left, right = (None if each.dim() == 2 else torch.zeros_like(each) for each in (block.B, block.A))
            values = block.B.new_zeros(block.layout.shape)
            found.append(block.eigen if own else EigenBlock(block.layout, left, right, values))
        # A sum with the zeros of all other ranks sends every block.
        self._joint.sum_([each for basis in found for each in (basis.left, basis.right)])
        return found

    def _by_example(self, source: Source) -> bool:
        return True
