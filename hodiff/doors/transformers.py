"""Curvature during training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hodiff.common.options import require_callable, require_int
from hodiff.doors.curvature_measurements import MeasurementOptions
from hodiff.doors.curvature_monitor import CurvatureMonitor, Loss
from hodiff.doors.curvature_plot import require_plot
from hodiff.errors import InputError


class CurvatureCallback(TrainerCallback):
    """Measures curvature every few optimizer steps, and adds the numbers to the `log_history` of the trainer's state.

    It keeps the inputs of the first calls of the trainer's `compute_loss`, and measures on them with
    `hodiff.doors.CurvatureMonitor`, which states the cost. In several processes, each one measures on its own batches.
    Each `train` starts anew, also one that resumes from a checkpoint: it keeps its own first batches.

    Args:
        loss: Function `loss(model, batch)` that returns the mean loss of a batch, a dict with the labels. By default
            `trainer.compute_loss(model, batch)`, also of a subclass or with `compute_loss_func` or label smoothing;
            without the number of items of accumulated batches, so that it is the mean of the batch.
        batches: Number of training batches to keep.
        plot: File in which to save the plot when training ends; after an exception, call `monitor.plot`. Requires
            matplotlib.
        **options: Options of `CurvatureMonitor`, such as `every=100` and `measures=["sharpness", "noise"]`.

    Attributes:
        monitor: The `CurvatureMonitor` of the last training, with `history` and `plot()`; None before the first
            measurement.

    Raises:
        InputError: If an argument is invalid; when training starts, if no `transformers.Trainer` trains.

    Example:
        >>> from hodiff.doors.transformers import CurvatureCallback
        >>> callback = CurvatureCallback(every=500, measures=["sharpness", "noise"], plot="curvature.png")
        >>> trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])  # doctest: +SKIP
        >>> callback.monitor is None
        True
    """

    def __init__(
        self, loss: Loss | None = None, *, batches: int = 4, plot: str | Path | None = None, **options: Any
    ) -> None:
        if loss is not None:
            require_callable("CurvatureCallback", loss=loss)
        require_int("CurvatureCallback", "batches", batches, 1)
        self._every = MeasurementOptions(**options).require_number_of_batches(batches).every
        require_plot("CurvatureCallback", plot)
        self.monitor: CurvatureMonitor | None = None
        self._loss, self._count, self._plot, self._options = loss, batches, plot, options
        self._batches: list[dict[str, Any]] = []
        self._trainer: Any = None
        # The wrapper of the trainer's `compute_loss`, and the attribute that it has replaced.
        self._watch: Any = None
        self._before: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start anew, and watch the trainer for batches."""
        self._unwatch()  # an exception may have ended the last training
        self.monitor, self._batches, self._trainer = None, [], _calling_trainer()
        self._before = vars(self._trainer).get("compute_loss")
        self._watch = _keeping(self._batches, self._count, self._trainer.compute_loss)
        vars(self._trainer)["compute_loss"] = self._watch

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure if the optimizer's step is due."""
        if len(self._batches) < self._count or state.global_step % self._every:
            return
        if self.monitor is None:
            loss = self._loss or partial(_trainers_loss, self._trainer)
            self.monitor = CurvatureMonitor(kwargs["model"], loss, self._batches, **self._options)
        numbers = self.monitor.measure(state.global_step).numbers()
        state.log_history.append(
            {f"curvature/{name}": value for name, value in numbers.items()} | {"step": state.global_step}
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the plot."""
        self._unwatch()
        if self._plot is not None and self.monitor is not None and state.is_world_process_zero:
            self.monitor.plot(self._plot)

    def _unwatch(self) -> None:
        """Give the trainer its `compute_loss` back, unless it has been replaced since."""
        attributes = {} if self._trainer is None else vars(self._trainer)
        if self._watch is not None and attributes.get("compute_loss") is self._watch:
            if self._before is None:
                del attributes["compute_loss"]
            else:
                attributes["compute_loss"] = self._before
        self._watch = None


def _calling_trainer() -> Trainer:
    """Return the trainer that has called a callback; transformers passes no reference to it."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    raise InputError(
        "CurvatureCallback: expected a call by the train method of a transformers.Trainer, got another caller; measure "
        "by hodiff.doors.CurvatureMonitor."
    )


def _keeping(batches: list[dict[str, Any]], count: int, compute_loss: Any) -> Any:
    """Wrap `compute_loss` to append copies of its first inputs in training, from which it may remove labels."""

    @wraps(compute_loss)
    def keeping(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model.training and len(batches) < count:
            batches.append(dict(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    return keeping


def _trainers_loss(trainer: Any, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = trainer.compute_loss(model, dict(batch))
    return loss
