r"""Many problems of one function, evaluated in one call of `torch.func.vmap`.

The gradient of the sum over problems consists of the problems' gradients, and its Hessian is block-diagonal. n
products with it are therefore the Hessians of all problems:

$$ F(X) = \sum_b f(x_b), \qquad
   \nabla^2 F\,(e_i, \dots, e_i) = (\nabla^2 f(x_1)\, e_i, \dots, \nabla^2 f(x_B)\, e_i) $$

Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., chapter 8, the simplest case of its seeding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.module_state import attributes_put_back
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.products_by_route import PRODUCTS
from hodiff.derivatives.recorded_gradient import RecordedGradient, recorded_value
from hodiff.derivatives.route_choice import follow
from hodiff.operators.linearized.recorded_model import lacks_derivatives
from hodiff.optimize.batched.batch import Batch, InDims, Mapped
from hodiff.recompute.reachable import named_modules
from hodiff.routes import ROUTES


class Problems:
    """Minimisation problems that still run.

    Args:
        caller: Name of the public function, for messages.
        f: User's function of one problem.
        batch: Unknowns of the problems.
        args: Further arguments of `f`.
        in_dims: Dimension of the problems in each argument.

    Attributes:
        start: Starts of all problems, (B, n).
        eps: Machine epsilon of the dtype of the values.
    """

    def __init__(self, caller: str, f: Callable[..., Any], batch: Batch, args: tuple[Any, ...], in_dims: InDims):
        self.start, self.eps = batch.start, torch.finfo(torch.float64).eps
        self._mapped, self._dtype = Mapped(caller, f, batch, args, in_dims), batch.space.dtype
        self._f = f
        bound = bind(caller, self._sum, (self.start.to(self._dtype),), has_aux=True)
        self._function = replace(bound, offers_aux=False)

    def retain(self, keep: Tensor) -> None:
        """Drop the arguments of problems that are not in the mask `keep`."""
        self._mapped.retain(keep)

    def at(self, x: Tensor) -> Together:
        """Record values at x, (b, n), for gradients and Hessians."""
        function = replace(self._function, leaves=(x.to(self._dtype),))
        with torch.no_grad(), attributes_put_back(list(named_modules(self._f))):
            found = Together(function)
        self.eps = found.eps
        return found

    def _sum(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one_number = self._function.one_number
        values = self._mapped.over(x, lambda f: lambda x: one_number(f(x)))
        return values.sum(), values


class Together:
    """Values, gradients and Hessians of many problems at one point each, from one recorded graph.

    Attributes:
        values: (b,), float64.
        gradients: (b, n), float64.
        eps: Machine epsilon of the values' dtype.
    """

    def __init__(self, function: BoundFunction):
        self._function = function
        self._recording = recorded_value(function)
        total, values = self._recording.result
        self.eps = torch.finfo(values.dtype).eps
        self.values = values.detach().to(torch.float64)
        if not total.requires_grad:
            raise function.independent()
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def gradients(self) -> Tensor:
        """Gradients (b, n)."""
        (gradient,) = self._recording.gradients([self._recording.result[0]])
        if gradient is None:
            raise self._function.independent()
        return gradient.detach().to(torch.float64)

    def gradients_and_hessians(self) -> tuple[Tensor, Tensor]:
        """Compute gradients (b, n) and symmetric Hessians (b, n, n)."""
        gradients, hessians = follow("auto", self._function.caller, self._by_route)
        return gradients.to(torch.float64), ((hessians + hessians.mT) / 2).to(torch.float64)

    def _by_route(self, route: str) -> tuple[Tensor, Tensor]:
        function, (x,) = self._function, self._function.leaves
        n = x.shape[1]
        if route != ROUTES[0]:
            columns = [PRODUCTS[route](function, (x,), (_units(i, i + 1, x)[0],))[0][0] for i in range(n)]
            return self.gradients, torch.stack(columns, 1).detach()
        with torch.no_grad():
            recorded = RecordedGradient(function, numbers=True, recording=self._recording)
            if lacks_derivatives(*recorded.live_edges):
                recorded.product((torch.zeros_like(x),), keep=True)
            size = resolve_chunk_size("auto", n, recorded.bytes_each, x.device)
            blocks = [recorded.products((_units(start, stop, x),))[0] for start, stop in spans(n, size)]
        return recorded.gradient[0].detach(), torch.cat(blocks).movedim(0, 1)


def _units(start: int, stop: int, x: Tensor) -> Tensor:
    """Return the unit directions `start` to `stop`, equal for all problems, (stop - start, b, n)."""
    return torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[start:stop, None].expand(-1, len(x), -1)
