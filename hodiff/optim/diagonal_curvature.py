"""Optimizers with an estimate of the curvature's diagonal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.estimators.probes import PROBES
from hodiff.optim.curvature_optimizer import CurvatureOptimizer
from hodiff.optim.pending_curvature import Estimates
from hodiff.optim.recorded_losses import gradient_of
from hodiff.optim.sharded_closures import shard_like
from hodiff.optim.training_optimizer import Group, together
from hodiff.torch_internals import many_tensors as many

RADEMACHER = "rademacher"


class DiagonalOptimizer(CurvatureOptimizer):
    """Optimizer that updates each parameter by its gradient and the diagonal of its curvature."""

    @abstractmethod
    def _move(self, parameter: Tensor, group: Group, gradient: Tensor) -> None:
        """Update a parameter in place."""

    @abstractmethod
    def _move_all(self, parameters: list[Tensor], group: Group, gradients: list[Tensor]) -> None:
        """Update several parameters of one dtype in place."""

    def _summed(self, estimates: dict[int, Any]) -> dict[int, Any]:
        if self.sharded:
            # Gradients and products of shards are sums over the ranks already.
            return estimates
        found = {id(p): estimates[id(p)].clone() for p in self.parameters() if id(p) in estimates}
        self._ranks.mean_(list(found.values()))
        return found

    def _descend(self) -> None:
        found = [(group, list(self.gradients(group))) for group in self.param_groups]
        for _, pairs in found:
            for parameter, _ in pairs:
                self._require_curvature(parameter)
        for group, pairs in found:
            for each in together(group, pairs):
                if len(each) == 1:
                    self._move(each[0][0], group, each[0][1])
                else:
                    self._move_all([p for p, _ in each], group, [g for _, g in each])


class HutchinsonOptimizer(DiagonalOptimizer):
    r"""Optimizer whose curvature is $z \circ H z$ with a random $z$."""

    def __init__(
        self, params: Any, defaults: Group, probes: str, generator: torch.Generator | None, process_group: Any
    ):
        self._probes = probes
        super().__init__(params, defaults, generator, process_group)

    def _estimate(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        recorded = gradient_of(self.caller, loss, self._leaves_of(parameters), numbers=last)
        vectors = self._vectors(parameters)
        products = recorded.product(vectors, keep=not last)
        estimates = many.mul(vectors, products)
        return list(zip(parameters, estimates, strict=True)), list(zip(parameters, recorded.gradient, strict=False))

    def _vectors(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        generator = self._generator
        if self.sharded:
            return [shard_like(p, self._vector(p)) for p in parameters]
        if self._probes != RADEMACHER or generator.device.type != "cpu":
            return [self._vector(p) for p in parameters]
        # A CPU generator draws the same signs for all parameters at once as for each; the probes draw 64-bit integers.
        sizes = [p.numel() for p in parameters]
        signs = _signs(sum(sizes), generator).to(parameters[0].device)
        return [each.view(p.shape).to(p) for p, each in zip(parameters, signs.split(sizes), strict=True)]

    def _vector(self, parameter: Tensor) -> Tensor:
        generator, shape = self._generator, parameter.shape
        if self._probes == "gaussian" and parameter.dtype != torch.float64:
            # Drawing in float32 takes a third of the time.
            drawn = torch.empty(shape, dtype=torch.float32, device=generator.device).normal_(generator=generator)
        elif self._probes == RADEMACHER and generator.device.type == "cpu":
            drawn = _signs(shape.numel(), generator).view(shape)
        else:
            drawn = PROBES[self._probes](parameter.numel(), generator).reshape(shape)
        return drawn.to(parameter.device, parameter.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_probes": self._probes}


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.empty(count, dtype=torch.float32).random_(0, 2, generator=generator).mul_(2).sub_(1)
