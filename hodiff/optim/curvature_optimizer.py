"""Optimizers with an estimate of the curvature, refreshed every few steps from the loss."""

from __future__ import annotations

import functools
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.corrections import Corrections
from hodiff.distributed.layouts import local_part
from hodiff.errors import InputError
from hodiff.graphs import inspect_graph
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.local_models import Closure
from hodiff.optim.observed_losses import ObservedLosses
from hodiff.optim.optimizer_states import require_dtypes, require_generator_state
from hodiff.optim.pending_curvature import Estimates, PendingCurvature
from hodiff.optim.recorded_losses import explained
from hodiff.optim.training_optimizer import Group
from hodiff.recompute.lost_slopes import noting_operands
from hodiff.torch_internals.tensors import version_of


class CurvatureOptimizer(ObservedLosses):
    """Optimizer that intercepts the backward pass, or the closure, before a step that refreshes the curvature.

    A group counts its steps in `taken`. A parameter is due when `taken` reaches the parameter's `refresh_at`:
    alternating losses may each reach only some of the parameters. A parameter without curvature is due with its group.

    A parameter that was unfrozen after the last step may have the gradient of a loss that was not observed. The step
    does not need its curvature: the parameter keeps what it has, or waits for its first curvature, and is due next.
    """

    sharded_by_group = True

    def __init__(self, params: Any, defaults: Group, generator: torch.Generator | None, process_group: Any):
        self._set_ranks(generator, process_group)
        self._pending = PendingCurvature(self.second_order, self._ranks.size > 1)
        self._aside: set[int] = set()
        super().__init__(params, {**defaults, "taken": 0, "refresh_at": 0})
        self._wait()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If True, torch's GradScaler passes the factor by which it scaled loss and gradients. Lightning refuses to clip
        # gradients of such optimizers, which it assumes to be scaled until the step.
        return sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")  # noqa: SLF001 - public in Python

    @abstractmethod
    def _estimate(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        """Estimate the curvature of a loss; also return gradients if the `last` use of the graph consumed it."""

    @abstractmethod
    def _absorb(self, parameter: Tensor, group: Group, curvature: Any) -> None:
        """Update the state of a parameter by a new estimate."""

    @abstractmethod
    def _descend(self) -> None:
        """Update all parameters in place."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step, by the gradients in `grad` or by a closure.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph. It may zero
                gradients and call backward, as for torch's optimizers, but need not: `step` sets the gradients to those
                of this evaluation. When curvature is due, the closure runs within `hodiff.corrected()`; then sharded
                parameters require a closure, and one that does not call backward.

        Returns:
            The loss, or None without a closure.

        Raises:
            InputError: If the closure returns no loss, gradients are sparse or not finite, or a parameter that is due
                for curvature has the gradient of a loss that the optimizer did not observe; on all ranks of a process
                group, also if their parameters, generators or uses of parameters differ.
            RouteError: If torch does not implement a second derivative.
        """
        with self._draws_repeated_after_errors():
            # On shards, all ranks compute together, and none can announce an error to ranks that wait for it.
            found = (self._observed(closure), None) if self.sharded else self._ranks.attempt(self._observed, closure)
            loss, estimates = self._joined(*found)
        if estimates is None:
            self._pending.clear()
            self._rewind()
            return loss
        self._state_before = None
        self.require_finite_gradients()
        self._require_finite(estimates.values())
        self._take(estimates)
        self._aside = {id(p) for group in self.param_groups for p in self._newcomers(group)}
        try:
            self._descend()
        finally:
            self._aside = set()
        for group in self.param_groups:
            group["taken"] += 1
        self._pending.clear()
        self._wait()
        return loss

    def _observed(self, closure: Closure | None) -> tuple[Any, dict[int, Any] | None]:
        """Return this rank's loss, and its estimates by the parameter's id; None after an overflow of a GradScaler."""
        self.require_dtypes()
        if closure is not None:
            self._await_unfrozen()
        if closure is not None and self.sharded and self._due():
            return self._on_shards(closure, self._due(), gradients=True)
        loss = None if closure is None else self._evaluated(closure)
        overflow: Tensor | None = getattr(self, "found_inf", None)
        if overflow is not None and bool(overflow):
            return loss, None
        for group in self.param_groups:
            # Iterating raises on sparse gradients before anything has changed.
            list(self.gradients(group))
        waiting = [p for p in self._due() if id(p) in self._awaited]
        return loss, self._estimates_for(waiting, scaled=overflow is not None)

    def _joined(
        self, found: tuple[Any, dict[int, Any] | None] | None, error: Exception | None
    ) -> tuple[Any, dict[int, Any] | None]:
        """Return the mean loss of all ranks, average the gradients, and combine the estimates."""
        loss, estimates = (None, None) if found is None else found
        if self._ranks.size == 1:
            return loss, estimates
        overflow = float(error is None and estimates is None)
        rows = self.exchanged(error, loss, overflow, *self._codes(estimates or {}))
        loss = self.mean_loss(loss, rows)
        if estimates is None or bool(rows[:, 3].any()):
            return loss, None
        self.average_gradients(rows)
        return loss, self._combined(estimates, rows[:, 4:])

    def update_curvature(self, loss: Tensor | Closure) -> None:
        r"""Estimate the curvature of a loss now, due or not; the next estimate is due `update_every` steps later.

        The graph of the loss stays, so that `loss.backward()` can follow; gradients do not change. Use it for a batch
        other than the gradient's, or in custom loops; `update_every=None` disables all other estimates.

        Calls of modules with these parameters run within `hodiff.corrected()` if `update_every` is None, and on steps
        that are due. Compute any other loss within `hodiff.corrected()`: on a step that is not due, before the
        optimizer is created, or by functions outside of modules. Otherwise its curvature is wrong where torch's second
        derivative is.

        Args:
            loss: A closure that returns the loss and does not call backward, evaluated within `hodiff.corrected()`;
                or the loss, a tensor of shape () with its graph on the parameters. Sharded parameters require a
                closure.

        Raises:
            InputError: If the loss is not such a tensor or closure.
            RouteError: If torch does not implement a second derivative; compute the loss within `hodiff.corrected()`.
        """
        if self.sharded and not callable(loss):
            raise self._require_closure()
        if not callable(loss):
            self._require_scalar(loss)
        self._update(loss)

    def require_dtypes(self) -> None:
        """See `StochasticOptimizer`; curvature that waits for the step is checked, too."""
        super().require_dtypes()
        waiting = {p: {"curvature": getattr(h, "gradients", h)} for p, h in self._pending}
        require_dtypes(self.caller, waiting, self.dtype_of_state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as in `torch.optim.Optimizer.zero_grad`, and the curvature of their backward passes.

        Args:
            set_to_none: Whether gradients become None instead of zeros.
        """
        self._pending.clear()
        self._rewind()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.optim.Optimizer.state_dict` does, with the state of the generator.

        Returns:
            A dict of "state", "param_groups" and "generator".
        """
        return {**super().state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as `torch.optim.Optimizer.load_state_dict` does, with the state of the generator.

        Args:
            state_dict: Dict that `state_dict` returned.

        Raises:
            InputError: If the state does not fit, or was damaged; the optimizer is unchanged.
        """
        drawn = state_dict.get("generator")
        if drawn is not None:
            require_generator_state(self.caller, self._generator, drawn)
        super().load_state_dict(state_dict)
        if drawn is not None:
            self._generator.set_state(drawn.cpu())
        self._pending.clear()
        self._wait()

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters as `StochasticOptimizer` does; the group is due for curvature at once."""
        super().add_param_group(param_group)
        self._wait()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_generator": self._generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pending, self._aside = PendingCurvature(self.second_order, self._ranks.size > 1), set()
        self._wait()

    def _due(self) -> list[Tensor]:
        """Return the parameters that are due for curvature."""
        groups = [group for group in self.param_groups if group["update_every"] is not None]
        return [p for group in groups for p in group["params"] if p.requires_grad and self._is_due(p, group)]

    def _is_due(self, parameter: Tensor, group: Group) -> bool:
        known = self.state.get(parameter, {})
        return bool(group["taken"] >= known.get("refresh_at", group["refresh_at"]))

    def _await_unfrozen(self) -> None:
        """Observe a closure for parameters that were unfrozen, unless the step has gradients of earlier losses, too."""
        unfrozen = [p for p in self._due() if id(p) not in self._awaited]
        if unfrozen and all(p.grad is None for p in unfrozen):
            self._wait()

    def _newcomers(self, group: Group) -> list[Tensor]:
        """Return parameters with a gradient that have no curvature yet, and make them due next.

        Nobody makes the parameters of a group without `update_every` due, so only zero gradients may wait there.
        """
        found = [p for p in group["params"] if p.grad is not None and not self.state.get(p, {}).get("refreshes")]
        if group["update_every"] is None:
            return [p for p in found if not self.total([p], [float(bool(local_part(p.grad).any()))])]
        for parameter in found:
            self.state[parameter]["refresh_at"] = group["taken"] + 1
        return found

    def gradients(self, group: Group) -> Iterator[tuple[Tensor, Tensor]]:
        """See `StochasticOptimizer`; parameters that wait for their first curvature are left out."""
        pairs = super().gradients(group)
        return (pair for pair in pairs if id(pair[0]) not in self._aside) if self._aside else pairs

    def _evaluated(self, closure: Closure) -> Tensor:
        if not (self.second_order and self._due()):
            return self.evaluated(closure, accumulates=True)

        @functools.wraps(closure, assigned=(), updated=())
        def corrected_closure() -> Any:
            # Around the closure alone: within the mode, the calls of the estimate would take half as long again.
            with Corrections(lean=True):
                return closure()

        with noting_operands(self):
            return self.evaluated(corrected_closure, accumulates=True)

    def _update(self, given: Any) -> None:
        error = None
        with self._draws_repeated_after_errors():
            if self.sharded:
                own = self._on_shards(given, self.parameters(), gradients=False)[1]
            else:
                found, error = self._ranks.attempt(self._estimated_for, given)
                own = {} if found is None else {id(p): h for p, h in found[0]}
            if self._ranks.size > 1:
                codes = self._ranks.exchange(self.caller, error, self._codes(own), self.device)
                own = self._combined(own, codes)
        self._state_before = None
        self._require_finite(own.values())
        with torch.no_grad():
            self._take(own)
        self._wait()

    def _estimated_for(self, given: Any) -> tuple[Estimates, Estimates]:
        """Estimate the curvature of a loss, or of the loss that a closure returns, for `update_curvature`."""
        if callable(given):
            given = self._returned(given)
            self._require_scalar(given)
        # As in `step`, parameters that the loss does not use keep their curvature.
        leaves = set(map(id, inspect_graph(given).leaves))
        used = [p for p in self.parameters() if id(p) in leaves]
        return self._estimated(given, used or self.parameters(), False)

    def _returned(self, closure: Closure) -> Any:
        """Evaluate a closure that does not call backward."""
        parameters = self.parameters()
        before = [(p.grad, 0 if p.grad is None else version_of(p.grad)) for p in parameters]
        # Estimates from first derivatives find the loss by the name of torch's operator.
        corrections = Corrections(lean=True) if self.second_order else nullcontext()
        with torch.enable_grad(), corrections, noting_operands(self):
            loss = closure()
        for p, (gradient, version) in zip(parameters, before, strict=True):
            if p.grad is not gradient or (p.grad is not None and version_of(p.grad) != version):
                raise InputError(
                    f"{self.caller}: update_curvature: expected a closure that returns the loss and leaves gradients "
                    "as they are, got one that changes them; remove zero_grad and backward from it."
                )
        return loss

    def _estimated(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        self._begin_draws()
        with explained(self.caller), torch.no_grad():
            found = self._estimate(loss, parameters, last)
        if self._ranks.watched:
            self._watch([each for _, estimate in found[0] for each in self._numbers_of(estimate)], 0.0)
        return found

    def _require_finite(self, estimates: Iterable[Any]) -> None:
        numbers = [each for estimate in estimates for each in self._numbers_of(estimate)]
        self.agree(lambda: require_finite(self.caller, "curvature", list(map(local_part, numbers)), self._squares_from))

    @property
    def _squares_from(self) -> float | None:
        """Size from which on squares of curvatures must be in range; None if the state has no squares."""
        return None

    def _numbers_of(self, estimate: Any) -> list[Tensor]:
        """Return the tensors of an estimate that have to be finite."""
        return [estimate]

    def _take(self, estimates: dict[int, Any]) -> None:
        """Update the states of parameters by their estimates."""
        own = [(group, p) for group in self.param_groups for p in group["params"] if id(p) in estimates]
        for group, parameter in own:
            state = self.state[parameter]
            self._absorb(parameter, group, estimates[id(parameter)])
            state["refreshes"] = state.get("refreshes", 0) + 1
            if group["update_every"] is not None:
                state["refresh_at"] = group["refresh_at"] = group["taken"] + group["update_every"]

    def _estimates_for(self, waiting: Sequence[Tensor], *, scaled: bool) -> dict[int, Any]:
        """Return the curvature of the loss whose gradients are in `grad`, without the factor of a GradScaler."""
        if self.sharded and any(p.grad is not None for p in waiting):
            raise self._require_closure()
        scale: Tensor | None = getattr(self, "grad_scale", None) if scaled else None
        # After `scaler.unscale_`, only the gradients reveal the factor.
        estimates = self._pending.settled(strict=scaled and scale is None)
        for parameter in waiting:
            if parameter.grad is not None and id(parameter) not in estimates and bool(parameter.grad.any()):
                self.require_finite_gradients()  # gradients that are NaN differ from themselves
                raise InputError(
                    f"{self.caller}: step: expected gradients of losses from loss.backward() since the last step, "
                    "because this step needs their curvature, got a different gradient of "
                    f"{describe(parameter)}, such as from autograd.grad, from backward(gradient=...), from a "
                    "checkpoint with use_reentrant=True, from before a step, or of a loss that is not a single "
                    "number; call optimizer.zero_grad() and loss.backward(), use step(closure), or call "
                    "update_curvature(loss) before step."
                )
        if scale is not None:
            for group in self.param_groups:
                for parameter, _ in self.gradients(group):
                    assert parameter.grad is not None
                    parameter.grad.div_(scale)
            estimates = {key: h * (1 / scale) for key, h in estimates.items()}
        return estimates

    def _require_scalar(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point() or not loss.requires_grad:
            raise InputError(
                f"{self.caller}: update_curvature: expected the loss, one real number with its graph, or a closure "
                f"that returns it, got {describe(loss)}; pass it before loss.backward()."
            )

    def _require_curvature(self, parameter: Tensor) -> None:
        if not self.state[parameter].get("refreshes"):
            raise InputError(
                f"{self.caller}: step: expected curvature for each parameter with a gradient, got none yet for "
                f"{describe(parameter)}; call loss.backward() after creating the optimizer, step(closure), or "
                "update_curvature(loss) before backward."
            )
