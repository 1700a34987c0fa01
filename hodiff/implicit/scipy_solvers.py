"""Solvers for roots and minimisers: SciPy's, with exact derivatives, and optimizers of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from tqdm.auto import trange

from hodiff.common.options import require_bool, require_callable, require_choice, require_int, require_number
from hodiff.common.trees import PyTree
from hodiff.derivatives import hessian_matrix, hvp, jacobian
from hodiff.implicit.solver_call import Ravel
from hodiff.implicit.sparse_matrices import Gradient


def torch_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = 1000,
    tol: float = 0.0,
    progress: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    r"""Minimise with an optimizer of `torch.optim`, for a number of steps or until the gradient is small.

    Args:
        optimizer: The class, or any function that makes an optimizer from a list of tensors. Optimizers that take a
            closure, such as `torch.optim.LBFGS`, get one.
        steps: Maximum number of steps.
        tol: Norm of the gradient, relative to $\max(1, \lVert x \rVert)$, at which the run ends.
        progress: Whether to show a progress bar.
        **options: Passed to `optimizer`, for example `lr=0.1`.

    Returns:
        Solver `(objective, x0, *params) -> x` for `hodiff.implicit.argmin`.

    Raises:
        InputError: If an option is invalid.

    Example:
        >>> import torch
        >>> solver = torch_optimizer(torch.optim.SGD, steps=100, lr=0.25)
        >>> solver(lambda x, p: ((x - p) ** 2).sum(), torch.zeros(2), torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    require_callable("torch_optimizer", optimizer=optimizer)
    require_int("torch_optimizer", "steps", steps, 1)
    require_number("torch_optimizer", "tol", tol, nonnegative=True)
    require_bool("torch_optimizer", "progress", progress)

    def run(objective: Callable[..., Tensor], x0: PyTree, *params: Any) -> PyTree:
        ravel = Ravel(x0)
        x = [each.detach().clone().requires_grad_() for each in ravel.like]
        method = optimizer(x, **options)
        value_of = Gradient("torch_optimizer", objective).value

        def loss() -> Any:
            method.zero_grad()
            value = value_of(ravel.spec.unflatten(x), *params)
            # .backward() would add to the gradients of tensors that the objective closes over.
            for each, slope in zip(x, torch.autograd.grad(value, x, materialize_grads=True), strict=True):
                each.grad = slope
            return value

        with torch.enable_grad():
            for _ in trange(steps, disable=not progress, desc="torch_optimizer"):
                if tol > 0:
                    loss()
                    slope = ravel.vector([each.grad for each in x])
                    if not slope.norm() > tol * max(1.0, ravel.vector(x).norm().item()):
                        break
                method.step(loss)
        return ravel.spec.unflatten([each.detach() for each in x])

    return run


# Derivatives that the methods of scipy.optimize use; other methods would warn about them.
_WITH_JACOBIAN = {"hybr", "lm"}
_WITHOUT_GRADIENT = {"nelder-mead", "powell", "cobyla", "cobyqa"}
_WITH_PRODUCTS = {"newton-cg", "trust-ncg", "trust-krylov", "trust-constr"}
_WITH_HESSIAN = {"dogleg", "trust-exact"}
_ROOT_METHODS = {
    *("hybr", "lm", "broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing", "krylov"),
    "df-sane",
}
_MINIMIZE_METHODS = {
    *(_WITHOUT_GRADIENT | _WITH_PRODUCTS | _WITH_HESSIAN),
    *("cg", "bfgs", "l-bfgs-b", "tnc", "slsqp"),
}


def scipy_root(method: str = "hybr", *, tol: float | None = None, **options: Any) -> Callable[..., Any]:
    r"""Solve $r(x) = 0$ by `scipy.optimize.root`, with exact Jacobians if the method uses them.

    SciPy computes in float64 on the CPU; the residual is evaluated in the dtype and on the device of `x0`.

    Args:
        method: Method, as in SciPy.
        tol: Tolerance, as in SciPy; by default $10^{-12}$.
        **options: Further options of the method, as in SciPy's `options`.

    Returns:
        Solver `(residual, x0, *params) -> x` for `hodiff.implicit.root`, which reports if the result is no root.

    Raises:
        InputError: If the method is unknown.

    Example:
        >>> import torch
        >>> scipy_root()(lambda x, p: x**3 - p, torch.tensor(1.0), torch.tensor(8.0)).round(decimals=4)
        tensor(2.)

    Source: `scipy.optimize.root`.
    """
    require_choice("scipy_root", "method", method.lower() if isinstance(method, str) else method, sorted(_ROOT_METHODS))
    require_number("scipy_root", "tol", tol, nonnegative=True, optional=True)

    def run(residual: Callable[..., PyTree], x0: PyTree, *params: Any) -> PyTree:
        point = _Point(x0)

        def value(x: Tensor) -> Tensor:
            return point.ravel.residual(residual(point.ravel.tree(x), *params), "scipy_root")

        known = {"jac": point.on_arrays(jacobian(value))} if method in _WITH_JACOBIAN else {}
        found = _quietly(
            scipy.optimize.root,
            point.on_arrays(value),
            point.start,
            method=method,
            tol=tol or 1e-12,
            options=options,
            **known,
        )
        return point.tree(found.x)

    return run


def scipy_minimize(
    method: str = "trust-exact", *, tol: float | None = None, bounds: Any = None, constraints: Any = (), **options: Any
) -> Callable[..., Any]:
    r"""Minimise by `scipy.optimize.minimize`, with the exact gradients, Hessians or products that the method uses.

    SciPy computes in float64 on the CPU; the objective is evaluated in the dtype and on the device of `x0`.

    Args:
        method: Method, as in SciPy. "trust-exact" uses the whole Hessian, "trust-krylov" products with it, and
            "L-BFGS-B" gradients.
        tol: Tolerance, as in SciPy; by default $10^{-10}$.
        bounds: Bounds, as in SciPy, of the elements of x in pytree order.
        constraints: Constraints, as in SciPy. Implicit differentiation of `argmin` assumes a minimum in the interior;
            see `hodiff.implicit.equality_argmin` and `projected_argmin` for other minima.
        **options: Further options of the method, as in SciPy's `options`.

    Returns:
        Solver `(objective, x0, *params) -> x` for `hodiff.implicit.argmin`, which reports if the result is not
        stationary.

    Raises:
        InputError: If the method is unknown.

    Example:
        >>> import torch
        >>> objective = lambda x, p: (1 - x[0]) ** 2 + p * (x[1] - x[0] ** 2) ** 2
        >>> scipy_minimize()(objective, torch.zeros(2), torch.tensor(100.0)).round(decimals=4)
        tensor([1., 1.])

    Source: `scipy.optimize.minimize`.
    """
    name = method.lower() if isinstance(method, str) else method
    require_choice("scipy_minimize", "method", name, sorted(_MINIMIZE_METHODS))
    require_number("scipy_minimize", "tol", tol, nonnegative=True, optional=True)

    def run(objective: Callable[..., Tensor], x0: PyTree, *params: Any) -> PyTree:
        point = _Point(x0)

        slope = Gradient("scipy_minimize", lambda x: objective(point.ravel.tree(x), *params))
        value = slope.value
        known: dict[str, Any] = {"bounds": bounds, "constraints": constraints}
        if name not in _WITHOUT_GRADIENT:
            known["jac"] = point.on_arrays(slope)
        if name in _WITH_PRODUCTS:
            known["hessp"] = lambda x, v: point.on_arrays(lambda x: hvp(value, x, point.tensor(v)))(x)
        if name in _WITH_HESSIAN:
            known["hess"] = point.on_arrays(lambda x: hessian_matrix(value, x))
        found = _quietly(
            scipy.optimize.minimize,
            point.on_arrays(value),
            point.start,
            method=method,
            tol=tol or 1e-10,
            options=options,
            **known,
        )
        return point.tree(found.x)

    return run


class _Point:
    """Conversion between the unknowns and SciPy's arrays."""

    def __init__(self, x0: PyTree):
        self.ravel = Ravel(x0)
        self.device = self.ravel.like[0].device
        self.start = self._array(self.ravel.vector(x0))

    def on_arrays(self, f: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], Any]:
        return lambda x: self._array(f(self.tensor(x)))

    def tensor(self, x: np.ndarray) -> Tensor:
        """Convert an array to a vector of the dtype and device of the unknowns."""
        return torch.from_numpy(np.array(x)).to(self.device, self.ravel.dtype)

    def tree(self, x: np.ndarray) -> PyTree:
        return self.ravel.tree(self.tensor(x))

    @staticmethod
    def _array(x: Tensor) -> Any:
        found = x.detach().to("cpu", torch.float64).numpy()
        return found if found.ndim else float(found)


def _quietly(solve: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call without NumPy's warnings about failed steps; the final residual decides."""
    with np.errstate(all="ignore"):
        return solve(*args, **kwargs)
