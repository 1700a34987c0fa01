"""Trace of a function of a symmetric operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.results import Estimate
from hodiff.estimators.spectra.quadrature import trace_of_function


def trace_of(
    A: Any,
    f: Callable[[Tensor], Tensor],
    *,
    method: str = "slq",
    samples: int = 10,
    steps: int = 50,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Estimate:
    r"""Trace of a function of a symmetric operator, by stochastic Lanczos quadrature.

    $$ \mathrm{tr}\, f(A) = \sum_i f(\lambda_i) \approx
    \frac{n}{m} \sum_{l=1}^{m} \sum_{k=1}^{s} \tau_k^{(l)} f(\theta_k^{(l)}) $$

    For each of m random vectors, s Lanczos steps provide the nodes $\theta$ and weights $\tau$ of a Gauss rule, which
    is exact for polynomials of degree $2 s - 1$. Smooth functions need few steps; near a pole or a jump within the
    spectrum, the rules converge slowly. `standard_error` measures the spread over random vectors, `truncation` the
    change by the last tenth of the steps, and a warning reports if that exceeds the standard error. `logdet`,
    `effective_dimension` and `schatten_norm` also check the domain of their functions.

    Args:
        A: A symmetric operator (n, n), as for `trace`; it may be indefinite. Symmetry is checked.
        f: The function, applied to all nodes at once: a float64 tensor of any shape, to values of the same shape. The
            nodes lie between the smallest and the largest eigenvalue.
        method: "slq", or "exact" for n products and a dense decomposition, which is also used if `samples * steps` is n
            or more.
        samples: Number m of random vectors, 2 or more.
        steps: Number s of Lanczos steps for each vector.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Chains that run together: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        An `Estimate`: `value`, `standard_error`, `truncation`, `products`, `method`.

    Raises:
        InputError: If A is no symmetric real operator, f does not return a real tensor of finite values in the shape of
            its argument, an option is out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> round(trace_of(torch.diag(torch.tensor([0.0, 1.0, 2.0])), torch.exp).value, 4)
        11.1073

    Source: Ubaru, Chen, Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
    Appl. 38 (2017), algorithm 1.
    """
    if not callable(f):
        raise InputError(
            f"trace_of: f: expected a function of the eigenvalues, such as torch.exp, got {type(f).__name__} {f!r}."
        )
    view = view_of(A, "trace_of", chunk_size=chunk_size, sharded_too=True)
    return trace_of_function(view, lambda nodes: _values(f, nodes), method, samples, steps, generator, progress)


def _values(f: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
    """Return the values at the nodes, as real numbers in their shape."""
    values = f(nodes)
    if not isinstance(values, Tensor) or values.shape != nodes.shape or values.is_complex():
        got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"trace_of: f: expected a real tensor of shape {tuple(nodes.shape)} of its argument, got {got}."
        )
    lost = nodes[~values.isfinite()]
    if lost.numel():
        raise InputError(
            f"trace_of: f: expected finite values, got {values[~values.isfinite()][0].item()} at {lost[0].item():.6g}, "
            f"and the eigenvalues reach from {nodes.min().item():.6g} to {nodes.max().item():.6g}; shift A or f."
        )
    return values.to(nodes.dtype)
