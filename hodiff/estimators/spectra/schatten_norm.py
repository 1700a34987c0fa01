"""Schatten norms of a symmetric operator, such as the nuclear norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_number
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.results import Estimate
from hodiff.estimators.spectra.quadrature import trace_of_function


def schatten_norm(
    A: Any,
    p: float = 1.0,
    *,
    method: str = "slq",
    samples: int = 10,
    steps: int = 50,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Estimate:
    r"""Schatten norm of a symmetric operator, by stochastic Lanczos quadrature; the nuclear norm for p = 1.

    $$ \|A\|_p = \left( \mathrm{tr}\, |A|^p \right)^{1/p} = \Big( \sum_i |\lambda_i|^p \Big)^{1/p} $$

    The nuclear norm minus the trace, halved, is the sum of the absolute values of the negative eigenvalues: how far a
    Hessian is from positive semi-definite. For p = 2, `frobenius_norm` needs fewer products. For an operator A that is
    not symmetric, $\|A\|_p^2 = \|A^T A\|_{p/2}$, for p from 2 on. Quadrature converges fast if A is definite, slowly
    if p is small and many eigenvalues on both sides of 0 are small: `truncation` is the change by the last tenth of the
    steps, and a warning reports if it exceeds the standard error.

    Args:
        A: A symmetric operator (n, n), as for `trace`; it may be indefinite. Symmetry is checked.
        p: Exponent, 1 or more.
        method: "slq", or "exact" for n products and a dense decomposition, which is also used if `samples * steps` is n
            or more.
        samples: Number of random vectors, 2 or more.
        steps: Lanczos steps for each vector.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Chains that run together: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        An `Estimate`: `value`, `standard_error`, `truncation`, `products`, `method`. The errors are propagated from
        those of the sum, to first order.

    Raises:
        InputError: If A is no symmetric real operator, an option is out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.tensor([3.0, -4.0, 0.0]))
        >>> schatten_norm(A).value, schatten_norm(A, 2).value
        (7.0, 5.0)

    Source: Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
    Appl. 38 (2017), with Schatten norms as an example.
    """
    view = view_of(A, "schatten_norm", chunk_size=chunk_size, sharded_too=True)
    require_number("schatten_norm", "p", p, finite=True)
    if p < 1:
        raise InputError(f"schatten_norm: p: expected 1 or more, got {p!r}; p=1 is the nuclear norm.")
    scale = 0.0

    def power(values: Tensor) -> Tensor:
        # The powers of the numbers themselves may overflow.
        nonlocal scale
        scale = scale or values.abs().max().item()
        return (values.abs() / scale) ** p if scale else values.abs()

    total = trace_of_function(view, power, method, samples, steps, generator, progress)
    if not total.value:
        return total
    value = scale * total.value ** (1 / p)
    slope = value / (p * total.value)
    return replace(total, value=value, standard_error=slope * total.standard_error, truncation=slope * total.truncation)
