"""Derivatives of a loss from its recorded graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.operators.linearized.recorded_model import RecordedModel
from hodiff.recompute.recording import FoundRecording
from hodiff.torch_internals.tensors import has_tensor_hooks


def gradient_of(caller: str, loss: Tensor, parameters: Sequence[Tensor], *, numbers: bool = False) -> RecordedGradient:
    """Return the recorded gradient of a loss with respect to leaves of its graph."""
    recording: FoundRecording[tuple[Tensor, PyTree]] = FoundRecording(parameters, (loss, ()))
    return RecordedGradient(_bound(caller, parameters), numbers=numbers, recording=recording)


def model_of(caller: str, outputs: PyTree, parameters: Sequence[Tensor]) -> RecordedModel:
    """Return the recorded Jacobian of outputs with respect to leaves of their graph."""
    recording: FoundRecording[tuple[PyTree, PyTree]] = FoundRecording(parameters, (outputs, ()))
    return RecordedModel(_bound(caller, parameters), recording)


def explained(caller: str) -> AbstractContextManager[None]:
    """Replace torch's various errors for missing second derivatives by one message."""
    return refused(
        caller,
        "compute the loss within `with hodiff.corrected():`, or pass step(closure), which does so; "
        "hodiff.preflight(model, inputs) tells which operator it is",
    )


def _bound(caller: str, parameters: Sequence[Tensor]) -> BoundFunction:
    # A hook changes gradients and products whenever they are computed.
    if any(map(has_tensor_hooks, parameters)):
        raise InputError(
            f"{caller}: params: expected parameters without hooks of register_hook, which would change products with "
            "the Hessian as well; use register_post_accumulate_grad_hook."
        )
    return bind(caller, _recorded_already, (list(parameters),), name="params")


def _recorded_already(*_: Any) -> Any:
    raise AssertionError("the graph is there already")
