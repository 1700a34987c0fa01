"""Euclidean projections, with derivatives of every order wherever they exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import (
    require_broadcasts_to,
    require_dims,
    require_floating,
    require_positive_or_floating,
)
from hodiff.rules.nesting import nestable_jvp


class ProjectL2Ball(AnyOrderFunction):
    """The Function behind `project_l2_ball` and `group_soft_threshold`. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, radius: Any, dims: tuple[int, ...]) -> Tensor:
        """Compute $x$ inside and $r x / ‖x‖$ outside."""
        inside, unit, _ = _polar(x, radius, dims)
        return torch.where(inside, x, radius * unit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        del output
        _save(ctx, inputs, *inputs[:2])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Apply the Jacobian, which is symmetric."""
        if cotangent is None:
            return None, None, None
        x, radius = ctx.saved_tensors
        radius = ctx.number if radius is None else radius
        inside, unit, norm = _polar(x, radius, ctx.dims)
        along = (unit * cotangent).sum(ctx.dims, keepdim=True)
        by_x = by_radius = None
        if ctx.needs_input_grad[0]:
            by_x = torch.where(inside, cotangent, radius / norm * (cotangent - along * unit))
        if ctx.needs_input_grad[1]:
            by_radius = torch.where(inside, 0, along).sum_to_size(radius.shape)
        return by_x, by_radius, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor | None, radius_tangent: Tensor | None, _: None) -> Tensor:
        """Apply the Jacobian."""
        x, radius = ctx.saved_tensors
        radius = ctx.number if radius is None else radius
        inside, unit, norm = _polar(x, radius, ctx.dims)
        tangent = torch.zeros_like(x)
        if x_tangent is not None:
            along = (unit * x_tangent).sum(ctx.dims, keepdim=True)
            tangent = torch.where(inside, x_tangent, radius / norm * (x_tangent - along * unit))
        if radius_tangent is not None:
            tangent = tangent + torch.where(inside, 0, unit * radius_tangent)
        return tangent

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, radius: Any, dims: tuple[int, ...]
    ) -> tuple[Tensor, int]:
        """Put batches in front: the dimensions of the groups are counted from the end."""
        return ProjectL2Ball.call(*_batched(info, in_dims, x, radius), dims), 0


@overridable
def project_l2_ball(x: Tensor, radius: Tensor | float = 1.0, dim: int | Sequence[int] = -1) -> Tensor:
    r"""Euclidean projection of each group on the ball around zero, $x \min(1, r / \lVert x \rVert_2)$.

    The Jacobian is $I$ inside and $\frac{r}{\lVert x \rVert}(I - u u^\top)$ with $u = x / \lVert x \rVert$ outside; a
    group on the sphere itself counts as inside.

    Args:
        x: Floating-point tensor of at least one dimension.
        radius: $r \ge 0$: number, or floating-point tensor that broadcasts with the norms (the shape of
            `x.sum(dim, keepdim=True)`) and may require a gradient.
        dim: The dimension or dimensions that a group spans.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> project_l2_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])

    Source: N. Parikh & S. Boyd, "Proximal algorithms", 2014, section 6.5.1.
    """
    dims = require_groups("project_l2_ball", x, "radius", radius, dim, zero=True)
    if torch.compiler.is_compiling():
        return ProjectL2Ball.forward(x, radius, dims)
    return ProjectL2Ball.call(x, radius, dims)


class ProjectSimplex(AnyOrderFunction):
    """The Function behind `project_simplex`. Saves its output, which is positive exactly on the support."""

    @staticmethod
    def forward(x: Tensor, radius: Any, dims: tuple[int, ...]) -> Tensor:
        """Subtract the threshold that leaves a sum of r, and clamp at zero."""
        (dim,) = dims
        # The projection does not change if all numbers are shifted together; small numbers lose fewer digits.
        x = x - x.detach().amax(dim, keepdim=True)
        descending = x.sort(dim, descending=True).values
        excess = descending.cumsum(dim) - radius
        shape = [1] * x.dim()
        shape[dim] = -1
        count = torch.arange(1, x.shape[dim] + 1, device=x.device).reshape(shape)
        size = (descending * count > excess).sum(dim, keepdim=True).clamp(min=1)
        return (x - excess.gather(dim, size - 1) / size).clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the output for backward and the inputs for forward mode."""
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Subtract the mean over the support from the cotangent on the support."""
        if cotangent is None:
            return None, None, None
        (output,) = ctx.saved_tensors
        support, mean = _mean_over_support(output.detach(), cotangent, ctx.dims)
        by_x = support * (cotangent - mean) if ctx.needs_input_grad[0] else None
        return by_x, mean.sum_to_size(ctx.radius_shape) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor | None, radius_tangent: Tensor | None, _: None) -> Tensor:
        """Subtract the mean over the support on the support, and distribute the radius's tangent over it."""
        x, radius = ctx.saved_tensors
        radius = ctx.number if radius is None else radius.detach()
        output = ProjectSimplex.forward(x.detach(), radius, ctx.dims)
        support, mean = _mean_over_support(output, output if x_tangent is None else x_tangent, ctx.dims)
        tangent = torch.zeros_like(output) if x_tangent is None else support * (x_tangent - mean)
        if radius_tangent is not None:
            tangent = tangent + support / support.sum(ctx.dims, keepdim=True).clamp(min=1) * radius_tangent
        return tangent

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, radius: Any, dims: tuple[int, ...]
    ) -> tuple[Tensor, int]:
        """Put batches in front: the dimension of the simplex is counted from the end."""
        return ProjectSimplex.call(*_batched(info, in_dims, x, radius), dims), 0


