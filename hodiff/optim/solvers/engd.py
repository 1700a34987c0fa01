"""Energy natural gradients, for residuals at points."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hodiff.common.options import require_choice
from hodiff.optim.settings import GRID, settings_in
from hodiff.optim.solvers.residual_terms import ResidualOptimizer, Term, half_square


class ENGD(ResidualOptimizer):
    r"""Energy natural gradients: Gauss-Newton steps for residuals at points, by equations with a row for each point.

    $$ f(\theta) = \sum_t \frac{1}{2 N_t} \sum_{i=1}^{N_t} \|r_t(x_{ti})\|^2 = \tfrac12 \|r\|^2, \qquad
       J = \partial r / \partial \theta $$

    $$ \phi \leftarrow \alpha \phi + J^\top (J J^\top + \mu I)^{-1} (r - \alpha J \phi), \qquad
       \theta \leftarrow \theta - \gamma\, \phi $$

    For physics-informed networks, with a term for the equation and one for each boundary condition. All terms have
    equal weights; for a weight w, multiply the function by the root of w. The matrix has as many rows as there are
    residuals; with fewer parameters than residuals, the equivalent equations in the parameters are solved. Memory is
    that of J, a number for each residual and parameter, and of the matrix. Use float64: products square the condition
    of J, and in float32 `damping` or `rcond` must exceed their rounding.

    Args:
        model: Module whose parameters are trained.
        lr: $\gamma$, a number or a tensor with one number; with a line search, the longest step.
        damping: $\mu$, in units of squared derivatives; it may be 0 if `rcond` is a number.
        momentum: $\alpha$; at 0 each step depends on its own points only.
        line_search_fn: "grid" takes the step of least loss among $\gamma, \gamma / 2, \dots, \gamma / 2^{30}$, or none
            if all raise it. The search ends five halvings after the best step; each costs an evaluation of the
            residuals. None takes the full step.
        rcond: Cutoff of the pseudo-inverse: eigenvalues of $J J^\top$ up to this number times the largest have no part
            in the solution. The first source has damping 0 and a cutoff of $\epsilon$ times the number of parameters,
            such as 1e-13 in float64. None solves by a Cholesky factor, which is faster.
        chunk_size: Number of points that are differentiated together; None for all.

    Raises:
        InputError: If an argument is invalid, or a parameter complex or a DTensor over several ranks.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        >>> def u(x):
        ...     return model(x)[0]
        >>> def equation(x):  # u'' = -sin x
        ...     return hodiff.laplacian(u)(x) + x.sin()[0]
        >>> inside = 3.14159 * torch.rand(50, 1).double()
        >>> ends = torch.tensor([[0.0], [3.14159]]).double()
        >>> optimizer = hodiff.optim.ENGD(model)
        >>> losses = [optimizer.step((equation, inside), (u, ends)).item() for _ in range(30)]
        >>> losses[-1] < 1e-4 * losses[0]
        True

    Source: J. Müller & M. Zeinhofer, "Achieving high accuracy with PINNs via energy natural gradient descent", ICML
    2023, section 3; A. Guzmán-Cordero, F. Dangel, G. Goldshlager & M. Zeinhofer, "Improving energy natural gradient
    descent through Woodbury, momentum, and randomization" (2025), for the equations in sample space, and momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1.0,
        damping: float = 1e-6,
        momentum: float = 0.0,
        *,
        line_search_fn: str | None = GRID,
        rcond: float | None = None,
        chunk_size: int | None = None,
    ):
        require_choice("ENGD", "line_search_fn", line_search_fn, (GRID,), optional=True)
        super().__init__(model, settings_in(locals()), chunk_size)

    # A step needs functions of one point, where torch's takes a closure.
    @torch.no_grad()
    def step(self, *terms: Term) -> Tensor:  # type: ignore[override]
        """Take one step, within `hodiff.corrected()`, and set gradients.

        Args:
            *terms: Pairs of a function of one point that returns residuals, a tensor of any shape, and the points:
                tensors, or pytrees of them, with the points along their first dimension. The functions call the model.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no term, or one is invalid; or if numbers are not finite. Nothing has changed then.
        """
        self.require_dtypes()
        counts = self.counts(terms)
        values = self.scaled(terms, counts)
        loss = half_square(values)
        # Each term's rows, as the loss is a sum of means.
        rows = [
            [each / math.sqrt(count) for each in self._rows(*term, value.shape[1])]
            for term, count, value in zip(terms, counts, values, strict=True)
        ]
        joint = [torch.cat([each.flatten(0, 1)[:, None] for each in leaf]) for leaf in zip(*rows, strict=True)]
        direction = self._descend(joint, torch.cat([each.reshape(-1) for each in values]), loss)
        if self.setting("line_search_fn") is None:
            self.add([-each for each in direction], self.parameters())
        else:
            self.search(direction, lambda: half_square(self.scaled(terms, counts)), loss)
        return loss
