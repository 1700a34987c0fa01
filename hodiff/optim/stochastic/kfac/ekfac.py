"""EK-FAC optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import EigenBlock, KroneckerBlock
from hodiff.operators.kfac.layouts import Layout
from hodiff.optim.stochastic.base import Group
from hodiff.optim.stochastic.kfac.base import State
from hodiff.optim.stochastic.kfac.kfac import KFAC
from hodiff.optim.stochastic.kfac.seen_layers import Sums


class EKFAC(KFAC):
    r"""K-FAC with corrected eigenvalues: second moments of gradients in the eigenvectors of K-FAC's factors.

    With $A = Q_A \Lambda_A Q_A^\top$ and $B = Q_B \Lambda_B Q_B^\top$ the factors of `hodiff.optim.KFAC`, and
    $G_n = \sum_r g_{nr} a_{nr}^\top$ the gradients of a weight in each example,

    $$ S \leftarrow \beta S + (1 - \beta)\, \mathbb{E}\, (Q_B^\top G_n Q_A)^{\circ 2}, \qquad
       D = Q_B \frac{Q_B^\top \nabla_W f\; Q_A}{S + \mu} Q_A^\top $$

    and otherwise K-FAC. With new eigenvectors, S begins at the eigenvalues of K-FAC, the products of the eigenvalues of
    A and B, and the current curvature is averaged in. On steps with due curvature the inputs and gradients of all
    layers stay in memory until the step, for "exact" those of all columns. The state has $2 (p^2 + q^2) + p q$ numbers
    for a weight (p, q), and one for each element with momentum.

    Arguments, errors and supported losses are those of `hodiff.optim.KFAC`. `damping` takes effect at once; "expand"
    and "reduce" apply to the factors only.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> inputs, targets = torch.randn(40, 3), torch.randn(40, 2)
        >>> optimizer = hodiff.optim.EKFAC(model.parameters(), lr=0.5, momentum=0.0, kl_clip=None, damping=0.1)
        >>> closure = lambda: torch.nn.functional.mse_loss(model(inputs), targets)
        >>> losses = [optimizer.step(closure).item() for _ in range(10)]
        >>> losses[-1] < losses[0]
        True

    Source: T. George, C. Laurent, X. Bouthillier, N. Ballas & P. Vincent, "Fast approximate natural gradient descent in
    a Kronecker-factored eigenbasis", NeurIPS 2018, algorithm 1.
    """

    keeps_vectors = True
    whole_state = frozenset({"A", "B", "layout", "left", "right", "values"})

    def _decompose(self, state: State, group: Group, layout: Layout) -> None:
        if not bool(state["A"].isfinite().all() & state["B"].isfinite().all()):
            raise InputError(
                f"{self.caller}: step: expected finite factors, got NaN or infinity; look for the step where the loss "
                "is no number any more."
            )
        eigen = KroneckerBlock(layout, state["A"], state["B"]).eigen
        state["left"], state["right"], state["values"] = eigen.left, eigen.right, eigen.values

    def _adjust(self, state: State, sums: Sums, weight: float) -> None:
        basis = EigenBlock(sums.source.layout, state["left"], state["right"], state["values"])
        found = [moments.of_examples(sums.source, basis, a, g) for a, g in sums.vectors]
        state["values"].lerp_(torch.stack(found).sum(0), weight)

    def _solve(self, state: State, group: Group, gradient: Tensor) -> Tensor:
        damped = state["values"] + group["damping"]
        if not bool((damped > 0).all()):
            raise InputError(
                f"{self.caller}: damping: expected more than 0 where the curvature is singular, got "
                f"{group['damping']!r}."
            )
        left, right = state["left"], state["right"]
        coordinates = gradient if left is None else left.mT @ gradient
        coordinates = (coordinates if right is None else coordinates @ right) / damped
        solved = coordinates if left is None else left @ coordinates
        return solved if right is None else solved @ right.mT
