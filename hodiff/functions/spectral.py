r"""Functions of symmetric matrices, with derivatives that are right for equal or nearly equal eigenvalues.

With $A = V \Lambda V^H$ and divided differences $f[\lambda_{i_0}, \dots, \lambda_{i_k}]$ the derivatives of $f(A)$ are
sums of

$$ D_k(A)[E_1, \dots, E_k] = V \Big( \sum f[\lambda_{i_0}, \dots, \lambda_{i_k}]\,
   \hat E^1_{i_0 i_1} \cdots \hat E^k_{i_{k-1} i_k} \Big) V^H, \qquad \hat E = V^H E V, $$

whose derivative with respect to A inserts one more factor in each place. Source: Higham, *Functions of Matrices*
(2008), theorem 3.11; Daleckii and Krein (1965).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.blockwise import all_batched
from hodiff.rules.nesting import nestable_jvp

# Gauss-Legendre points and weights on the interval from 0 to 1.
_POINTS, _WEIGHTS = (np.polynomial.legendre.leggauss(6)[0] + 1) / 2, np.polynomial.legendre.leggauss(6)[1] / 2


class SpectralDerivative(AnyOrderFunction):
    """The Function $D_k(A)[E_1, …, E_k]$. Saves its inputs."""

    @staticmethod
    def forward(A: Tensor, f: Any, *factors: Tensor) -> Tensor:
        """Compute it in the basis of eigenvectors, from $n^{k+1}$ divided differences."""
        eigenvalues, V = torch.linalg.eigh(A)
        order = len(factors)
        differences = divided_differences(f, eigenvalues, order).to(A.dtype)
        if not order:
            return (V * differences.unsqueeze(-2)) @ V.mH
        letters = "abcdefghij"[: order + 1]
        pairs = ",".join(f"...{letters[k : k + 2]}" for k in range(order))
        inner = [V.mH @ each.to(A.dtype) @ V for each in factors]
        return V @ torch.einsum(f"...{letters},{pairs}->...{letters[0]}{letters[-1]}", differences, *inner) @ V.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        A, ctx.f, *factors = inputs
        ctx.save_for_backward(A, *factors)
        ctx.save_for_forward(A, *factors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Insert the cotangent as a factor, and rotate the chain of factors cyclically."""
        if cotangent is None:
            return (None,) * len(ctx.needs_input_grad)
        (A, *factors), last = ctx.saved_tensors, cotangent.mH
        found: list[Any] = [None] * len(ctx.needs_input_grad)
        if ctx.needs_input_grad[0]:
            found[0] = sum(
                SpectralDerivative.call(A, ctx.f, *factors[k:], last, *factors[:k]).mH for k in range(len(factors) + 1)
            )
        for k in range(len(factors)):
            if ctx.needs_input_grad[2 + k]:
                found[2 + k] = SpectralDerivative.call(A, ctx.f, *factors[k + 1 :], last, *factors[:k]).mH
        return tuple(found)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, A_t: Tensor | None, _: None, *tangents: Tensor | None) -> Any:
        """Insert the tangent of A in each place, and replace each factor by its tangent."""
        A, *factors = ctx.saved_tensors
        terms = []
        if A_t is not None:
            terms += [
                SpectralDerivative.call(A, ctx.f, *factors[:k], A_t, *factors[k:]) for k in range(len(factors) + 1)
            ]
        for k, each in enumerate(tangents):
            if each is not None:
                terms.append(SpectralDerivative.call(A, ctx.f, *factors[:k], each, *factors[k + 1 :]))
        return sum(terms[1:], terms[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], A: Tensor, f: Any, *factors: Tensor) -> tuple[Tensor, int]:
        """Put the batch in front."""
        A, *moved = all_batched(info.batch_size, (in_dims[0], *in_dims[2:]), (A, *factors))
        return SpectralDerivative.call(A, f, *moved), 0


