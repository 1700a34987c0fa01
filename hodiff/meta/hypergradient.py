"""Gradients of an outer loss with respect to hyperparameters, through the minimum of an inner loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.module_state import at_another_point
from hodiff.common.options import (
    require_amount,
    require_callable,
    require_choice,
    require_generator,
    require_int,
    require_number,
)
from hodiff.common.ordinary import ordinary
from hodiff.common.trees import PyTree, describe, flatten_primals, leaf_label, leaf_names
from hodiff.corrections import Corrections
from hodiff.displays import SHOWN, element, facts, number, numbers, page, table
from hodiff.distributed.layouts import require_ordinary
from hodiff.errors import HodiffWarning, InputError, RouteError
from hodiff.meta.adaptation import adapt
from hodiff.meta.inverse_products import (
    CG_STEPS,
    InnerHessian,
    Inverse,
    by_conjugate_gradients,
    by_neumann_series,
    by_nystrom,
    norm,
    pulled,
)
from hodiff.meta.nonfinite import NonFiniteError
from hodiff.meta.optimizer import Optimizer, require_optimizer
from hodiff.meta.sgd import SGD
from hodiff.rules.any_order import outside_graphs
from hodiff.torch_internals.autograd.transforms import in_transform

# Rule, default number of iterations or columns, and default tolerance of the relative residual.
INVERSES: dict[str, tuple[Callable[..., Inverse], int, float]] = {
    "implicit-cg": (by_conjugate_gradients, CG_STEPS, 1e-6),
    "neumann": (by_neumann_series, 500, 1e-3),
    "nystrom": (by_nystrom, 20, 1e-6),
}
METHODS = ("unroll", *INVERSES)
# Maximum number of products for the estimate of the error.
ERROR_STEPS = 20


@dataclass(eq=False)
class Hypergradient:
    """Hypergradient with estimates of its error.

    Attributes:
        value: Gradient of the outer loss, with the structure of the hyperparameters, without a graph.
        params: Assumed minimum of the inner loss; for "unroll" the parameters after the last step.
        outer: Outer loss at `params`.
        error_estimate: Estimated norm of the error of `value`. For the linear system, some steps of conjugate gradients
            estimate the error of the undamped solution; it is infinite if the inner Hessian is not positive definite.
            For "unroll", it is extrapolated from the value after half as many steps.
        residual: Relative residual of the linear system; for "unroll", the ratio of the inner gradient's norms at the
            end and at the start.
        outer_error: First-order estimate of the change of the outer loss on the way to the true minimum; for "unroll",
            extrapolated from half the steps.
        products: Number of products with the inner Hessian; for "unroll", number of differentiated steps.
    """

    value: PyTree
    params: PyTree
    outer: float
    error_estimate: float
    residual: float
    outer_error: float
    products: int

    def _repr_html_(self) -> str:
        names = [leaf_label(name) or "value" for name in leaf_names(self.value)]
        leaves = [(name, numbers(leaf)) for name, leaf in zip(names, pytree.tree_leaves(self.value), strict=True)]
        known = [
            ("estimated norm of its error", number(self.error_estimate, 2)),
            ("outer loss", number(self.outer)),
            ("its estimated error", number(self.outer_error, 2)),
            ("residual", number(self.residual, 2)),
            ("products", f"{self.products:,}"),
        ]
        return page(element("b", "hypergradient"), table(("of", "numbers"), leaves, most=SHOWN), facts(known))


@outside_graphs
def hypergradient(
    outer: Callable[[Any, Any], Tensor],
    inner: Callable[[Any, Any], Tensor],
    params: PyTree,
    hyper: PyTree,
    method: str = "implicit-cg",
    *,
    iterations: int | None = None,
    tolerance: float | None = None,
    damping: float = 0.0,
    step: float | None = None,
    steps: int = 100,
    optimizer: Optimizer | None = None,
    generator: torch.Generator | None = None,
) -> Hypergradient:
    r"""Compute the gradient of an outer loss in hyperparameters, through the minimum of an inner loss.

    $$ \frac{d}{d\phi} F(\theta^*(\phi), \phi) = \partial_\phi F
       - \partial_\phi \partial_\theta G \, (\partial_\theta^2 G + \rho I)^{-1} \partial_\theta F, \qquad
       \theta^*(\phi) = \arg\min_\theta G(\theta, \phi) $$

    "implicit-cg" solves by conjugate gradients, and "neumann" sums $\alpha \sum_k (I - \alpha \partial_\theta^2 G)^k$.
    "nystrom" preconditions conjugate gradients by a low-rank approximation from random columns. These methods need
    `params` at the minimum. "unroll" starts at `params` and differentiates steps of an optimizer.

    Args:
        outer: $F(\theta, \phi)$, a tensor of shape `()`.
        inner: $G(\theta, \phi)$, a tensor of shape `()`.
        params: $\theta$, a tensor or pytree of real floating-point tensors.
        hyper: $\phi$, likewise.
        method: "unroll", "implicit-cg", "neumann" or "nystrom".
        iterations: Maximum number of conjugate gradient steps (100), series terms (500) or columns (20).
        tolerance: Relative residual of the linear system that counts as solved: 1e-6, and 1e-3 for "neumann"; a
            `HodiffWarning` reports if it is not reached.
        damping: $\rho$.
        step: $\alpha$ of "neumann"; by default 0.9 over the largest eigenvalue, from 20 products.
        steps: Number of steps of "unroll".
        optimizer: Functional optimizer of "unroll"; by default `SGD(0.01)`.
        generator: Source of the random columns of "nystrom" and of the power iteration of "neumann".

    Returns:
        Hypergradient with its error estimates.

    Raises:
        InputError: If an argument is invalid, the inner loss does not depend on the parameters, or the outer loss
            depends neither on them nor on the hyperparameters, or has no path to the latter.
        RouteError: Inside a `torch.func` transform, which would lose the derivative of the result.
        NonFiniteError: If the inner loop of "unroll" or the result is not finite.

    Example:
        >>> import torch
        >>> inner = lambda w, weight: ((w - 1) ** 2 + weight * w**2).sum()
        >>> weight = torch.tensor(1.0)
        >>> result = hypergradient(lambda w, _: w.sum(), inner, torch.tensor([0.5]), weight)
        >>> result.value  # of 1 / (1 + weight)
        tensor(-0.2500)

    Source: J. Lorraine, P. Vicol, D. Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation",
    2020, eq. 2 and 4; R. Hataya & M. Yamada, "Nyström method for accurate and scalable implicit differentiation",
    2023, eq. 6, which is the preconditioner here; unrolling: L. Franceschi et al., "Forward and reverse gradient-based
    hyperparameter optimization", 2017.
    """
    require_callable("hypergradient", outer=outer, inner=inner)
    require_choice("hypergradient", "method", method, METHODS)
    require_int("hypergradient", "iterations", iterations, 1, optional=True)
    require_number("hypergradient", "tolerance", tolerance, nonnegative=True, optional=True)
    require_amount("hypergradient", "damping", damping)
    require_number("hypergradient", "step", step, positive=True, optional=True)
    require_int("hypergradient", "steps", steps, 1)
    require_generator("hypergradient", "generator", generator)
    if optimizer is not None:
        require_optimizer("hypergradient", optimizer)
    if in_transform():
        raise RouteError(
            "hypergradient: expected a call outside of torch.func transforms, got one inside, where its result would "
            "be a constant; call it outside of transforms, and differentiate hodiff.implicit.argmin instead."
        )
    problem = _BilevelProblem(outer, inner, params, hyper)
    if method == "unroll":
        return _unrolled(problem, steps, SGD(0.01) if optimizer is None else optimizer)
    make, default_iterations, default_tolerance = INVERSES[method]
    tolerance = default_tolerance if tolerance is None else tolerance
    result = _implicit(
        problem, damping, lambda H: make(H, iterations or default_iterations, tolerance, step, generator)
    )
    # NaN fails this test, too.
    if not result.residual <= tolerance:
        warnings.warn(
            f"hypergradient: {method} left a relative residual of {result.residual:.1e}, above "
            f"tolerance={tolerance:g}; error_estimate has an estimate of the resulting error. Raise iterations, or "
            "damping if the inner Hessian is not positive definite.",
            HodiffWarning,
            stacklevel=2,
        )
    if result.outer_error > 1e-2 * abs(result.outer):
        warnings.warn(
            "hypergradient: params is not at the minimum of inner: until the minimum, the outer loss "
            f"{result.outer:.3g} "
            f"would change by about {result.outer_error:.1e}; minimise inner further, or use method='unroll'.",
            HodiffWarning,
            stacklevel=2,
        )
    return result


class _BilevelProblem:
    """Outer and inner loss at a point, with new leaves."""

    def __init__(self, outer: Callable[..., Any], inner: Callable[..., Any], params: PyTree, hyper: PyTree):
        self.outer, self.inner = outer, inner
        leaves, self.spec = flatten_primals(params, "hypergradient", "params")
        hypers, self.hyper_spec = flatten_primals(hyper, "hypergradient", "hyper")
        require_ordinary("hypergradient", params=params, hyper=hyper)
        self.leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        self.hypers = [leaf.detach().requires_grad_() for leaf in hypers]
        self.params = pytree.tree_unflatten(self.leaves, self.spec)
        self.hyper = pytree.tree_unflatten(self.hypers, self.hyper_spec)

    @at_another_point
    def evaluate(self, name: str, params: PyTree) -> Tensor:
        value = getattr(self, name)(params, self.hyper)
        if not (isinstance(value, Tensor) and value.shape == () and value.is_floating_point()):
            raise InputError(
                f"hypergradient: {name}: expected a real tensor of shape (), got {describe(value)}; reduce it with "
                ".sum() or .mean()."
            )
        if not value.requires_grad:
            raise InputError(
                f"hypergradient: {name}: expected a loss that depends on the parameters or hyperparameters, got one "
                "that does not; look for .detach(), .item(), NumPy code or torch.no_grad()."
            )
        return value


def _implicit(problem: _BilevelProblem, damping: float, make: Callable[[InnerHessian], Inverse]) -> Hypergradient:
    with torch.enable_grad(), Corrections():
        value = problem.evaluate("outer", problem.params)
        both = [*problem.leaves, *problem.hypers]
        found = torch.autograd.grad(value, both, allow_unused=True)
        G = problem.evaluate("inner", problem.params)
        slopes = torch.autograd.grad(G, problem.leaves, create_graph=True, allow_unused=True)
    count = len(problem.leaves)
    _require_dependence(slopes, "inner: expected a loss that depends on params")
    _require_dependence(found[:count], "outer: expected a loss that depends on params")
    slopes = tuple(torch.zeros_like(x) if s is None else s for s, x in zip(slopes, problem.leaves, strict=True))
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(found, both, strict=True)]
    of_params, direct = filled[:count], filled[count:]
    H = InnerHessian(slopes, problem.leaves, damping)
    solve = make(H)
    x = solve(of_params)
    left = [b - Hx for b, Hx in zip(of_params, H(x), strict=True)]
    mixed = pulled(slopes, problem.hypers, x)
    if not any(g is not None for g in found[count:]) and not any(each.any() for each in mixed) and norm(x) > 0:
        _require_path(slopes, problem.hypers)
    result = [d - m for d, m in zip(direct, mixed, strict=True)]
    # A few steps of conjugate gradients estimate the error for any method. The damping adds an error of the derivative
    # of the minimum, which is included.
    amiss = [rest + damping * each for rest, each in zip(left, x, strict=True)]
    error = by_conjugate_gradients(H, ERROR_STEPS, 0.1, None, None)(amiss)
    # Conjugate gradients stop at once if the Hessian is not positive definite, and give no estimate.
    known = norm(error) > 0 or norm(amiss) == 0
    scale = norm(of_params)
    outer_error = torch.stack([(s.detach() * each).sum() for s, each in zip(slopes, x, strict=True)]).sum()
    for name, tensors in (("gradient of outer", filled), ("gradient of inner", slopes), ("result", result)):
        if not all(each.isfinite().all() for each in tensors):
            raise NonFiniteError(f"hypergradient: the {name} is not finite at params.")
    return Hypergradient(
        value=pytree.tree_unflatten(list(ordinary(result, problem.hypers)), problem.hyper_spec),
        params=pytree.tree_map(Tensor.detach, problem.params),
        outer=float(value.detach()),
        error_estimate=norm(pulled(slopes, problem.hypers, error)) if known else math.inf,
        residual=norm(left) / scale if scale else 0.0,
        outer_error=abs(float(outer_error)),
        products=H.products,
    )


def _unrolled(problem: _BilevelProblem, steps: int, optimizer: Optimizer) -> Hypergradient:
    def after(count: int) -> tuple[list[Tensor | None], PyTree, float, float]:
        with torch.enable_grad():
            params = adapt(problem.inner, problem.params, problem.hyper, optimizer, count)
            with Corrections():
                value = problem.evaluate("outer", params)
            gradient = torch.autograd.grad(value, problem.hypers, allow_unused=True)
        return list(gradient), pytree.tree_map(Tensor.detach, params), float(value.detach()), slope(params)

    def slope(params: PyTree) -> float:
        leaves = [leaf.detach().requires_grad_() for leaf in pytree.tree_leaves(params)]
        with torch.enable_grad(), Corrections():
            G = problem.evaluate("inner", pytree.tree_unflatten(leaves, problem.spec))
            return norm(torch.autograd.grad(G, leaves, materialize_grads=True))

    whole, params, outer, slope_at_end = after(steps)
    _require_dependence(whole, "outer: expected a loss that hyper can reach, by itself or through inner")
    half, _, outer_before, slope_before = after(steps // 2)
    value = [torch.zeros_like(x) if g is None else g for g, x in zip(whole, problem.hypers, strict=True)]
    change = [v if h is None else v - h for v, h in zip(value, half, strict=True)]
    # If every further half reduces the gradient by the last ratio, the remaining changes are a geometric series.
    ratio = slope_at_end / slope_before if slope_before else 0.0
    rest = ratio / (1 - ratio) if ratio < 0.5 else 1.0
    start = slope(problem.params)
    return Hypergradient(
        value=pytree.tree_unflatten(list(ordinary(value, problem.hypers)), problem.hyper_spec),
        params=params,
        outer=outer,
        error_estimate=rest * norm(change),
        residual=slope_at_end / start if start else 0.0,
        outer_error=rest * abs(outer - outer_before),
        products=steps + steps // 2,
    )


def _require_dependence(gradients: Any, what: str) -> None:
    if all(each is None for each in gradients):
        raise InputError(
            f"hypergradient: {what}, got one that does not; look for .detach(), .item(), NumPy code or torch.no_grad()."
        )


def _require_path(slopes: Any, hypers: list[Tensor]) -> None:
    alive = [each for each in slopes if each.requires_grad]
    found = torch.autograd.grad(
        alive, hypers, [torch.ones_like(s) for s in alive], retain_graph=True, allow_unused=True
    )
    _require_dependence(
        found, "hyper: expected hyperparameters that the outer loss can reach, by itself or through inner"
    )
