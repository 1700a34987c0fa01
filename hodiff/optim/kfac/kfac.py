"""K-FAC and EK-FAC optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import EigenBlock, KroneckerBlock, Layout, aligned, balance, between, diagonal_of
from hodiff.operators.kfac.kfac_options import EXPAND, MONTE_CARLO
from hodiff.optim.kfac.kfac_optimizer import KroneckerFactoredOptimizer, State
from hodiff.optim.kfac.seen_layers import Sums
from hodiff.optim.settings import settings_in
from hodiff.optim.training_optimizer import Group


class KFAC(KroneckerFactoredOptimizer):
    r"""Natural gradients by Kronecker factors: each layer's gradient is multiplied by inverses of two small matrices.

    For a layer of weight W with inputs a and gradients g of the outputs, for labels that the model itself draws,

    $$ A \leftarrow \beta A + (1 - \beta)\, \mathbb{E}\, a a^\top, \qquad
       B \leftarrow \beta B + (1 - \beta)\, \mathbb{E}\, g g^\top, $$
    $$ D = \big(B + \tfrac{\sqrt\mu}{\pi} I\big)^{-1} \nabla_W f \,\big(A + \pi \sqrt\mu I\big)^{-1}, \qquad
       \pi^2 = \frac{\operatorname{tr} A / q}{\operatorname{tr} B / p} $$

    $$ M \leftarrow \alpha M + \gamma \nu D, \qquad W \leftarrow (1 - \gamma \lambda) W - M, \qquad
       \nu = \min\Big(1, \sqrt{\frac{\kappa}{\gamma^2 \sum \langle D, \nabla f \rangle}}\Big) $$

    where weight and bias of a layer are one matrix, whose a ends in 1. Averages begin as means. The factors are those
    of `hodiff.KFACOperator`. A loop of `loss.backward()` and `optimizer.step()` is enough: layers record their inputs
    when curvature is due, and `backward` passes its graph to the optimizer.

    Layers: `Linear`, `Conv1D` of `transformers`, `Conv1d` to `Conv3d`, `Embedding` and normalizations. Normalizations
    use the diagonal of the block, and batch norm's statistics count as constants. Inputs have examples along their
    first dimension. The loss must have one `cross_entropy` or `nll_loss` of labels, `mse_loss` or
    `binary_cross_entropy_with_logits`, without weights; other terms count in the gradient only. The state has
    $2 (p^2 + q^2)$ numbers for a weight (p, q), and one for each element with momentum.

    Args:
        params: Parameters, or groups of them with separate settings, all of layers named above.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        momentum: $\alpha$.
        damping: $\mu$; a change takes effect with the next inverses.
        weight_decay: $\lambda$, decoupled.
        factor_decay: $\beta$.
        kl_clip: $\kappa$, for each group, in units of the loss; None for $\nu = 1$. It bounds the contribution of each
            gradient to M at the current rate. For long training with small batches a smaller value, such as 3e-5, was
            better.
        update_every: Number of steps between estimates of the curvature; None for `update_curvature` only, for which
            layers record their inputs in every step.
        refresh_every: Number of estimates between new inverses; early inverses follow estimates 1, 2, 4, 8 ..., too.
        fisher: Source of the gradients g: "monte-carlo", labels that the model draws; "exact", all labels, with a
            pullback for each; "empirical", the given labels.
        sharing: Treatment of places in an example that share a weight, such as tokens or pixels. "expand" treats each
            place as an example; "reduce" averages inputs and sums gradients over the places first.
        maximize: Whether to ascend.
        generator: Generator on the CPU that draws labels; by default a new generator with seed 0.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. The loss is the mean of the ranks' losses, and factors are those of all
            examples. Every rank draws labels of its own, and computes inverses of a share of the layers for all ranks.
            "local" if each rank has a model of its own.
            Parameters under `fully_shard` need the group.

    Raises:
        InputError: If a setting is out of its range, a parameter complex or a DTensor without its process group,
            or this process is not in the group; later, if a parameter in the graph of a loss belongs to no supported
            layer, or is used elsewhere.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> inputs, labels = torch.randn(40, 3), torch.randint(2, (40,))
        >>> optimizer = hodiff.optim.KFAC(model.parameters(), lr=0.5, kl_clip=None, damping=0.1)
        >>> losses = []
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        ...     loss.backward()
        ...     optimizer.step()
        ...     losses.append(loss.item())
        >>> losses[-1] < losses[0]
        True

    Source: J. Martens & R. Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML
    2015, sections 3, 5 and 6.3; R. Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural
    network architectures", NeurIPS 2023, section 3 (sharing); J. Ba, R. Grosse & J. Martens, "Distributed second-order
    optimization using Kronecker-factored approximations", ICLR 2017, section 5 ($\nu$).
    """

    whole_state = frozenset({"A", "B", "layout", "A_inverse", "B_inverse"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        damping: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        factor_decay: float = 0.95,
        kl_clip: float | None = 1e-3,
        update_every: int | None = 10,
        refresh_every: int = 10,
        fisher: str = MONTE_CARLO,
        sharing: str = EXPAND,
        maximize: bool = False,
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ):
        super().__init__(params, settings_in(locals()), fisher, sharing, generator, process_group)

    def _decomposed(self, state: State, group: Group, layout: Layout) -> dict[str, Tensor | None]:
        A, B, root = state["A"], state["B"], group["damping"] ** 0.5
        ratio = balance(diagonal_of(A).mean(-1, keepdim=True), diagonal_of(B).mean(-1, keepdim=True))
        return {
            "A_inverse": aligned(self._inverse(A, root * ratio)),
            "B_inverse": aligned(self._inverse(B, root / ratio)),
        }

    def _zeros_for(self, state: State, layout: Layout) -> dict[str, Tensor | None]:
        return {f"{name}_inverse": aligned(torch.zeros_like(state[name])) for name in ("A", "B")}

    def _solve(self, state: State, group: Group, gradient: Tensor) -> Tensor:
        return between(state["B_inverse"], state["A_inverse"], gradient)

    def _inverse(self, factor: Tensor, shift: Tensor) -> Tensor:
        """Invert a factor plus a multiple (groups, 1) of the identity."""
        if factor.dim() == 2:
            inverse, regular = 1 / (factor + shift), bool((factor + shift > 0).all())
        else:
            eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
            root, info = torch.linalg.cholesky_ex(factor + shift[..., None] * eye)
            inverse, regular = torch.cholesky_inverse(root), not bool(info.any())
        if not regular or not bool(inverse.isfinite().all()):
            raise InputError(
                f"{self.caller}: step: expected finite factors that are positive definite when damped, got one that is "
                "not; increase damping, or find the step at which the loss becomes NaN or infinite."
            )
        return inverse


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

    def _decomposed(self, state: State, group: Group, layout: Layout) -> dict[str, Tensor | None]:
        if not bool(state["A"].isfinite().all() & state["B"].isfinite().all()):
            raise InputError(
                f"{self.caller}: step: expected finite factors, got NaN or infinity; find the step at which the loss "
                "becomes NaN or infinite."
            )
        eigen = KroneckerBlock(layout, state["A"], state["B"]).eigen
        return {"left": eigen.left, "right": eigen.right, "values": eigen.values}

    def _zeros_for(self, state: State, layout: Layout) -> dict[str, Tensor | None]:
        left, right = (None if state[name].dim() == 2 else torch.zeros_like(state[name]) for name in ("B", "A"))
        return {"left": left, "right": right, "values": state["B"].new_zeros(layout.shape)}

    def _adjust(self, blocks: Sequence[tuple[State, Sums]], weights: Sequence[float]) -> None:
        found = []
        for (_, sums), basis in zip(blocks, self._bases(blocks), strict=True):
            parts = [moments.of_examples(sums.source, basis, a, g) for a, g in sums.vectors]
            found.append(torch.stack(parts).sum(0))
        self._ranks.sum_(found)
        for (state, _), squares, weight in zip(blocks, found, weights, strict=True):
            if "values" in state:
                state["values"].lerp_(squares, weight)

    def _bases(self, blocks: Sequence[tuple[State, Sums]]) -> list[EigenBlock]:
        """Return the eigenvectors of blocks; those of shards are sent to all ranks, whose examples they multiply."""
        found = []
        for state, sums in blocks:
            layout = sums.source.layout
            basis: State = state
            if "values" not in state:
                A = moments.mean_of_inputs(sums.source, sums.inputs, sums.count, sums.gradients)
                basis = self._zeros_for({"A": A, "B": sums.gradients}, layout)
            left, right = basis["left"], basis["right"]
            if self.sharded:
                left, right = (None if each is None else each.clone() for each in (left, right))
            found.append(EigenBlock(layout, left, right, basis["values"]))
        if self.sharded:
            self._ranks.sum_([each for basis in found for each in (basis.left, basis.right) if each is not None])
        return found

    def _solve(self, state: State, group: Group, gradient: Tensor) -> Tensor:
        damped = state["values"] + group["damping"]
        # The values are means of squares, never negative: only damping that rounds to 0 needs a look at them.
        if group["damping"] < torch.finfo(damped.dtype).tiny and not bool((damped > 0).all()):
            raise InputError(
                f"{self.caller}: damping: expected more than 0 because the curvature is singular, got "
                f"{group['damping']!r}."
            )
        left, right = state["left"], state["right"]
        coordinates = gradient if left is None else left.mT @ gradient
        coordinates = (coordinates if right is None else coordinates @ right) / damped
        solved = coordinates if left is None else left @ coordinates
        return solved if right is None else solved @ right.mT
