"""Jacobians, with the mode chosen from the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from hodiff.common.chunks import ByteCount, resolve_chunk_size, spans
from hodiff.common.trees import PyTree, describe, has_strides, leaf_names, one_hot_rows
from hodiff.derivatives.bound_function import BoundFunction, at_the_boundary, bind
from hodiff.derivatives.dense import validate_options
from hodiff.derivatives.products_by_route import Leaves, pull, push
from hodiff.derivatives.recorded_gradient import pull_batch
from hodiff.derivatives.route_choice import follow
from hodiff.derivatives.steady import steady
from hodiff.errors import InputError
from hodiff.recompute.reachable import draw_of

MODES = ("reverse", "forward")

# A tangent costs twice a cotangent in eager torch, so forward mode must save directions to pay. It also computes
# the primal again, at 60 microseconds or more for each operator called with duals under vmap. In that time a
# pullback processes half a megabyte of results, or twenty times as many bytes that products read.
_FORWARD_PAYS_BELOW = 0.5
_BYTES_IN_A_CALL, _READ_IN_A_BYTE = 500_000, 20


def jacobian(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    mode: str = "auto",
    chunk_size: int | str | None = "auto",
    has_aux: bool = False,
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> Callable[..., PyTree]:
    r"""Build a function that computes the Jacobian of a function; it returns what `torch.func.jacrev` returns.

    $$ J_{ij} = \frac{\partial f_i}{\partial x_j} $$

    Args:
        f: Function that returns a tensor or a pytree of tensors, or `(output, aux)` with `has_aux`.
        argnums: Which positional arguments to differentiate: an int, or a tuple of ints.
        mode: "reverse" pulls one cotangent back for each output number, from one recorded primal; "forward" pushes one
            tangent for each input number, and computes the primal once for each group. "auto" chooses forward mode if
            the inputs number less than half the outputs, and the saved directions outweigh the cost of the primal,
            which is high for many small operators. If torch does not implement the chosen mode, "auto" uses the other.
        chunk_size: Directions in a group, as in `hodiff.hessian`.
        has_aux: Whether `f` returns `(output, aux)`, aux a pytree of tensors.
        randomness: As in `hodiff.hessian`; matters in forward mode only.
        progress: Whether to show a progress bar over the directions.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns, for each output tensor, a tree in the structure of the
        differentiated argument with entries of shape `(*output.shape, *input.shape)`; with `has_aux`, the pair of that
        and aux. It raises `InputError` for leaves that cannot be differentiated and outputs that depend on none of
        them, and `RouteError` where torch implements neither mode.

    Raises:
        InputError: If the mode, chunk size or randomness is unknown.

    Example:
        >>> import torch, hodiff
        >>> hodiff.jacobian(lambda x: torch.stack([x.prod(), x.sum()]))(torch.tensor([2.0, 3.0]))
        tensor([[3., 2.],
                [1., 1.]])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., sections 3.1 and 3.2.
    """
    if mode not in ("auto", *MODES):
        raise InputError(f"jacobian: unknown mode {mode!r}; expected 'auto', 'forward' or 'reverse'.")
    validate_options("jacobian", argnums, "auto", chunk_size, randomness, progress)

    @at_the_boundary
    def jacobian_of_f(*args: Any, **kwargs: Any) -> PyTree:
        function = bind("jacobian", f, args, kwargs, argnums, has_aux=has_aux, correct=correct)
        linearized = follow("auto", "jacobian", lambda _: _Linearized(function, randomness), MODES[:1])
        order = MODES
        if mode == "auto":  # compiled code is compiled again where the comparison of sizes comes out otherwise
            order = MODES[::-1] if linearized.forward_pays else MODES

        def assemble(name: str) -> list[list[Tensor]]:
            columns = linearized.by_reverse if name == "reverse" else linearized.by_forward
            return columns(chunk_size, randomness, progress)

        blocks = follow(mode, "jacobian", assemble, order)
        result = pytree.tree_unflatten([function.unflatten(row) for row in blocks], linearized.output_spec)
        return (result, linearized.aux) if has_aux else result

    return jacobian_of_f


class _Linearized:
    """A function's output at a point with its pullback, and methods that compute its Jacobian's blocks."""

    def __init__(self, function: BoundFunction, randomness: str):
        # Forward mode evaluates the function again for each group.
        self.draw = draw_of(function.leaves, *function.roots) if randomness == "same" else None
        self.function = function = steady(function)
        self.traced = torch.compiler.is_compiling()
        specs: list[pytree.TreeSpec] = []

        def flat(leaves: Leaves) -> tuple[list[Tensor], PyTree]:
            output, aux = function(leaves)
            outputs, spec = pytree.tree_flatten(output)
            specs.append(spec)
            for index, leaf in enumerate(outputs):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and has_strides(leaf):
                    continue
                if isinstance(leaf, Tensor) and not has_strides(leaf):
                    remedy = "return .to_dense() of it"
                elif isinstance(leaf, Tensor) and leaf.is_complex():
                    remedy = "return torch.view_as_real of it"
                else:
                    remedy = "return it as aux with has_aux=True"
                raise InputError(
                    f"jacobian: output{leaf_names(output)[index]} must be a real floating-point tensor, "
                    f"got {describe(leaf)}; {remedy}."
                )
            return outputs, aux

        def checked(leaves: Leaves) -> tuple[list[Tensor], PyTree]:
            outputs, aux = flat(leaves)
            if not any(output.requires_grad for output in outputs):
                raise function.independent()
            return outputs, aux

        self.flat = flat
        if self.traced:
            self.outputs, self.pullback, self.aux = pull(checked, function.leaves)
            self.bytes_each, self._bytes_for_calls, self._work = 0, 0, 1.0
        else:
            with ByteCount() as count:
                self.outputs, self.pullback, self.aux = pull(checked, function.leaves)
            self.bytes_each = count.bytes
            self._bytes_for_calls = count.operations * _BYTES_IN_A_CALL
            self._work = count.bytes + count.read / _READ_IN_A_BYTE
        self.output_spec = specs[0]

    @property
    def forward_pays(self) -> bool:
        """Whether the directions that forward mode saves outweigh its calls."""
        inputs = sum(leaf.numel() for leaf in self.function.leaves)
        outputs = sum(output.numel() for output in self.outputs)
        return (outputs - inputs / _FORWARD_PAYS_BELOW) * self._work > self._bytes_for_calls

    def by_reverse(self, chunk_size: int | str | None, randomness: str, progress: bool) -> list[list[Tensor]]:
        """Compute rows: unit cotangents of each output, pulled back to every leaf."""
        leaves = self.function.leaves

        def pulled(index: int) -> Callable[[Tensor], Leaves]:
            def along(direction: Tensor) -> Leaves:
                zeros = [torch.zeros_like(output) for output in self.outputs]
                zeros[index] = direction
                return self.pullback(zeros)[0]

            return along

        parts = self._in_groups(self.outputs, pulled, leaves, chunk_size, randomness, progress)
        return [
            [
                torch.cat(rows).view(output.shape + leaf.shape) if rows else output.new_zeros(output.shape + leaf.shape)
                for rows, leaf in zip(row, leaves, strict=True)
            ]
            for row, output in zip(parts, self.outputs, strict=True)
        ]

    def by_forward(self, chunk_size: int | str | None, randomness: str, progress: bool) -> list[list[Tensor]]:
        """Compute columns: unit tangents of each leaf, pushed to every output."""
        leaves = self.function.leaves

        def pushed(index: int) -> Callable[[Tensor], list[Tensor]]:
            def along(direction: Tensor) -> list[Tensor]:
                tangents = tuple(direction if i == index else torch.zeros_like(p) for i, p in enumerate(leaves))
                return push(self.flat, (leaves,), (tangents,))[1]

            return along

        parts = self._in_groups(leaves, pushed, self.outputs, chunk_size, randomness, progress)
        return [
            [
                torch.cat(column[position]).movedim(0, -1).reshape(output.shape + leaf.shape)
                if column[position]
                else output.new_zeros(output.shape + leaf.shape)
                for column, leaf in zip(parts, leaves, strict=True)
            ]
            for position, output in enumerate(self.outputs)
        ]

    def _in_groups(
        self,
        sources: Sequence[Tensor],
        along: Callable[[int], Callable[[Tensor], Sequence[Tensor]]],
        targets: Sequence[Tensor],
        chunk_size: int | str | None,
        randomness: str,
        progress: bool,
    ) -> list[list[list[Tensor]]]:
        """Map unit directions of every source, in groups; entry [source][target] lists the results, group by group."""
        redraws = sources is self.function.leaves
        parts: list[list[list[Tensor]]] = [[[] for _ in targets] for _ in sources]
        if self.traced:
            chunk_size, progress = (None if chunk_size == "auto" else chunk_size), False
        bar = tqdm(total=sum(source.numel() for source in sources), unit=" directions") if progress else None
        for index, source in enumerate(sources):
            bytes_each = self.bytes_each + sum(target.nbytes for target in targets) if chunk_size == "auto" else 0
            size = resolve_chunk_size(chunk_size, source.numel(), bytes_each, source.device)
            for start, stop in spans(source.numel(), size):
                if self.draw is not None:
                    self.draw.rewind()
                rows = one_hot_rows(start, stop, source)
                if stop - start == 1 and not redraws:
                    # A single cotangent needs no batching rule, and torch's for layer_norm and batch_norm are constants
                    # to a second derivative.
                    results: Sequence[Tensor] = [result[None] for result in along(index)(rows[0])]
                elif redraws or self.traced:
                    results = vmap(along(index), randomness=randomness)(rows)
                else:
                    results = pull_batch(along(index), [rows], randomness=randomness)
                for part, result in zip(parts[index], results, strict=True):
                    part.append(result)
                if bar is not None:
                    bar.update(stop - start)
        if bar is not None:
            bar.close()
        return parts
