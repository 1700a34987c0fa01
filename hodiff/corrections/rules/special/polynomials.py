r"""Rules for the orthogonal polynomials, by the derivatives of their recurrence.

$$ p_{k+1} = (a_k x + b_k) p_k - c_k p_{k-1}, \qquad
   p_{k+1}^{(m)} = (a_k x + b_k) p_k^{(m)} + m a_k p_k^{(m-1)} - c_k p_{k-1}^{(m)}. $$
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.special.special_functions import in_double, refuse_compiled_transforms
from hodiff.errors import RouteError
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction

Step = Callable[[int], tuple[float, float, float]]


def _chebyshev(k: int) -> tuple[float, float, float]:
    return 2, 0, 1


def _shifted_chebyshev(k: int) -> tuple[float, float, float]:
    return 4, -2, 1


# The first polynomial's slope and value at 0, and a, b and c of the step from k to k + 1.
FAMILIES: dict[str, tuple[float, float, Step]] = {
    "chebyshev_polynomial_t": (1, 0, _chebyshev),
    "chebyshev_polynomial_u": (2, 0, _chebyshev),
    "chebyshev_polynomial_v": (2, -1, _chebyshev),
    "chebyshev_polynomial_w": (2, 1, _chebyshev),
    "shifted_chebyshev_polynomial_t": (2, -1, _shifted_chebyshev),
    "shifted_chebyshev_polynomial_u": (4, -2, _shifted_chebyshev),
    "shifted_chebyshev_polynomial_v": (4, -3, _shifted_chebyshev),
    "shifted_chebyshev_polynomial_w": (4, -1, _shifted_chebyshev),
    "hermite_polynomial_h": (2, 0, lambda k: (2, 0, 2 * k)),
    "hermite_polynomial_he": (1, 0, lambda k: (1, 0, k)),
    "laguerre_polynomial_l": (-1, 1, lambda k: (-1 / (k + 1), (2 * k + 1) / (k + 1), k / (k + 1))),
    "legendre_polynomial_p": (1, 0, lambda k: ((2 * k + 1) / (k + 1), 0, k / (k + 1))),
}


def _derivative(x: Tensor, name: str, degree: Any, order: int) -> Tensor:
    """Derivative of the polynomials of one degree, or of a degree for each element."""
    slope, constant, step = FAMILIES[name]
    # torch's kernels truncate degrees to integers, and return 0 for negative degrees.
    degrees = degree.trunc() if isinstance(degree, Tensor) and degree.is_floating_point() else degree
    top = _greatest(degrees)
    zeros = [torch.zeros_like(x) for _ in range(order + 1)]
    before, now = list(zeros), list(zeros)
    before[0] = torch.ones_like(x)
    now[0] = slope * x + constant
    if order:
        now[1] = torch.full_like(x, slope)
    total = torch.zeros_like(x)

    def taken(total: Tensor, k: int, term: Tensor) -> Tensor:
        if isinstance(degrees, Tensor):
            return torch.where(degrees == k, term, total)
        return term if k == top else total

    total = taken(taken(total, 0, before[order]), 1, now[order])
    for k in range(1, top):
        a, b, c = step(k)
        following = []
        for m in range(order + 1):
            term = (a * x + b) * now[m] - c * before[m]
            following.append(term + (m * a) * now[m - 1] if m else term)
        before, now = now, following
        total = taken(total, k + 1, now[order])
    return total


def _greatest(degrees: Any) -> int:
    if isinstance(degrees, Tensor):
        return int(degrees.max()) if degrees.numel() else 0
    return int(degrees)


class OrthogonalPolynomial(ElementwiseFunction):
    """Derivative of a given order of a polynomial in `FAMILIES`; order 0 is torch's value. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, degree: Any, name: str, order: int) -> Tensor:
        """Compute the value by torch's kernel, and derivatives by the recurrence."""
        if order:
            return in_double(_derivative, x, name, degree, order)
        refuse_compiled_transforms(name)
        kernel: Callable[..., Tensor] = getattr(torch.special, name)
        value = kernel(x, degree)
        # For NaN, torch's kernels return uninitialized memory beyond degree 1.
        return value.masked_fill(x.isnan().logical_and(torch.as_tensor(degree, device=x.device) > 1), torch.nan)

    @staticmethod
    def slope(index: int, x: Tensor, degree: Any, name: str, order: int) -> Tensor:
        """Return the derivative of the next order."""
        if index:
            raise RouteError(
                f"torch.special.{name}: n: a polynomial has no derivative with respect to its degree, which is an "
                "integer. Detach n, or pass it as an int."
            )
        return OrthogonalPolynomial.call(x, degree, name, order + 1)


def _enter(name: str) -> None:
    @register(
        getattr(torch.special, name),
        name=f"torch.special.{name}",
        routes=ROUTES,
        reason="its derivatives are silently zero",
        reference="Abramowitz & Stegun, 22.7, differentiated",
    )
    def _polynomial(input: Any, n: Any, *, out: Tensor | None = None) -> Any:
        if out is not None or not isinstance(input, Tensor) or not input.is_floating_point():
            return UNNEEDED
        return OrthogonalPolynomial.call(input, n, name, 0)


for _name in FAMILIES:
    _enter(_name)
