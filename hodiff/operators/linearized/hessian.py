"""The Hessian of a scalar function as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.graphs_by_form import while_nothing_is_captured
from hodiff.derivatives.hessian_blocks import symmetric_blocks
from hodiff.derivatives.hessian_rows import LinearizedHessian
from hodiff.derivatives.products_by_route import PRODUCTS
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import follow, require_route
from hodiff.derivatives.steady import steady
from hodiff.graphs import runs_code_of_users
from hodiff.operators.linear.restriction import restrict
from hodiff.operators.linearized.curvature import CurvatureOperator
from hodiff.operators.linearized.curvature_options import CurvatureOptions
from hodiff.operators.linearized.kept_linearizations import Leaves, Linearization
from hodiff.operators.linearized.recorded_model import lacks_derivatives
from hodiff.routes import ROUTES


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
        data: Batches to sum over: a list, a DataLoader or any iterable that yields the same batches in each pass. A
            batch (tensor, tuple or dict) is passed to the function unchanged, after `args`; with a model and a loss it
            replaces `args`, as a pair of inputs and targets or as a whole.
        reduction: Reduction of the function or loss over the examples of a batch. "mean": batches are weighted by their
            number of examples, so that a smaller last batch counts less; "sum": batches are added.
        batch_size: Function that returns the number of examples in a batch. By default, the divisor of the mean in
            torch's loss, which excludes ignored labels, if the operator has such a loss; else the length of the batch's
            first tensor.
        compile: Whether to capture the linearized product as one graph and compile it with `torch.compile`. The first
            product takes seconds and is compared with the eager product; if they disagree, or the function cannot be
            captured, hodiff warns and products run eagerly. `at` reuses the graph, with the tensors that the function
            then closes over; other numbers or modes compile another graph, with the exceptions that
            `hodiff.compile_gradient` lists. "dynamic" leaves the batch size open, which is the first dimension of the
            arguments after the point: another size reuses the graph if the function allows it, and its first product is
            compared with the eager product, too.
        process_group: Process group of `torch.distributed` over whose ranks the operator is summed. Each rank has its
            own `data`, which may be empty, and the same `x` and `v`. Parameters may be sharded over ranks, as DTensors
            or by `fully_shard`: vectors are then sharded, too, and ranks need equally many batches.
        cache: Whether to keep the linearizations of batches for the next product: "auto" keeps as many as
            `memory_budget` allows, True all, False none. Without data the single linearization is always kept.
        memory_budget: Memory for kept linearizations in bytes, 1 GiB by default; a linearization counts with the size
            of its intermediate results.
        chunk_size: Number of columns of a block that are multiplied together: a positive int, None for all, or "auto"
            for as many as keep intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.
        check_deterministic: Whether to evaluate the function twice on a batch at the first use, and to refuse a
            function whose values differ; the error names dropout, batch norm or other state as the cause. Batches that
            are not kept are compared from pass to pass.
        randomness: Treatment of random numbers in the function: "error", or "fixed" for the curvature of one draw, such
            as of the dropout masks in training mode. Each batch has its own draw, which is the same in all products and
            at all points. The operator draws a seed when it is constructed, and otherwise leaves torch's generators
            unchanged.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones, as in `hodiff.hvp`.

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

    def __init__(
        self,
        f: Callable[..., Any],
        x: PyTree,
        *args: Any,
        route: str = "auto",
        data: Iterable[PyTree] | None = None,
        reduction: str = "mean",
        batch_size: Callable[[PyTree], int] | None = None,
        compile: bool | str = False,
        process_group: Any = None,
        cache: bool | str = "auto",
        memory_budget: int = 2**30,
        chunk_size: int | str | None = "auto",
        check_deterministic: bool = True,
        randomness: str = "error",
        progress: bool = False,
        correct: bool = True,
    ):
        require_route("HessianOperator", route)
        self.f = f
        self.route = route
        options = CurvatureOptions(
            type(self).__name__,
            data=data,
            reduction=reduction,
            batch_size=batch_size,
            compile=compile,
            process_group=process_group,
            cache=cache,
            memory_budget=memory_budget,
            chunk_size=chunk_size,
            check_deterministic=check_deterministic,
            randomness=randomness,
            progress=progress,
            correct=correct,
        )
        super().__init__((f,), x, args, options)

    def block(self, names: str | Sequence[str]) -> HessianOperator:
        """Restrict the operator as in `LinearOperator.block`; products are cheaper, as other leaves are constants."""
        self.domain.require_whole("block", "an operator whose x has only these parameters")
        return restrict(self, names, ("f",))

    def _bound(self, leaves: Leaves, args: tuple[Any, ...]) -> BoundFunction:
        return bind(
            "HessianOperator",
            self.f,
            (self._tree(leaves), *args),
            name="x",
            correct=self.correct,
            complex_too=True,
            sharded_too=True,
            weight=self._weight,
        )

    def _value(self, args: tuple[Any, ...]) -> Tensor:
        function = self._bound(self.leaves, args)
        return function.one_number(self._evaluate(function))

    def _linearize(self, args: tuple[Any, ...]) -> Linearization:
        function = self._bound(self.leaves, args)

        def attempt(name: str) -> Linearization:
            function.require_route(name)
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
            size = self.chunk_size if chunk_size == "auto" else chunk_size
            return linearization.matrix(size, progress, self._threads(linearization))
        return super()._dense(linearization, chunk_size, progress)

    def _diagonal(self, linearization: Linearization, chunk_size: int | str | None, progress: bool) -> Tensor:
        if not isinstance(linearization, _RecordedHessian):
            return super()._diagonal(linearization, chunk_size, progress)
        return self.domain.join(linearization.diagonal(chunk_size, progress), 1)[:, 0]

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
        return tuple([p.unsqueeze(0) for p in self.product([v.squeeze(0) for v in tangents])])

    def product(self, tangents: Sequence[Tensor]) -> Leaves:
        """Multiply one vector."""
        return self._gradient.product(tangents, keep=True)

    @cached_property
    def allows_threads(self) -> bool:
        """Whether several threads may pull back at once: only torch's and hodiff's code runs, on a CPU."""
        on_cpu = all(leaf.device.type == "cpu" for leaf in self._function.leaves)
        return on_cpu and self._function.sharded is None and not runs_code_of_users(*self._gradient.live_edges)

    def matrix(self, chunk_size: int | str | None, progress: bool, threads: int) -> Tensor:
        """Compute the Hessian; only half of the blocks are computed, and constant rows are not pulled back."""
        rows = self._rows(chunk_size, progress, threads)
        return symmetric_blocks(rows, joined=True).matrix(self._function.leaves)

    def diagonal(self, chunk_size: int | str | None, progress: bool) -> list[Tensor]:
        """Compute the diagonal, (1, numbers) for each leaf; rows are pulled back only to their own leaf."""
        leaves = self._function.leaves
        found = [torch.zeros(1, leaf.numel(), dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
        for index, start, stop, (rows,) in self._rows(chunk_size, progress).groups([
            (i, (i,)) for i, edge in enumerate(self._gradient.edges) if edge is not None
        ]):
            found[index][0, start:stop] = rows.reshape(stop - start, -1)[:, start:stop].diagonal()
        return found

    def _rows(self, chunk_size: int | str | None, progress: bool, threads: int = 1) -> LinearizedHessian:
        options: Any = {"chunk_size": chunk_size, "randomness": "same", "progress": progress, "threads": threads}
        return LinearizedHessian(self._function, ROUTES[0], recorded=self._gradient, **options)


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
