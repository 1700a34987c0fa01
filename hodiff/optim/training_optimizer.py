"""Base class of all optimizers: checks of settings, parameters and gradients, and the evaluation of closures.

Grouping of parameters for multi-tensor operators, because calls cost more than small tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hodiff.common.trees import describe
from hodiff.distributed.exchanges import leaving_notes
from hodiff.distributed.layouts import local_part
from hodiff.errors import InputError
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.joint_optimizer import JointOptimizer
from hodiff.optim.local_models import Closure, detached, require_loss
from hodiff.optim.optimizer_states import (
    Shapes,
    numbered,
    precise,
    require_dtypes,
    require_own_state,
    require_shapes,
    require_undamaged,
    restore,
)
from hodiff.optim.settings import require_settings
from hodiff.torch_internals.closures import skips_backward
from hodiff.torch_internals.process_groups import is_sharded
from hodiff.torch_internals.tensors import version_of

# For a tensor of this size the call takes little of the time, and joint temporaries need much memory. Other devices
# than the CPU take longer to start an operator, and less time for its arithmetic; they were not timed.
_LARGE = {"cpu": 2**16, "accelerator": 2**20}

Pair = tuple[Tensor, Tensor]


# Remedies for parameters that are sharded, by what the optimizer supports.
_REMEDIES = {
    True: "pass process_group=torch.distributed.group.WORLD",
    False: "omit process_group, or use DistributedDataParallel",
    None: "use an optimizer that supports them, such as Shampoo or NewtonCG, or DistributedDataParallel",
}


def is_plain(parameter: Tensor) -> bool:
    """Whether multi-tensor operators may join a parameter with others."""
    return type(parameter) in {Tensor, nn.Parameter}


def large_size(parameter: Tensor) -> int:
    """Number of elements from which tensors on the parameter's device step alone."""
    return _LARGE["cpu" if parameter.device.type == "cpu" else "accelerator"]


