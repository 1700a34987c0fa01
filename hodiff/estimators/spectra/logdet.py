"""Log-determinant and effective dimension of a positive (semi-)definite operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_amount
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.results import Estimate
from hodiff.estimators.spectra.quadrature import trace_of_function


def effective_dimension(
    A: Any,
    damping: float,
    *,
    method: str = "slq",
    samples: int = 10,
    steps: int = 50,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Estimate:
    r"""Effective dimension: number of eigenvalues above the damping, with fractions for those near it.

    $$ N(\lambda) = \mathrm{tr}\, A (A + \lambda I)^{-1} = \sum_i \frac{\lambda_i}{\lambda_i + \lambda} $$

    Args:
        A: A symmetric positive semi-definite operator (n, n), as for `trace`. Symmetry is checked.
        damping: The $\lambda$, positive.
        method: "slq", or "exact" for n products and a dense decomposition, which is also used if `samples * steps` is n
            or more.
        samples: Number of random vectors, 2 or more.
        steps: Lanczos steps for each vector.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Chains that run together: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        An `Estimate`: `value`, `standard_error`, `truncation`, `products`, `method`.

    Raises:
        InputError: If A is no symmetric real operator or has eigenvalues below zero by more than rounding, an option is
            out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> effective_dimension(torch.diag(torch.tensor([3.0, 1.0, 0.0])), damping=1.0).value
        1.25

    Source: D. J. C. MacKay, "Bayesian interpolation", Neural Computation 4 (1992), eq. 4.9 (gamma); by quadrature,
    Ubaru, Chen, Saad, SIAM J. Matrix Anal. Appl. 38 (2017).
    """
    view = view_of(A, "effective_dimension", chunk_size=chunk_size, sharded_too=True)
    require_amount("effective_dimension", "damping", damping, positive=True)

    def part(values: Tensor) -> Tensor:
        least = values.min() / values.abs().max()
        if least < -(view.rounding**0.5) and not (view.finds_coarser() and least >= -(view.rounding**0.5)):
            raise InputError(
                "effective_dimension: A: expected a positive semi-definite operator, got one whose eigenvalues reach "
                f"{values.min().item():.6g}; use a Gauss-Newton operator."
            )
        return (values / (values + damping)).clamp(min=0)

    return trace_of_function(view, part, method, samples, steps, generator, progress)


def logdet(
    A: Any,
    *,
    damping: float = 0.0,
    method: str = "slq",
    samples: int = 10,
    steps: int = 50,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Estimate:
    r"""Log-determinant of a positive definite operator, by stochastic Lanczos quadrature.

    $$ \ln \det (A + \lambda I) = \mathrm{tr} \ln (A + \lambda I) $$

    Small eigenvalues that a few Lanczos steps do not reach cause an error beyond chance. `truncation` is the change by
    the last tenth of the steps; a warning reports if it exceeds the standard error.

    Args:
        A: A symmetric operator (n, n), as for `trace`. Symmetry is checked.
        damping: The $\lambda$, 0 or more.
        method: "slq", or "exact" for n products and a dense decomposition, which is also used if `samples * steps` is n
            or more.
        samples: Number of random vectors, 2 or more.
        steps: Lanczos steps for each vector.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Chains that run together: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        An `Estimate`: `value`, `standard_error`, `truncation`, `products`, `method`.

    Raises:
        InputError: If A is no symmetric real operator, $A + \lambda I$ is not positive definite, an option is out of
            range, or a product is not finite.

    Example:
        >>> import torch
        >>> round(logdet(torch.diag(torch.tensor([1.0, 2.0, 5.0]))).value, 6)
        2.302585

    Source: Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
    Appl. 38 (2017), section 3.
    """
    view = view_of(A, "logdet", chunk_size=chunk_size, sharded_too=True)
    require_amount("logdet", "damping", damping)

    def logarithm(values: Tensor) -> Tensor:
        shifted = values + damping
        if not bool((shifted > 0).all()):
            raise InputError(
                f"logdet: A: expected a positive definite operator, got one whose eigenvalues reach "
                f"{shifted.min().item():.6g} with damping={damping:g}; raise damping above {-values.min().item():.6g}."
            )
        return shifted.log()

    return trace_of_function(view, logarithm, method, samples, steps, generator, progress)
