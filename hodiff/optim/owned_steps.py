"""Steps of sharded parameters that one rank computes for all: whole gradients come in, shards of the step go out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.distributed.layouts import Layout
from hodiff.distributed.linear_maps import as_dtensor, as_local, gather, scatter
from hodiff.distributed.owners import least_loaded
from hodiff.distributed.vectors import reduce_over
from hodiff.errors import InputError


class OwnedSteps:
    """The owner of each sharded parameter, which stores its whole state, and exchanges with the other ranks.

    Args:
        caller: Name of the optimizer.
        parameters: All sharded parameters, in an order that is equal on all ranks.
        costs: Relative work of the step of each parameter.
        held: Whether the state of each parameter is on this rank.
        elsewhere: Whether it should be on another rank.

    Raises:
        InputError: If parameters lie on different ranks, or the state of a parameter is on no rank.
    """

    def __init__(
        self,
        caller: str,
        parameters: Sequence[Tensor],
        costs: Sequence[float],
        held: Sequence[bool],
        elsewhere: Sequence[bool],
    ):
        self._caller, self._layouts = caller, {id(p): Layout.of(p) for p in parameters}
        self._mesh = self._layouts[id(parameters[0])].mesh
        ranks = [sorted(each.mesh.mesh.flatten().tolist()) for each in self._layouts.values()]
        if any(each != ranks[0] for each in ranks):
            raise InputError(
                f"{caller}: params: expected DTensors on one device mesh, got some on ranks {ranks[0]} and others on "
                f"{next(each for each in ranks if each != ranks[0])}; create an optimizer for each mesh."
            )
        self._rank, self._number = ranks[0].index(dist.get_rank()), len(ranks[0])
        self._owners = dict(zip(self._layouts, self._assigned(costs, held, elsewhere), strict=True))

    def _assigned(self, costs: Sequence[float], held: Sequence[bool], elsewhere: Sequence[bool]) -> list[int]:
        """Leave parameters with the rank that has their state, and divide the others among the ranks."""
        known = torch.tensor([held, [has * self._rank for has in held], elsewhere], dtype=torch.float64)
        count, owner, missed = reduce_over(self._mesh, known.to(self._mesh.device_type)).tolist()
        if any(e and not c for c, e in zip(count, missed, strict=True)):
            raise InputError(
                f"{self._caller}: load_state_dict: expected the states of all sharded parameters, each on the rank "
                "that owns it, got a parameter whose state is on no rank; save and load the optimizer by "
                "torch.distributed.checkpoint, which also loads it on another number of ranks."
            )
        fixed = [int(o) if c == 1 else None for c, o in zip(count, owner, strict=True)]
        return least_loaded(costs, self._number, fixed)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank computes the parameter's steps."""
        return self._owners[id(parameter)] == self._rank

    def covers(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters whose owners are known."""
        return list(map(id, parameters)) == list(self._owners)

    def owner(self, parameter: Tensor) -> int:
        """Return the owner's rank in the mesh."""
        return self._owners[id(parameter)]

    def gathered(self, parameter: Tensor, gradient: Tensor, owner: Tensor) -> Tensor | None:
        """Collect the gradient of a parameter for the owner of another one; all ranks take part."""
        layout = self._layouts[id(parameter)]
        whole = gather(as_local(gradient, layout), layout)
        return whole if self.owns(owner) else None

    def scattered(self, parameter: Tensor, whole: Tensor | None, dtype: torch.dtype) -> Any:
        """Shard a tensor, which one rank has, like a parameter; the other ranks pass None."""
        layout = self._layouts[id(parameter)]
        if whole is None:
            whole = torch.zeros(layout.shape, dtype=dtype, device=parameter.device)
        return as_dtensor(scatter(whole.reshape(layout.shape), layout), layout)

    def exchange(self, error: Exception | None, numbers: Sequence[float]) -> list[float]:
        """Add up numbers over the ranks; raise if a rank has an error."""
        own = torch.tensor([float(error is not None), *numbers], dtype=torch.float64, device=self._mesh.device_type)
        failed, *found = reduce_over(self._mesh, own).tolist()
        if error is not None:
            raise error
        if failed:
            raise InputError(
                f"{self._caller}: step: expected every rank to compute the steps of its parameters, got an error on "
                "another rank; see the error message there."
            )
        return found
