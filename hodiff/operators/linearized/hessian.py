"""The Hessian of a scalar function as an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from typing_extensions import Unpack

from hodiff.common.keyword_options import explains, shows
from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.graphs_by_form import while_nothing_is_captured
from hodiff.derivatives.hessian_blocks import symmetric_blocks
from hodiff.derivatives.hessian_rows import LinearizedHessian
from hodiff.derivatives.products_by_route import PRODUCTS
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import follow, validate_route
from hodiff.derivatives.steady import steady
from hodiff.operators.linear.restriction import restrict
from hodiff.operators.linearized.curvature import CurvatureOperator
from hodiff.operators.linearized.curvature_options import CurvatureOptions
from hodiff.operators.linearized.kept_linearizations import Leaves, Linearization
from hodiff.operators.linearized.recorded_model import lacks_derivatives
from hodiff.routes import ROUTES


@explains(CurvatureOptions)
class HessianOperator(CurvatureOperator):
    r"""The Hessian of a scalar function at a point, given by its products.

    $$ A v = \nabla^2 f(x)\, v, \qquad\text{over data}\quad
       A = \frac{\sum_b n_b \nabla^2 f_b(x)}{\sum_b n_b} \;\text{("mean")}\quad\text{or}\quad
       A = \sum_b \nabla^2 f_b(x) \;\text{("sum")} $$

    The gradient is recorded on the first product and pulled back by each product, so that products share all work that
    depends only on the point; blocks of vectors are pulled back together. Buffers of modules that `f` closes over do
    not change.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape (); with `data`, `f(x, *args, batch)`.
        x: The point: a tensor or a pytree of tensors, n numbers in all. Leaves that `f` ignores have rows of zeros.
        *args: Further arguments of `f`, taken as constants.
        route: As in `hodiff.hvp`. Routes other than "reverse-over-reverse" share nothing between products.
        **options: Options of all operators at a point.

    Raises:
        InputError: If an argument is invalid; on first use, if `f` does not return one real number, does not depend on
            `x` or is not deterministic, or if the data change between passes.
        RouteError: On first use, if torch does not implement the route, or with "auto" any route.

    Example:
        >>> import torch, hodiff
        >>> A = hodiff.HessianOperator(lambda x: x[0] ** 2 * x[1], torch.tensor([1.0, 2.0]))
        >>> A @ torch.tensor([1.0, 0.0])
        tensor([4., 2.])
        >>> A.to_dense()
        tensor([[4., 2.],
                [2., 0.]])

    Source: B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994), eq. 2.4.
    """

    @shows(CurvatureOptions)
    def __init__(
        self,
        f: Callable[..., Any],
        x: PyTree,
        *args: Any,
        route: str = "auto",
        **options: Unpack[CurvatureOptions],
    ):
        validate_route(route, "HessianOperator")
        self.f = f
        self.route = route
        super().__init__((f,), x, args, **options)

    def block(self, names: str | Sequence[str]) -> HessianOperator:
        """Restrict the operator as in `LinearOperator.block`; products are cheaper, as other leaves are constants."""
        return restrict(self, names, ("f",))

    def _bound(self, leaves: Leaves, args: tuple[Any, ...]) -> BoundFunction:
        return bind(
            "HessianOperator", self.f, (self._tree(leaves), *args), name="x", correct=self.correct, complex_too=True
        )

    def _value(self, args: tuple[Any, ...]) -> Tensor:
        function = self._bound(self.leaves, args)
        return function.one_number(self._evaluate(function))

    def _linearize(self, args: tuple[Any, ...]) -> Linearization:
        function = self._bound(self.leaves, args)

        def attempt(name: str) -> Linearization:
            return _RecordedHessian(function) if name == ROUTES[0] else self._routed(function, name)

        return follow(self.route, "HessianOperator", attempt)

    def _routed(self, function: BoundFunction, route: str) -> Linearization:
        # Each product evaluates the function, which must return the value of the first evaluation.
        seen: list[Tensor] = []
        draw = None if self._draw_seed is None else RandomState(self.leaves)
        function = steady(function, seen) if self._checks else function
        return _RoutedHessian(function, route, self._held_modules, seen, draw)

    def _dense(self, linearization: Linearization, chunk_size: int | str | None, progress: bool) -> Tensor:
        # Blocks of 16-bit leaves would be rounded to 16 bits before they are joined.
        if isinstance(linearization, _RecordedHessian) and all(leaf.dtype.itemsize > 2 for leaf in self.leaves):
            # The operator's own limit on columns applies, as in every product.
            return linearization.matrix(self.chunk_size if chunk_size == "auto" else chunk_size, progress)
        return super()._dense(linearization, chunk_size, progress)

    def _functional(self, leaves: Leaves, tangents: Leaves, args: tuple[Any, ...]) -> Leaves:
        function = self._bound(leaves, args)
        if self.route in ("auto", ROUTES[0]):
            return RecordedGradient(function).product(tangents)
        return PRODUCTS[self.route](function, leaves, tangents)[0]


class _RecordedHessian:
    """A recorded gradient that each product pulls back."""

    def __init__(self, function: BoundFunction):
        self._function = function
        self._gradient = RecordedGradient(function)
        self.bytes_each = self._gradient.bytes_each
        self.nbytes = self.bytes_each // 2
        self.value: Leaves = (self._gradient.value,)
        if lacks_derivatives(*self._gradient.live_edges):
            # If products raise, they must raise now, so that another route is tried.
            self.products(tuple(torch.zeros_like(leaf)[None] for leaf in function.leaves))

    def products(self, tangents: Leaves) -> Leaves:
        """See `Linearization`."""
        if tangents[0].shape[0] != 1:
            return self._gradient.products(tangents)
        return tuple(p[None] for p in self._gradient.product([v[0] for v in tangents], keep=True))

    def matrix(self, chunk_size: int | str | None, progress: bool) -> Tensor:
        """Compute the Hessian; only half of the blocks are computed, and constant rows are not pulled back."""
        options: Any = {"chunk_size": chunk_size, "randomness": "same", "progress": progress}
        linearized = LinearizedHessian(self._function, ROUTES[0], recorded=self._gradient, **options)
        return symmetric_blocks(linearized, joined=True).matrix(self._function.leaves)


class _RoutedHessian:
    """Products by a route that shares no work between products in eager torch."""

    def __init__(
        self,
        function: BoundFunction,
        route: str,
        modules: Sequence[nn.Module],
        value: Sequence[Tensor],
        draw: RandomState | None,
    ):
        self._function = function
        self._draw = draw
        self._held_modules = modules
        self._product = PRODUCTS[route]
        # One product shows whether torch implements the route; the memory of a product is unknown.
        self.products(tuple(torch.zeros_like(leaf)[None] for leaf in function.leaves))
        self.bytes_each = 2**62
        self.nbytes = 0
        self.value = tuple(value)

    def products(self, tangents: Leaves) -> Leaves:
        """See `Linearization`."""

        def product(*one: Tensor) -> Leaves:
            # The function may take a gradient of its own.
            with torch.enable_grad():
                return tuple(p.detach() for p in self._product(self._function, self._function.leaves, one)[0])

        draw = nullcontext() if self._draw is None else self._draw.replayed()
        with while_nothing_is_captured(), untouched(self._held_modules), draw:
            if tangents[0].shape[0] == 1:
                return tuple(p[None] for p in product(*(v[0] for v in tangents)))
            products: Leaves = vmap(product, randomness="same")(*tangents)
            return products
