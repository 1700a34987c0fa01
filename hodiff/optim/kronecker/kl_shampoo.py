"""KL-Shampoo and KL-SOAP: second moments along each dimension of gradients that the other factors whiten."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.optim.kronecker.kronecker_optimizer import State, along, sizes_of, vectors_along
from hodiff.optim.kronecker.soap import ROUNDINGS, SOAP
from hodiff.optim.training_optimizer import Group


def inverse_roots(eigenvalues: Tensor) -> Tensor:
    """Return the inverse square roots of eigenvalues (k, n), and zero for eigenvalues of zero up to rounding."""
    least = (ROUNDINGS * torch.finfo(eigenvalues.dtype).eps) ** 2 * eigenvalues.sum(1, keepdim=True)
    return eigenvalues.rsqrt().masked_fill_(eigenvalues <= least, 0.0)


class KLSOAP(SOAP):
    r"""SOAP whose matrices minimize a Kullback-Leibler divergence: `KLShampoo`'s basis, and Adam in it.

    The basis Q follows the matrices S of `KLShampoo` instead of L and R of `SOAP`; the rest is as in `SOAP`. The first
    step computes the basis and leaves the parameters unchanged. Vectors take Adam's steps.

    The state has n numbers more for each dimension n than that of `SOAP`.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$, decoupled.
        refresh_every: k.
        max_preconditioner_size: Largest n of a matrix (n, n).
        merge_dims: Whether to merge dimensions.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = hodiff.optim.KLSOAP(model.parameters(), lr=0.05)
        >>> closure = lambda: torch.nn.functional.mse_loss(model(inputs), targets)
        >>> losses = [optimizer.step(closure).item() for _ in range(10)]
        >>> losses[-1] < losses[1] == losses[0]  # the first step only makes the basis
        True

    Source: W. Lin et al., "Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization", ICLR 2026.
    """

    moments_name = "whitened_moments"
    whole_state = frozenset({"step", "exp_avg", "exp_avg_sq", moments_name, "bases", "eigenvalues"})

    def _begin(self, states: Sequence[State], group: Group, gradients: Tensor) -> None:
        # Without a gradient there is no scale to start from; such a parameter begins later.
        chosen = gradients.flatten(1).any(1).tolist()
        states = [state for state, each in zip(states, chosen, strict=True) if each]
        if not states:
            return
        gradients = gradients[torch.tensor(chosen, device=gradients.device)] if not all(chosen) else gradients
        super()._begin(states, group, gradients)
        count, *shape = gradients.shape
        scales = (sizes_of(gradients).view(count, 1) / gradients[0].numel() ** 0.5) ** (2 / len(shape))
        for state, scale in zip(states, scales, strict=True):
            state["eigenvalues"] = [scale.expand(size).clone() for size in shape]
        for moments in self._factors(states, self.moments_name):
            if moments is not None:
                moments.copy_(torch.diag_embed(scales.expand(count, moments.shape[-1])))
        self._update_moments(states, gradients, self._projected(states, gradients), group["betas"][1])

    def _update_moments(self, states: Sequence[State], gradients: Tensor, projected: Tensor, keep: float) -> None:
        bases, moments = self._factors(states, "bases"), self._factors(states, self.moments_name)
        eigenvalues = [self._joined(states, "eigenvalues", dim) for dim in range(len(bases))]
        roots = [along(inverse_roots(each), dim, projected) for dim, each in enumerate(eigenvalues)]
        for dim, (basis, moment) in enumerate(zip(bases, moments, strict=True)):
            whitened = projected
            for other, root in enumerate(roots):
                whitened = whitened if other == dim else whitened * root
            vectors = vectors_along(whitened, dim)
            eigenvalues[dim].lerp_(vectors.square().mean(2), 1 - keep)
            if basis is not None and moment is not None:
                vectors = torch.bmm(basis, vectors)
                moment.baddbmm_(vectors, vectors.mT, beta=keep, alpha=(1 - keep) / vectors.shape[2])

    def _reorder(self, states: Sequence[State], dim: int, order: Tensor) -> None:
        super()._reorder(states, dim, order)
        eigenvalues = self._joined(states, "eigenvalues", dim)
        eigenvalues.copy_(eigenvalues.take_along_dim(order, 1))


class KLShampoo(KLSOAP):
    r"""Shampoo whose matrices together minimize a Kullback-Leibler divergence; it needs no grafting.

    The gradients of a matrix (m, n) have second moments E[g gᵀ], of order m n. The Kronecker product of symmetric
    matrices A (m, m) and B (n, n) that is nearest to it as the covariance of a Gaussian, by the divergence KL(E[g gᵀ],
    A ⊗ B), satisfies

    $$ A = \tfrac1n E[G B^{-1} G^\top], \qquad B = \tfrac1m E[G^\top A^{-1} G] $$

    Running averages approximate this solution, with Q approximately the eigenvectors, and a and b the eigenvalues:

    $$ M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
       \theta \leftarrow (1 - \gamma \lambda)\, \theta -
       \gamma\, Q_A \frac{Q_A^\top \hat M Q_B}{\sqrt{a b^\top} + \epsilon}\, Q_B^\top $$

    $$ A \leftarrow \beta_2 A + \tfrac{1 - \beta_2}{n}\, G\, Q_B\, \mathrm{diag}(b)^{-1} Q_B^\top G^\top, \qquad
       a \leftarrow \beta_2 a + \tfrac{1 - \beta_2}{n}\, (Q_A^\top G\, Q_B)^{\circ 2}\, b^{\circ -1} $$

    $$ \text{every k steps: } Q_A \leftarrow \mathrm{qr}(A\, Q_A) $$

    and likewise for B, from the same old values, and for more dimensions. Columns of Q, and eigenvalues with them, are
    first sorted by the diagonal of $Q^\top A\, Q$. The averages start at $A = c I$ and $B = c I$, with $c^2$ the mean
    square of the first gradient's elements, so that the steps do not depend on the scale of the loss; the paper's code
    starts at a constant. The first step computes the eigenvectors of the first gradient and leaves the parameters
    unchanged, also if the gradient is zero, and steps use matrices without the current gradient. Eigenvalues of zero
    up to rounding have no inverse.

    Dimensions of size 1 are dropped. Dimensions behind the first are merged, from the last on, while their product is
    at most `max_preconditioner_size`: a convolution's weight (C, D, 3, 3) is a matrix (C, 9 D). A larger dimension
    has a diagonal matrix, and so have vectors, for which this is Adam with the squares of earlier gradients. The state
    has $2 \sum_i n_i^2 + \sum_i n_i$ numbers for dimensions $n_i$, and one for each element.

    Args:
        params: Parameters, or groups of them with separate settings, as for `torch.optim.Adam`; real and
            floating-point.
        lr: Learning rate $\gamma$, a number or a tensor with one number.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$, decoupled.
        refresh_every: k.
        max_preconditioner_size: Largest n of a matrix (n, n).
        merge_dims: Whether to merge dimensions.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = hodiff.optim.KLShampoo(model.parameters(), lr=0.02)
        >>> closure = lambda: torch.nn.functional.mse_loss(model(inputs), targets)
        >>> losses = [optimizer.step(closure).item() for _ in range(10)]
        >>> losses[-1] < losses[1] == losses[0]  # the first step only makes the basis
        True

    Source: W. Lin et al., "Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization", ICLR 2026;
    the authors' code, github.com/yorkerlin/KL-Methods.
    """

    foreign_state = frozenset({"exp_avg_sq"})
    whole_state = KLSOAP.whole_state - foreign_state

    def _scales(self, states: Sequence[State], projected: Tensor, keep: float) -> Tensor:
        scales = torch.ones_like(projected)
        for dim in range(projected.dim() - 1):
            scales *= along(self._joined(states, "eigenvalues", dim).sqrt(), dim, projected)
        return scales