def together(group: dict[str, Any], pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Group parameters and gradients by dtype and device; parameters that step alone have lists of their own."""
    wanted = group.get("foreach")
    alone = wanted is False or isinstance(group["lr"], Tensor)
    lists: dict[Any, list[Pair]] = {}
    for pair in pairs:
        parameter = pair[0]
        joins = not alone and is_plain(parameter) and (wanted or parameter.numel() < large_size(parameter))
        lists.setdefault((parameter.dtype, parameter.device) if joins else id(parameter), []).append(pair)
    return list(lists.values())


def zeros_of_each(states: Sequence[dict[str, Any]], name: str, like: Sequence[Tensor]) -> list[Tensor]:
    """Return an entry of each state, initialized by zeros like the tensor."""
    for state, tensor in zip(states, like, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(tensor)
    return [state[name] for state in states]


Group = dict[str, Any]

# Entries of states that have the shape of the parameter, also in states of torch's optimizers, which SAM may contain.
_LIKE_PARAMETERS = (
    "exp_avg",
    "exp_avg_sq",
    "momentum_buffer",
    "curvature",
    "curvature_sq",
    "last_step",
    "direction",
    "solution",
)


class StochasticOptimizer(JointOptimizer):
    """`torch.optim.Optimizer` whose settings are checked by `CHECKS`."""

    # Whether complex parameters are supported.
    complex_too: ClassVar[bool] = False
    # Names of which a parameter's state has all or none.
    whole_state: ClassVar[frozenset[str]] = frozenset()
    # Names that only states of another optimizer with the same settings have.
    foreign_state: ClassVar[frozenset[str]] = frozenset()
    # Whether states have at least 32 bits.
    precise_state: ClassVar[bool] = False
    # Whether parameters that are DTensors over several ranks need a process group, or exclude one; None if they are not
    # supported.
    sharded_by_group: ClassVar[bool | None] = False
    _checked_dtypes: list[torch.dtype] | None = None
    # Gradients that closures wrote, with their versions.
    _spent: Mapping[int, tuple[weakref.ref[Tensor], int]] = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with separate settings, as in `torch.optim.Optimizer.add_param_group`.

        Args:
            param_group: A dict of "params" and settings.

        Raises:
            InputError: If a setting is out of its range, or the optimizer does not support a parameter's dtype.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            require_settings(self.caller, group)
            for parameter in group["params"]:
                self._require_parameter(parameter)
        except InputError:
            self.param_groups.pop()
            raise

    def gradients(self, group: Group) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the parameters of a group that have a gradient, with the gradient to descend along."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter.grad.layout != torch.strided:
                    raise InputError(
                        f"{self.caller}: expected dense gradients, got a sparse one of {describe(parameter)}; pass "
                        "sparse=False to the embedding."
                    )
                yield parameter, -parameter.grad if group.get("maximize") else parameter.grad

    def require_finite_gradients(self) -> None:
        """Raise on gradients with NaN or infinity, which would spoil states for good."""
        gradients = [p.grad for p in self.all_parameters() if p.grad is not None]
        self.agree(lambda: require_finite(self.caller, "gradients", list(map(local_part, gradients))))

    def dtype_of_state(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which the state of a parameter is stored."""
        return precise(parameter).dtype if self.precise_state else parameter.dtype

    def shapes_of_state(self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Shapes:
        """Return the shapes of entries of a parameter's state, as far as they follow from its shape."""
        return dict.fromkeys(_LIKE_PARAMETERS, parameter.shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as `torch.optim.Optimizer.load_state_dict` does, with the precision of the state.

        Args:
            state_dict: Dict that `state_dict` returned.

        Raises:
            InputError: If the state does not fit, or was damaged; the optimizer is unchanged.
        """
        state_dict = {**state_dict, "state": numbered(state_dict["state"])}
        require_undamaged(self.caller, state_dict, on_meta=any(p.is_meta for p in self.parameters()))
        super().load_state_dict(state_dict)
        if self.precise_state:
            restore(self, state_dict)

    def require_dtypes(self) -> None:
        """Raise on parameters whose dtype has changed since their states were created."""
        dtypes = [p.dtype for p in self.all_parameters()]
        if dtypes != self._checked_dtypes:
            require_dtypes(self.caller, self.state, self.dtype_of_state)
            self._checked_dtypes = dtypes

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` calls this method, too; during a copy there are no groups yet.
        if "param_groups" in vars(self):
            own = {name: value for name, value in self.defaults.items() if name in self.param_groups[0]}
            require_own_state(self.caller, state, own, self.whole_state, self.foreign_state)
            require_shapes(self.caller, state, self.shapes_of_state)
        super().__setstate__(state)
        self._checked_dtypes = None

    def evaluated(self, closure: Closure, *, accumulates: bool = False) -> Any:
        """Evaluate a closure and set the gradients of its loss in `grad`, whether it calls backward or not.

        Args:
            closure: The closure.
            accumulates: Whether existing gradients may be part of the step. In Lightning, the closure of the last of
                several batches adds to them, or does nothing. Otherwise the step has a single loss.

        Returns:
            Return value of the closure, detached. There are no gradients if Lightning leaves out the backward pass.

        Raises:
            InputError: If the closure returns no loss, or adds to gradients that are not part of the step.
        """
        parameters = self.parameters()
        for parameter in self.all_parameters():
            # No closure computes the gradient of a frozen parameter, which would move by a gradient from before.
            if not parameter.requires_grad or self._is_spent(parameter):
                parameter.grad = None
        given = [(p.grad, 0 if p.grad is None else version_of(p.grad)) for p in parameters]
        # Modules under `fully_shard` exchange their parameters and gradients in the closure and in its backward pass.
        ranks = leaving_notes("evaluating the closure") if self.sharded else nullcontext()
        with torch.enable_grad(), ranks:
            loss = closure()
            # A closure that called backward is recognized by the gradients that it wrote.
            written = [
                p.grad
                for p, (before, version) in zip(parameters, given, strict=True)
                if p.grad is not None and (p.grad is not before or version != version_of(p.grad))
            ]
            ids = {id(before) for before, _ in given if before is not None}
            if ids and not any(bool(each.any()) for each in written if each.layout == torch.strided):
                # The closure only zeroed gradients.
                written = []
            if not written:
                if accumulates and loss is None and ids:
                    return None
                self.clear_gradients()
                if skips_backward(closure):
                    return detached(loss)
                require_loss(self.caller, loss)
                self.backward(loss)
            elif not accumulates and any(id(each) in ids for each in written):
                raise InputError(
                    f"{self.caller}: step: expected a closure that computes the gradient of one loss, because step "
                    "calls it at several points, got one that adds to gradients from before the step; call "
                    "optimizer.zero_grad() first, or loop over all batches in the closure."
                )
        self._spend()
        return detached(loss)

    def evaluated_together(self, closure: Closure, *, by_loss: bool) -> Any:
        """Evaluate a closure on all ranks, and average its gradients and loss over them.

        Args:
            closure: The closure.
            by_loss: Whether the step depends on the loss, and not only on gradients.

        Returns:
            Mean of the ranks' losses.

        Raises:
            InputError: If an evaluation fails on any rank, or ranks drift apart.
        """
        loss, error = self._ranks.attempt(self._evaluated_densely, closure)
        if self._ranks.size > 1:
            rows = self.exchanged(error, loss)
            self.average_gradients(rows)
            self._spend()
            return self.mean_loss(loss, rows)
        if self._ranks.watched:
            self._watch(
                [p.grad for p in self.parameters() if p.grad is not None],
                float(loss) if by_loss and loss is not None else 0.0,
            )
        return loss

    def _evaluated_densely(self, closure: Closure) -> Any:
        loss = self.evaluated(closure)
        for group in self.param_groups:
            # Iterating raises on sparse gradients.
            list(self.gradients(group))
        return loss

    def _spend(self) -> None:
        """Note the gradients that a closure wrote."""
        having = [p for p in self.parameters() if p.grad is not None]
        self._spent = {id(p): (weakref.ref(p.grad), version_of(p.grad)) for p in having if p.grad is not None}

    def _is_spent(self, parameter: Tensor) -> bool:
        """Whether the last closure wrote the gradient; such gradients are freed before the next evaluation."""
        reference, version = self._spent.get(id(parameter), (None, 0))
        gradient = parameter.grad
        return (
            reference is not None
            and gradient is not None
            and reference() is gradient
            and version == version_of(gradient)
        )

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss that a closure returned."""
        torch.autograd.backward(loss)

    def _require_parameter(self, parameter: Tensor) -> None:
        if is_sharded(parameter) and self.sharded_by_group != (self._ranks.group is not None):
            remedy = _REMEDIES[self.sharded_by_group]
            # `is_sharded` is no type guard, as DTensor may not be loaded.
            raise InputError(
                f"{self.caller}: params: expected parameters that each rank holds whole, got a DTensor over "
                f"{parameter.device_mesh.size()} ranks; {remedy}."  # type: ignore[attr-defined]
            )
        first = self.param_groups[0]["params"][0]
        if self.sharded_by_group and is_sharded(parameter) != is_sharded(first):
            raise InputError(
                f"{self.caller}: params: expected sharded parameters only, or none, got both; create an optimizer for "
                "the parameters that fully_shard ignores."
            )
        if parameter.is_complex() and self.complex_too:
            return
        if not parameter.is_floating_point():
            remedy = "; pass its real and imaginary parts" if parameter.is_complex() else ""
            raise InputError(
                f"{self.caller}: params: expected real floating-point parameters, got {describe(parameter)}{remedy}."
            )
