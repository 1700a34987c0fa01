"""Proximal maps, with derivatives of every order wherever they exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.overriding import overridable
from hodiff.functions.projections.euclidean import ProjectL2Ball as ProjectL2Ball
from hodiff.functions.projections.euclidean import ProjectSimplex as ProjectSimplex
from hodiff.functions.projections.euclidean import project_l2_ball as project_l2_ball
from hodiff.functions.projections.euclidean import project_simplex as project_simplex
from hodiff.functions.projections.euclidean import require_groups
from hodiff.rules.arguments import require_broadcastable, require_floating, require_positive_or_floating
from hodiff.rules.elementwise import ElementwiseFunction, clip


class SoftThreshold(ElementwiseFunction):
    """The Function behind `soft_threshold`. Saves its output, which is zero exactly where the derivative is."""

    saves_output = True

    @staticmethod
    def forward(x: Tensor, lam: Any) -> Tensor:
        r"""Compute $x - \operatorname{clamp}(x, -λ, λ)$."""
        return x - clip(x, -lam, lam)

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """Return the output."""
        del inputs
        return (output,)

    @staticmethod
    def slope(index: int, y: Tensor) -> Tensor:
        """Compute 1 for x and -sign(x) for λ where the output is not zero, else 0."""
        signs = y.detach().sign()
        return signs.abs() if index == 0 else -signs


@overridable
def soft_threshold(x: Tensor, lam: Tensor | float) -> Tensor:
    r"""Soft threshold, $\operatorname{sign}(x)\max(|x| - \lambda, 0)$: the proximal map of $\lambda \lVert x \rVert_1$.

    Where $|x| > \lambda$, the derivative with respect to $x$ is 1, and with respect to $\lambda$ it is
    $-\operatorname{sign}(x)$. Both are 0 elsewhere, the kink included. Second derivatives are 0.

    Args:
        x: Floating-point tensor of any shape.
        lam: Threshold $\lambda \ge 0$: number, or floating-point tensor that broadcasts with `x` and may require a
            gradient.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> soft_threshold(torch.tensor([-2.0, 0.5, 3.0]), 1.0)
        tensor([-1.,  0.,  2.])

    Source: N. Parikh & S. Boyd, "Proximal algorithms", 2014, section 6.5.2.
    """
    require_floating("soft_threshold", x=x)
    require_positive_or_floating("soft_threshold", "lam", lam, zero=True)
    require_broadcastable("soft_threshold", x=x, lam=lam)
    if torch.compiler.is_compiling():
        return SoftThreshold.forward(x, lam)
    return SoftThreshold.call(x, lam)


@overridable
def group_soft_threshold(x: Tensor, lam: Tensor | float, dim: int | Sequence[int] = -1) -> Tensor:
    r"""Block soft threshold, $x \max(1 - \lambda / \lVert x \rVert_2, 0)$: the proximal map of the group lasso.

    By Moreau's decomposition, it is $x$ minus its projection on the ball of radius $\lambda$. A group whose norm is at
    most $\lambda$, the kink and zero included, gives zero with derivative 0; elsewhere the Jacobian is
    $(1 - \frac{\lambda}{\lVert x \rVert}) I + \frac{\lambda}{\lVert x \rVert} u u^\top$ with $u = x / \lVert x \rVert$,
    and the derivative with respect to $\lambda$ is $-u$.

    Args:
        x: Floating-point tensor of at least one dimension.
        lam: Threshold $\lambda \ge 0$: number, or floating-point tensor that broadcasts with the norms (the shape of
            `x.sum(dim, keepdim=True)`) and may require a gradient.
        dim: The dimension or dimensions that a group spans.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> group_soft_threshold(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])

    Source: N. Parikh & S. Boyd, "Proximal algorithms", 2014, section 6.5.1.
    """
    dims = require_groups("group_soft_threshold", x, "lam", lam, dim, zero=True)
    if torch.compiler.is_compiling():
        return x - ProjectL2Ball.forward(x, lam, dims)
    return x - ProjectL2Ball.call(x, lam, dims)
