"""Curvature during training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hodiff.common.options import require_callable, require_int
from hodiff.doors.curvature_measurements import MeasurementOptions
from hodiff.doors.curvature_monitor import CurvatureMonitor, Loss


class CurvatureCallback(TrainerCallback):
    """Measures curvature every few optimizer steps, and adds the numbers to the `log_history` of the trainer's state.

    It keeps the keyword arguments of the model's first calls in training, and measures on them with
    `hodiff.doors.CurvatureMonitor`, which states the cost. In several processes, each one measures on its own batches.

    Args:
        loss: Function `loss(model, batch)` that returns the mean loss of a batch, a dict; by default
            `model(**batch).loss`.
        batches: Number of training batches to keep.
        plot: File in which to save the plot when training ends.
        **options: Options of `CurvatureMonitor`, such as `every=100` and `measures=["sharpness", "noise"]`.

    Attributes:
        monitor: The `CurvatureMonitor`, with `history` and `plot()`; None before the first measurement.

    Raises:
        InputError: If an argument is invalid.

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
        MeasurementOptions(**options).require_number_of_batches(batches)
        self.monitor: CurvatureMonitor | None = None
        self._loss, self._count, self._plot, self._options = loss or _model_loss, batches, plot, options
        self._batches: list[dict[str, Any]] = []
        self._watch: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch the model for batches."""
        if len(self._batches) < self._count:
            self._watch = kwargs["model"].register_forward_pre_hook(self._keep, with_kwargs=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure if the optimizer's step is due."""
        if len(self._batches) < self._count or state.global_step % MeasurementOptions(**self._options).every:
            return
        if self.monitor is None:
            self.monitor = CurvatureMonitor(kwargs["model"], self._loss, self._batches, **self._options)
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

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # With the number of items of all accumulated batches, the loss would be no mean of the batch.
        if model.training:
            self._batches.append({name: value for name, value in kwargs.items() if name != "num_items_in_batch"})
        if len(self._batches) == self._count:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


def _model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
