"""SAM and ASAM: steps by the gradient at the worst nearby point."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hodiff.common.complex_numbers import as_real
from hodiff.errors import InputError
from hodiff.optim.local_models import Closure, require_closure
from hodiff.optim.optimizer_states import Shapes
from hodiff.optim.ranks import Ranks
from hodiff.optim.training_optimizer import StochasticOptimizer, together
from hodiff.torch_internals import many_tensors as many
from hodiff.torch_internals.modules import step_with_own_hooks


class SAM(StochasticOptimizer):
    r"""Sharpness-aware minimisation: another optimizer's step, by the gradient at the worst nearby point.

    $$ \theta \leftarrow \mathrm{step}\big(\theta,\; \nabla f(\theta + e)\big), \qquad
       e = \rho\, \frac{T^2 g}{\|T g\|}, \quad g = \nabla f(\theta), \quad
       T = I \;\text{ or, adaptive, }\; |\theta| + \eta $$

    with the norm over all groups. A step computes two gradients. `adaptive` selects ASAM, whose neighbourhood is
    invariant to rescalings of the weights that leave the network's function unchanged. The closure runs twice, so that
    dropout is drawn twice and batch norm updates its buffers twice.

    Args:
        params: Parameters, or groups of them with separate settings, including those of `base`; they may be complex.
        base: Class of the optimizer that takes the step.
        rho: $\rho$, the radius; for `adaptive`, a value ten times as large is a good start.
        adaptive: Whether to use ASAM's neighbourhood.
        eta: $\eta$.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. Loss and gradients are means over the ranks. "local" if each rank has a
            model of its own.
        **options: Options of `base`: `SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9)`. `foreach` applies to both.

    Raises:
        InputError: If a setting is out of its range, `base` is no class of optimizers, or this process is not in the
            group.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = hodiff.optim.SAM([w], torch.optim.SGD, rho=1.0, lr=0.5)
        >>> loss = optimizer.step(lambda: (w**2).sum())
        >>> w.detach()
        tensor([-0.6000, -0.8000])

    Source: P. Foret et al., "Sharpness-aware minimization for efficiently improving generalization", ICLR 2021, eq. 2
    and algorithm 1; J. Kwon et al., "ASAM: adaptive sharpness-aware minimization", ICML 2021, algorithm 1.
    """

    complex_too = True

    def __init__(
        self,
        params: Any,
        base: type[Optimizer] = torch.optim.SGD,
        rho: float = 0.05,
        adaptive: bool = False,
        eta: float = 0.01,
        *,
        process_group: Any = None,
        **options: Any,
    ):
        self._ranks = Ranks(self.caller, process_group)
        if not (isinstance(base, type) and issubclass(base, Optimizer)):
            raise InputError(
                f"SAM: base: expected a class such as torch.optim.SGD, got {base!r}; pass its options here."
            )
        super().__init__(params, {"rho": rho, "adaptive": adaptive, "eta": eta, **options})
        if inspect.signature(base.step).parameters["closure"].default is inspect.Parameter.empty:
            raise InputError(f"SAM: base: expected an optimizer that steps without a closure, got {base.__name__}.")
        self.base = base(self.param_groups, **options)
        self.defaults = {**self.base.defaults, **self.defaults}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph. It may zero
                gradients and call backward, as for torch's optimizers, but need not.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no closure, it returns no loss, gradients are sparse or not finite, or ranks drift
                apart.
        """
        require_closure(self.caller, closure)
        assert closure is not None
        if self.base.__module__.startswith("torch."):
            # Other optimizers may keep states in any dtype.
            self.require_dtypes()
        loss = self.evaluated_together(closure, by_loss=False)
        self.require_finite_gradients()
        places = self._climb()
        if not places:
            return loss
        try:
            self.evaluated_together(closure, by_loss=False)
        finally:
            for parameter, place in places:
                parameter.copy_(place)
        self.require_finite_gradients()
        self._share()
        step_with_own_hooks(self.base)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate settings, including those of the base optimizer.

        Args:
            param_group: A dict of "params" and settings.
        """
        super().add_param_group(param_group)
        if "base" in self.__dict__:
            self._share()

    def shapes_of_state(self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Shapes:
        """See `StochasticOptimizer`; states are those of the base optimizer."""
        if isinstance(self.base, StochasticOptimizer):
            return self.base.shapes_of_state(parameter, group, state)
        return super().shapes_of_state(parameter, group, state) if self.base.__module__.startswith("torch.") else {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base": self.base}

    def _share(self) -> None:
        """Share groups and states with the base optimizer; loading may have replaced them."""
        self.base.param_groups, self.base.state = self.param_groups, self.state

    def _climb(self) -> list[tuple[Tensor, Tensor]]:
        """Move to the worst nearby point, to first order; return the parameters' previous values."""
        steep = [
            (group, [p for p, _ in each], *_scaled(group, each))
            for group in self.param_groups
            for each in together(group, list(self.gradients(group)))
        ]
        places = [(p, p.clone()) for _, parameters, *_ in steep for p in parameters]
        if not steep:
            return places
        scaled = [[as_real(each) for each in parts] for *_, parts in steep]
        norm = _norm_of(scaled)
        if not 1e-15 < norm < 1e15:
            # Squares may have been out of the range of the dtype.
            norm = _norm_of(scaled, torch.float32 if scaled[0][0].device.type == "mps" else torch.float64)
        # Zero gradients have no direction.
        for group, parameters, ascents, _ in steep if norm else []:
            units, factor = (many.div(ascents, norm), 1.0) if norm < 1e-30 else (ascents, 1 / norm)
            many.add_(parameters, many.mul(units, group["rho"] * factor))
        return places


def _scaled(group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Compute $T^2 g$ and $T g$ of some parameters."""
    gradients = [g for _, g in pairs]
    if not group["adaptive"]:
        return gradients, gradients
    scales = many.add(many.abs_of([p for p, _ in pairs]), group["eta"])
    return list(many.mul(many.mul(scales, scales), gradients)), list(many.mul(gradients, scales))


def _norm_of(parts: Sequence[list[Tensor]], dtype: torch.dtype | None = None) -> float:
    norms = [norm for each in parts for norm in many.norm(each, dtype=dtype)]
    # A sum of squares in 16 bits would lose most digits.
    wide = torch.float32 if norms[0].device.type == "mps" else torch.float64
    return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, wide) for n in norms])))
