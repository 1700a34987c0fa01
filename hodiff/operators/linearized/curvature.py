"""The base class of operators at a point: the point, cached linearizations, compilation."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.module_state import attributes_put_back, untouched, untouched_buffers
from hodiff.common.options import name_of, require_callable
from hodiff.common.randomness import RandomState, drawn_seed, seeded
from hodiff.common.trees import PyTree, as_point, flatten_primals, recordable
from hodiff.derivatives.bound_function import BoundFunction, leave_inference_mode
from hodiff.derivatives.graphs_by_form import while_nothing_is_captured
from hodiff.distributed.points import ShardedPoint
from hodiff.errors import InputError
from hodiff.operators.compiled.linearizations import CompiledLinearizations
from hodiff.operators.data.batches import Batch, Batches, Size
from hodiff.operators.data.determinism import Checked, require_deterministic
from hodiff.operators.data.distributed import JointBatches, rank_in, size_of
from hodiff.operators.data.watched_point import Point
from hodiff.operators.linear.constant_points import require_constant
from hodiff.operators.linear.conversion import Conversion, Portable, converted_data, require_no_group
from hodiff.operators.linear.restriction import is_restricted
from hodiff.operators.linear.spaces import Space
from hodiff.operators.linearized.curvature_options import CurvatureOptions
from hodiff.operators.linearized.kept_linearizations import KeptLinearizations, Leaves, Linearization
from hodiff.operators.linearized.sums_over_batches import SumsOverBatches
from hodiff.recompute.reachable import modules_in

A = TypeVar("A", bound="CurvatureOperator")


class CurvatureOperator(Portable, SumsOverBatches):
    r"""A symmetric operator at a point $x$: a weighted sum of products over batches of data.

    A subclass defines its linearization on a batch, and its product as a function of point, vector and batch, which is
    compiled.

    Args:
        functions: The user's functions, in which modules are searched.
        x: The point: a tensor or a pytree of tensors.
        args: Further arguments of the functions, before the batch.
        options: Further options.

    Raises:
        InputError: If an argument is invalid.
    """

    made_of_constants = True
    # Names of the attributes that hold the user's functions.
    functions: tuple[str, ...] = ("f",)
    # Whether a result comes from one evaluation of each batch, so that a module may be known as deterministic.
    evaluates_once = False

    @leave_inference_mode
    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        x: PyTree,
        args: tuple[Any, ...],
        options: CurvatureOptions,
    ):
        caller, data, reduction = options.caller, options.data, options.reduction
        require_callable(caller, **dict(zip(self.functions, functions, strict=True)))
        # Batches of a loader do not exist yet, so only lists and tuples are checked.
        require_constant(caller, x, *functions, args, data if isinstance(data, (list, tuple)) else None)
        leaves, _ = flatten_primals(x, caller, "x", complex_too=True)
        super().__init__(Space.of(x, caller=caller, sharded_too=True), symmetric=True)
        self._joint = self._joint_batches(leaves, functions, args, options)
        self._weight: float | None = None
        if options.process_group is not None and data is None and reduction == "mean":
            raise InputError(
                f"{caller}: data: expected batches, because the mean over ranks is weighted by numbers of examples, "
                "got none; pass data=[batch], or reduction='sum'."
            )
        self.args = pytree.tree_map_only(Tensor, recordable, args)
        self.batches = Batches(caller, data, reduction, options.batch_size, options.progress)
        self.process_group = options.process_group
        self.cache = options.cache
        self.memory_budget = options.memory_budget
        self.chunk_size = options.chunk_size
        self.correct = options.correct
        self.randomness = options.randomness
        self._functions = tuple(functions)
        self._held_modules = modules_in(*functions)
        self._checks = self._must_check = options.check_deterministic
        self._draw_seed = drawn_seed(torch.default_generator) if options.randomness == "fixed" else None
        if self._draw_seed is not None and options.compile:
            raise InputError(
                f"{caller}: randomness: expected 'error' with compile=True, because compiled code draws different "
                "random numbers, got 'fixed'; omit compile=True."
            )
        dynamic = options.compile == "dynamic"
        self._compiled = CompiledLinearizations(caller, dynamic=dynamic) if options.compile else None
        self.relocate(self._point_of(leaves), self.domain)

    def _joint_batches(
        self, leaves: Sequence[Tensor], functions: Sequence[Callable[..., Any]], args: Any, options: CurvatureOptions
    ) -> JointBatches | None:
        """Return how ranks take batches together, if parameters are sharded."""
        shards = self.domain.shards
        if shards is None:
            return None
        if options.compile:
            raise InputError(
                f"{options.caller}: compile: expected False for sharded parameters, whose moves between ranks are not "
                f"captured, got {options.compile!r}; omit compile."
            )
        point = ShardedPoint.of(options.caller, leaves, partial(modules_in, *functions, *args))
        assert point is not None
        return JointBatches(options.caller, point, shards.mesh, options.process_group)

    def _point_of(self, leaves: Sequence[Tensor]) -> Leaves:
        if self.domain.shards is not None:
            leaves = self.domain.local_leaves([leaf.detach() for leaf in leaves])
        return tuple(map(as_point, leaves))  # of which each may be a subclass with attributes

    def _told(self) -> list[tuple[str, object]]:
        names = ", ".join(name_of(getattr(self, each)) for each in self.functions)
        told: list[tuple[str, object]] = [("of", names)]
        data: Any = self.batches.data
        if isinstance(data, Sized):
            told.append(("batches", f"{len(data):,}"))
        return [*told, ("products", "compiled" if self._compiled is not None else "eager")]

    _recorded = ("_held_modules", "_kept")

    def _restore(self) -> None:
        self._held_modules = modules_in(*self._functions)
        self._forget()

    def _require_portable(self) -> None:
        self.domain.require_whole("copy", "a new operator")
        self._point.require_unchanged(type(self).__name__)
        require_no_group(type(self).__name__, self.process_group)

    @abstractmethod
    def _linearize(self, args: tuple[Any, ...]) -> Linearization:
        """Linearize eagerly at the point, for the arguments after x."""

    @abstractmethod
    def _functional(self, leaves: Leaves, tangents: Leaves, args: tuple[Any, ...]) -> Leaves:
        """Compute the product as a function of all its inputs."""

    @abstractmethod
    def _value(self, args: tuple[Any, ...]) -> Tensor:
        """Compute a value that must be the same on each evaluation."""

    def _evaluate(self, function: BoundFunction) -> PyTree:
        """Evaluate a function at the point, so that it may take gradients with respect to the point."""
        with torch.enable_grad():
            result, _ = function([leaf.detach().requires_grad_() for leaf in function.leaves])
        return pytree.tree_map_only(Tensor, Tensor.detach, result)

    def _prepare(self, args: tuple[Any, ...], index: int) -> tuple[Any, ...]:
        """Return the arguments of the linearization for batch `index`, given the batch's own."""
        return args

    def _size(self, args: tuple[Any, ...], batch: Batch) -> Size:
        """Return the size of a batch with these arguments."""
        return batch.size

    @property
    def leaves(self) -> Leaves:
        """The tensors of the linearization point."""
        return self._point.leaves

    @property
    def x(self) -> PyTree:
        """The linearization point."""
        return self._tree(self.leaves)

    @leave_inference_mode
    def at(self: A, x: PyTree) -> A:
        """Return the operator at another point; compiled graphs are reused.

        Args:
            x: The point, with the structure, shapes, dtypes and devices of the old point.

        Returns:
            A new operator.

        Raises:
            InputError: If `x` has another form.
        """
        require_constant(f"{type(self).__name__}.at", x)
        leaves, _ = flatten_primals(x, f"{type(self).__name__}.at", "x", complex_too=True)
        space = Space.of(x, sharded_too=True)
        if not self.domain.same(space):
            raise InputError(
                f"{type(self).__name__}.at: x: expected the structure, shapes, dtypes and devices of the first point, "
                f"{self.domain.size} numbers, got {space.size}; create a new operator for other parameters."
            )
        other = copy.copy(self)
        other.relocate(self._point_of(leaves), self.domain)
        return other

    def relocate(self, leaves: tuple[Tensor, ...], space: Space) -> None:
        """Move this operator, a fresh copy, to another point; graphs are kept only if the space is the same."""
        if self._compiled is not None and space is not self.domain:
            self._compiled = CompiledLinearizations(type(self).__name__, dynamic=self._compiled.dynamic)
        self.domain = self.codomain = space
        self._point = Point(leaves)
        self._forget()

    @leave_inference_mode
    def converted(self, conversion: Conversion) -> Any:
        """See `LinearOperator.to`."""
        self.domain.require_whole("to", "an operator on converted parameters")
        if any(is_restricted(getattr(self, name)) for name in self.functions):
            raise InputError(f"to: A: expected a whole operator, got a block, {self}; use the block of A.to(...).")
        self._point.require_unchanged(type(self).__name__)
        other = copy.copy(self)
        other.args = conversion.tree(self.args)
        other.batches = self.batches.over(converted_data(self.batches.data, conversion))
        other.relocate(tuple(map(conversion, self.leaves)), conversion.space(self.domain))
        return other

    def adopt(self, *functions: Callable[..., Any]) -> None:
        """Replace the user's functions, and search them for modules."""
        self._functions = functions
        self._restore()

    def _forget(self) -> None:
        caller, budget = type(self).__name__, self.memory_budget
        self._kept = KeptLinearizations(
            caller, self.batches, self.cache, budget, compare=self._checks, joint=self._joint
        )

    def _at(
        self, batch: Batch, linearize: Callable[[tuple[Any, ...]], Linearization] | None = None
    ) -> tuple[Linearization, Size]:
        args = self.args if self.batches.data is None else (*self.args, batch.content)
        index = batch.index
        # Compiled graphs depend on the state that a first run sets up.
        kept = (untouched if self._compiled is None else untouched_buffers)(self._held_modules)
        # Batches of data are compared by their numbers in each pass.
        given = self._kept.unchanged(args) if self.batches.data is None else nullcontext()
        with while_nothing_is_captured(), given, kept, self._draws_of(index):
            checked = self._must_check and self._check_once(args)
            size = self._size(args, batch)
            if self._joint is not None:
                size, self._weight = self._joint.weigh(size)
            prepared = self._prepare(args, index)
            # A function that was deterministic on another batch, or before, may draw random numbers now.
            draw = RandomState(self.leaves) if self._checks and not checked else None
            linearization = (linearize or self._linearized)(prepared)
            if draw is not None and draw.advanced and self._draw_seed is None:
                self._require_deterministic(args)
            return linearization, size

    def _check_once(self, args: tuple[Any, ...]) -> bool:
        """Require that the function is deterministic, and return whether it was evaluated for that."""
        known = Checked(type(self).__name__, self._functions, self._held_modules)
        # Ranks must agree on the number of evaluations.
        alone = self._joint is None and self.process_group is None
        must = not (self.evaluates_once and alone and known.before)
        if must and self._require_deterministic(args) and self.evaluates_once:
            known.remember()
        self._must_check = False
        return must

    def _draws_of(self, index: int) -> AbstractContextManager[None]:
        if self._draw_seed is None:
            return nullcontext()
        # Each batch of each rank has its own seed.
        offset = index * size_of(self.process_group) + rank_in(self.process_group)
        return seeded(self._draw_seed + offset, self.leaves)

    def _require_deterministic(self, args: tuple[Any, ...]) -> bool:
        draw = None if self._draw_seed is None else RandomState(self.leaves)

        def value() -> Tensor:
            # Buffers are not restored, because a function that reads what it writes keeps its state there.
            with attributes_put_back(self._held_modules), nullcontext() if draw is None else draw.replayed():
                return self._value(args)

        together = None if self._joint is None else self._joint.all
        return require_deterministic(type(self).__name__, value, self.leaves, self._held_modules, together)

    def _linearized(self, args: tuple[Any, ...]) -> Linearization:
        if self._compiled is not None:
            eager = partial(self._linearize, args)
            functions = tuple(getattr(self, name) for name in self.functions)
            compiled = self._compiled.linearize(self._functional, functions, self.leaves, args, eager)
            if compiled is not None:
                return compiled
        return self._linearize(args)

    def _tree(self, leaves: Sequence[Tensor]) -> PyTree:
        return self.domain.tree_of(leaves)
