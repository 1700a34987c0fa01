"""Curvature during training with PyTorch Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from hodiff.common.options import require_callable, require_int
from hodiff.common.trees import describe
from hodiff.doors.curvature_measurements import MeasurementOptions
from hodiff.doors.curvature_monitor import CurvatureMonitor, Loss
from hodiff.doors.curvature_plot import require_plot
from hodiff.errors import InputError


class CurvatureCallback(Callback):
    """Measures curvature every few optimizer steps, and logs the numbers as `curvature/sharpness` and so on.

    It keeps the first training batches, and measures on them with `hodiff.doors.CurvatureMonitor`, which states the
    cost. In several processes, each one measures on its own batches. Loggers get the numbers at the number of optimizer
    steps taken, whatever `log_every_n_steps` is; `trainer.callback_metrics` has the last ones. Each `fit` starts anew,
    also one that resumes from a checkpoint: it keeps its own first batches.

    Args:
        loss: Function `loss(module, batch)` that returns the mean loss of a batch. By default the result of
            `training_step`, without what it logs; with manual optimization a function is required.
        batches: Number of training batches to keep.
        plot: File in which to save the plot when training ends, also by an exception. Requires matplotlib.
        **options: Options of `CurvatureMonitor`, such as `every=100` and `measures=["sharpness", "noise"]`.

    Attributes:
        monitor: The `CurvatureMonitor` of the last `fit`, with `history` and `plot()`; None before the first
            measurement.

    Raises:
        InputError: If an argument is invalid; when training starts, if a loss is required.

    Example:
        >>> import lightning, torch
        >>> from hodiff.doors.lightning import CurvatureCallback
        >>> class Line(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return torch.nn.functional.mse_loss(self.line(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> callback = CurvatureCallback(batches=2, every=4)
        >>> data = torch.utils.data.TensorDataset(torch.eye(2).repeat(32, 1), torch.zeros(64, 1))
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
        >>> trainer = lightning.Trainer(max_epochs=1, callbacks=[callback], enable_model_summary=False, **quiet)
        >>> trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=8))
        >>> [(record.step, round(record.sharpness, 3)) for record in callback.monitor.history]
        [(4, 3.0), (8, 3.0)]
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
        self._batches: list[Any] = []
        self._measured = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew; raise if there is no loss to measure."""
        if self._loss is None and not pl_module.automatic_optimization:
            raise InputError(
                "CurvatureCallback: loss: expected a function loss(module, batch) with manual optimization, whose "
                "training_step changes the parameters, got None; pass the function."
            )
        self.monitor, self._batches, self._measured = None, [], 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch, or measure if the optimizer's step is due."""
        if len(self._batches) < self._count:
            self._batches.append(batch)
        step = trainer.global_step
        if len(self._batches) < self._count or step % self._every or step == self._measured:
            return
        self._measured = step
        if self.monitor is None:
            self.monitor = CurvatureMonitor(pl_module, self._loss or _training_loss, self._batches, **self._options)
        numbers = {f"curvature/{name}": value for name, value in self.monitor.measure(step).numbers().items()}
        pl_module.log_dict(numbers, logger=False)
        # Lightning would log only every few steps, and repeat the last numbers until the epoch ends.
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(numbers, step=step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the plot."""
        if self._plot is not None and self.monitor is not None and self.monitor.history and trainer.is_global_zero:
            self.monitor.plot(self._plot)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the plot of the measurements so far."""
        self.on_fit_end(trainer, pl_module)


def _training_loss(module: LightningModule, batch: Any) -> Tensor:
    # Lightning passes the index under any name.
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    with _without_logs(module):
        result = module.training_step(batch, *([0] if takes_index else []))
    loss = result["loss"] if isinstance(result, dict) else result
    if not isinstance(loss, Tensor):
        raise InputError(
            f"CurvatureCallback: loss: expected a training_step that returns the loss, got {describe(loss)}; pass "
            "loss=function(module, batch)."
        )
    return loss


@contextmanager
def _without_logs(module: LightningModule) -> Iterator[None]:
    names = ("log", "log_dict")
    for name in names:
        object.__setattr__(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
