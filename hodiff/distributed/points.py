"""Sharded arguments of a function: the function sees DTensors or gathered parameters, autograd sees local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.distributed.fully_sharded import FullyShardedModules, refusing_others
from hodiff.distributed.layouts import Layout, any_distributed, is_distributed, layout_of
from hodiff.distributed.linear_maps import as_dtensor, as_local, gather, scatter
from hodiff.distributed.stand_ins import ShardedParameter
from hodiff.errors import InputError
from hodiff.torch_internals.wording import Wording, says


@dataclass(frozen=True, eq=False)
class ShardedPoint:
    """The differentiated leaves of a function, some of which are DTensors.

    Without fully sharded modules the function computes with DTensors, and its value is that of the whole program. With
    them, each rank evaluates the function on its own data, with parameters gathered when they are used, and the value
    is the mean over ranks, as in the gradient of `fully_shard`.

    Attributes:
        caller: The public function, for error messages.
        layouts: The layout of each leaf; None for a leaf that is an ordinary tensor.
        given: The leaves as the caller passed them.
        modules: The fully sharded modules; None if the function computes with DTensors.
        weight: Weight of this rank's value in the sum over ranks; by default that of the mean.
    """

    caller: str
    layouts: tuple[Layout | None, ...]
    given: tuple[Any, ...] = field(repr=False)
    modules: FullyShardedModules | None = field(repr=False)
    weight: float | None = None

    @classmethod
    def of(cls, caller: str, leaves: Sequence[Any], modules: Callable[[], Iterable[nn.Module]]) -> ShardedPoint | None:
        """Return the point, or None if no leaf is a DTensor.

        Args:
            caller: The public function, for error messages.
            leaves: The leaves.
            modules: Finds the modules that the function reaches.

        Returns:
            The point.
        """
        if not any_distributed(leaves):
            return None
        layouts = [
            layout_of(each, caller, f"leaf {i}") if is_distributed(each) else None for i, each in enumerate(leaves)
        ]
        found = FullyShardedModules(caller, list(modules()))
        given = tuple(getattr(each, "stands_for", each) for each in leaves)
        if not found or found.mesh is None:
            return cls(caller, tuple(layouts), given, None)
        found.shard(given)
        mesh = found.mesh
        laid = [
            Layout.replicated(mesh, each.shape) if layout is None else _over(mesh, layout, caller)
            for each, layout in zip(leaves, layouts, strict=True)
        ]
        return cls(caller, tuple(laid), given, found)

    @property
    def forward_too(self) -> bool:
        """Whether torch has forward mode for what the function computes with: no DTensors."""
        return self.modules is not None and all(each is None or each.rest is None for each in self.layouts)

    def require_dtensors(self, caller: str) -> None:
        """Raise if the function calls fully sharded modules, which only local parts support."""
        if self.modules is not None:
            raise InputError(
                f"{caller}: f: expected a function without modules under fully_shard, got one that calls "
                f"{self.modules.names}; use hodiff.hvp, value_grad_hvp, grad_and_hvp, HessianOperator, "
                "GaussNewtonOperator or FisherOperator, which support them."
            )

    def local(self, leaf: Any, index: int) -> Tensor:
        """Return the local tensor of a leaf."""
        layout = self.layouts[index]
        local: Tensor = as_local(leaf, layout) if layout is not None and is_distributed(leaf) else leaf
        return local

    def local_tangent(self, leaf: Any, index: int, caller: str) -> Any:
        """Return the local tensor of a leaf of a direction, which must be sharded like the point."""
        layout = self.layouts[index]
        if not is_distributed(self.given[index]) or layout is None or not isinstance(leaf, Tensor):
            return leaf
        # `is_distributed` is no type guard, as DTensor may not be loaded.
        if is_distributed(leaf) and leaf.device_mesh == layout.mesh and leaf.shape == layout.shape:  # type: ignore[attr-defined]
            return as_local(leaf, layout)
        got = f"{type(leaf).__name__} {tuple(leaf.shape)}"
        raise InputError(
            f"{caller}: v does not match x: expected a DTensor {tuple(layout.shape)} on the mesh of x, got {got}; "
            "create v with torch.zeros_like of the leaf, or by torch.distributed.tensor.distribute_tensor."
        )

    def arguments(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Return what the function is called with, in place of local leaves."""
        if self.modules is None:
            return [
                each if layout is None else as_dtensor(each, layout)
                for each, layout in zip(leaves, self.layouts, strict=True)
            ]
        return [
            ShardedParameter(each, layout) if is_distributed(given) else gather(each, layout)
            for each, layout, given in zip(leaves, self._all_layouts, self.given, strict=True)
        ]

    @property
    def _all_layouts(self) -> list[Layout]:
        return [each for each in self.layouts if each is not None]

    def running(self, arguments: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context in which fully sharded modules compute with the arguments."""
        if self.modules is None:
            return self._with_dtensors()
        mesh = self.modules.mesh
        given = {id(each): argument for each, argument in zip(self.given, arguments, strict=True)}
        return self.modules.running(given, lambda each: _over(mesh, Layout.of(each), "f"))

    @contextmanager
    def _with_dtensors(self) -> Iterator[None]:
        with refusing_others(self.caller):
            try:
                yield
            except RuntimeError as error:
                if says(error, Wording.MIXED_WITH_DTENSORS):
                    raise InputError(
                        f"{self.caller}: f: expected DTensors in operations with the parameters, which are DTensors, "
                        "got one with an ordinary tensor; distribute the batch by distribute_tensor, call "
                        "full_tensor() of the parameters, or apply fully_shard to the module."
                    ) from error
                raise

    def plain(self, result: Any) -> Any:
        """Return a result of the function with ordinary tensors in it."""
        return pytree.tree_map_only(Tensor, _plain, result)

    def joint(self, value: Tensor) -> Tensor:
        """Return the value of all ranks, given this rank's."""
        if self.modules is None:
            return value
        return scatter(value * self.own_weight, Layout.replicated(self.modules.mesh, value.shape))

    @property
    def own_weight(self) -> float:
        """Weight of this rank's value in the sum over ranks; 1 if the value is that of all ranks."""
        if self.modules is None:
            return 1.0
        assert self.modules.mesh is not None
        return 1.0 / int(self.modules.mesh.size()) if self.weight is None else self.weight

    def weighted(self, weight: float | None) -> ShardedPoint:
        """Return the point with another weight of this rank."""
        return replace(self, weight=weight)

    def result(self, leaf: Any, index: int) -> Any:
        """Return a local derivative in the form of the point."""
        layout = self.layouts[index]
        if layout is None or not isinstance(leaf, Tensor) or not is_distributed(self.given[index]):
            return leaf
        return as_dtensor(leaf, layout)


def _plain(tensor: Any) -> Tensor:
    if type(tensor) is ShardedParameter:
        return tensor.full_tensor()
    return as_local(tensor, Layout.replicated(tensor.device_mesh, tensor.shape)) if is_distributed(tensor) else tensor


def _over(mesh: Any, layout: Layout, caller: str) -> Layout:
    """Return a layout that is gathered over the mesh of fully sharded modules."""
    found = layout.over(mesh)
    if found is None:
        raise InputError(
            f"{caller}: x: expected DTensors on the mesh of fully_shard, {mesh}, or on a mesh that it is a part of, "
            f"got one on {layout.mesh}; call fully_shard for all parameters with one dimension of that mesh."
        )
    return found