def spectral_function(A: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Compute $f(A) = V f(\Lambda) V^H$ of a symmetric or Hermitian matrix, with derivatives of every order.

    Its derivatives are right where eigenvalues are equal or nearly equal, unlike the derivatives of
    `torch.linalg.eigh`. The derivative of order k takes $n^{k+1}$ numbers for a matrix of n rows.

    Args:
        A: Symmetric or Hermitian matrices (..., n, n); for other matrices, the symmetric part $(A + A^H) / 2$ is used.
        f: A smooth elementwise function of torch, such as `torch.log`, of a real tensor. It is called on eigenvalues
            and between neighbouring ones, and must not depend on tensors that are differentiated.

    Returns:
        The matrices $f(A)$ (..., n, n).

    Raises:
        InputError: If A does not hold square matrices of real or complex floating-point numbers, or f is not callable.

    Example:
        >>> import torch, hodiff
        >>> energy = lambda C: hodiff.functions.spectral_function(C, torch.log).square().sum() / 2
        >>> hodiff.hvp(energy, torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    if not isinstance(A, Tensor) or not (A.is_floating_point() or A.is_complex()):
        got = f"dtype {A.dtype}" if isinstance(A, Tensor) else type(A).__name__
        raise InputError(f"spectral_function: A: expected a tensor of real or complex numbers, got {got}.")
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        raise InputError(f"spectral_function: A: expected square matrices (..., n, n), got shape {tuple(A.shape)}.")
    if not callable(f):
        raise InputError(f"spectral_function: f: expected an elementwise function, got {type(f).__name__}.")
    return SpectralDerivative.call((A + A.mH) / 2, f)


def divided_differences(f: Callable[[Tensor], Tensor], x: Tensor, order: int) -> Tensor:
    """Divided differences of all choices of order + 1 of the points (..., n), with limits: (..., n, …, n)."""
    n = x.shape[-1]
    grid = [x.reshape(*x.shape[:-1], *[n if i == k else 1 for i in range(order + 1)]) for k in range(order + 1)]
    points = torch.stack(torch.broadcast_tensors(*grid), -1).sort(-1).values
    scale = x.abs().amax(-1).reshape(*x.shape[:-1], *[1] * (order + 1))
    return _differences([_derivative(f, k) for k in range(order + 1)], points, scale)


def _differences(f: list[Callable[[Tensor], Tensor]], x: Tensor, scale: Tensor) -> Tensor:
    """Divided differences of points that are sorted along the last dimension."""
    order = x.shape[-1] - 1
    if not order:
        return f[0](x[..., 0])
    low, high = x[..., 0], x[..., -1]
    gap, largest = high - low, torch.maximum(low.abs(), high.abs())
    # Use an integral for near points. Points on both sides of 0 are near only if their gap is small compared to the
    # largest eigenvalue.
    near = torch.where(low * high > 0, gap <= largest / 8, gap <= torch.finfo(x.dtype).eps ** (1 / 3) * scale)
    apart = (_differences(f, x[..., 1:], scale) - _differences(f, x[..., :-1], scale)) / torch.where(near, 1, gap)
    return torch.where(near, _integral(f[order], torch.where(near.unsqueeze(-1), x, x[..., :1])), apart)


def _integral(derivative: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    r"""Hermite-Genocchi integral $\int f^{(k)}(\sum_i t_i x_i)\,dt$ over the simplex, by Gauss-Legendre quadrature."""
    order = x.shape[-1] - 1
    places = np.stack([each.ravel() for each in np.meshgrid(*[np.arange(len(_POINTS))] * order, indexing="ij")])
    # Map the simplex to a cube: t_1 = u_1, t_2 = u_1 u_2 and so on.
    u, powers = _POINTS[places], np.arange(order - 1, -1, -1)[:, None]
    steps = torch.as_tensor(u.cumprod(0).T, dtype=x.dtype, device=x.device)
    weights = torch.as_tensor((_WEIGHTS[places] * u**powers).prod(0), dtype=x.dtype, device=x.device)
    points = x[..., :1] + x.diff(dim=-1) @ steps.mT
    return derivative(points) @ weights


def _derivative(f: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
    if not order:
        return f
    below = _derivative(f, order - 1)
    # Use reverse mode, because torch.autograd.forward_ad does not nest.
    return torch.func.grad(lambda x: below(x).sum())