@overridable
def project_simplex(x: Tensor, radius: Tensor | float = 1.0, dim: int = -1) -> Tensor:
    r"""Euclidean projection on the simplex of nonnegative vectors with sum $r$; for $r = 1$ also called sparsemax.

    $$ y_i = \max(x_i - \tau(x), 0), \qquad \textstyle\sum_i y_i = r $$

    With $s$ the indicator of the support, the Jacobian is $\operatorname{diag}(s) - s s^\top / |s|$, and the derivative
    with respect to $r$ is $s / |s|$; second derivatives are 0. Entries that just reach zero are outside the support.

    Args:
        x: Floating-point tensor of at least one dimension.
        radius: $r > 0$: number, or floating-point tensor that broadcasts with the sums (the shape of
            `x.sum(dim, keepdim=True)`) and may require a gradient.
        dim: The dimension along which the sums are taken.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> project_simplex(torch.tensor([0.5, 1.0, -1.0]))
        tensor([0.2500, 0.7500, 0.0000])

    Source: J. Duchi, S. Shalev-Shwartz, Y. Singer & T. Chandra, "Efficient projections onto the l1-ball", 2008,
    figure 1; its Jacobian: A. Martins & R. Astudillo, "From softmax to sparsemax", 2016, proposition 2.
    """
    dims = require_groups("project_simplex", x, "radius", radius, dim, zero=False)
    if len(dims) > 1 or x.shape[dims[0]] == 0:
        raise InputError(
            f"project_simplex: dim: expected one dimension that is not empty, got {dim!r} of {tuple(x.shape)}."
        )
    if torch.compiler.is_compiling():
        return ProjectSimplex.forward(x, radius, dims)
    return ProjectSimplex.call(x, radius, dims)


def _polar(x: Tensor, radius: Any, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether a group is inside the ball, its unit vector and its norm, both finite inside."""
    largest = x.detach().abs().amax(dims, keepdim=True)
    # Squares of scaled numbers neither overflow nor vanish.
    largest = torch.where((largest > 0) & largest.isfinite(), largest, 1)
    squares = (x / largest).square().sum(dims, keepdim=True)
    inside = largest * squares.sqrt() <= radius
    norm = largest * torch.where(inside, 1, squares).sqrt()
    return inside, x / norm, norm


def _mean_over_support(output: Tensor, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    support = output.sign()
    return support, (support * x).sum(dims, keepdim=True) / support.sum(dims, keepdim=True).clamp(min=1)


def _save(ctx: Any, inputs: tuple[Any, ...], *residuals: Any) -> None:
    x, radius, dims = inputs
    ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in residuals))
    ctx.save_for_forward(x, radius if isinstance(radius, Tensor) else None)
    ctx.number = None if isinstance(radius, Tensor) else radius
    ctx.radius_shape = radius.shape if isinstance(radius, Tensor) else None
    ctx.dims = dims
    ctx.set_materialize_grads(False)


def _batched(info: Any, in_dims: tuple[int | None, ...], x: Tensor, radius: Any) -> tuple[Tensor, Any]:
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if in_dims[1] is not None:
        radius = radius.movedim(in_dims[1], 0)
        radius = radius.reshape(radius.shape[0], *(1,) * (x.dim() - radius.dim()), *radius.shape[1:])
    return x, radius


def require_groups(function: str, x: Tensor, name: str, level: Any, dim: Any, *, zero: bool) -> tuple[int, ...]:
    """Raise if a level is not one number per group; return the dimensions of a group, counted from the end."""
    require_floating(function, x=x)
    if x.dim() == 0:
        raise InputError(f"{function}: x: expected at least one dimension, got a number; x.unsqueeze(0) adds one.")
    dims = require_dims(function, x, dim)
    require_positive_or_floating(function, name, level, zero=zero)
    norms = tuple(1 if i in dims else size for i, size in enumerate(x.shape))
    require_broadcasts_to(function, name, level, norms, remedy="pass one number a group")
    return tuple(each - x.dim() for each in dims)
