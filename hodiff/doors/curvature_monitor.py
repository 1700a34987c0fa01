"""Sharpness, eigenvalues, spectra and gradient noise of a loss while a model is trained."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import functional_call, isolated_state
from hodiff.common.options import require_callable
from hodiff.common.randomness import RandomState
from hodiff.common.trees import describe
from hodiff.doors.curvature_measurements import CurvatureRecord, MeasurementOptions
from hodiff.doors.curvature_plot import curvature
from hodiff.errors import HodiffWarning, InputError
from hodiff.estimators import eigsh, sharpness, spectral_density
from hodiff.operators import HessianOperator
from hodiff.optim.ranks import mark_of
from hodiff.torch_internals.compilers.dynamo import original_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Loss = Callable[[Any, Any], Tensor]

# Relative residual at which eigenvalues count as found. Their error is of second order in it, if they are apart.
TOLERANCE = 1e-2


class CurvatureMonitor:
    r"""Measures the Hessian of a loss and the noise of its gradients every few steps of any training loop.

    | measure | quantity |
    |---|---|
    | "sharpness" | largest eigenvalue $\lambda_{\max}(H)$, by Lanczos from the last eigenvector |
    | "eigenvalues" | the k = `eigenvalues` eigenvalues of largest $\lvert\lambda\rvert$ |
    | "spectrum" | density of all eigenvalues, by stochastic Lanczos quadrature |
    | "noise" | $B = \operatorname{tr} \Sigma / \lVert g \rVert^2$, $\Sigma$ the covariance of examples' gradients |

    | measure | cost in gradients |
    |---|---|
    | "sharpness" | at most 1 + 2 (`iterations` + 5) |
    | "eigenvalues" | at most 1 + 2 ((k + 1) (`iterations` + 1) + 4) |
    | "spectrum" | 1 + 2 `samples` `steps` |
    | "noise" | 1 |

    The unit is one gradient of the loss on all measured batches. Several measures share the first 1 of the Hessian. The
    first measurement adds two evaluations of the loss on the first batch. A Hessian product counts as two gradients,
    as it does at a recorded point; if the records of the batches need more than 1 GiB, each product repeats them, and
    the records count that. `CurvatureRecord.gradients` is the actual cost.

    Measurements are made in evaluation mode (no dropout, batch norm with its running statistics), outside of autocast.
    They change neither parameters nor gradients, nor buffers and attributes of the model's modules, such as metrics,
    nor the default generators of torch, NumPy and Python. A loss that still draws random numbers from torch's default
    generators is measured with numbers that stay the same; its noise is measured with new ones.

    With batches k of $n_k$ examples, N in all, and their mean gradients $g_k$, the estimates
    $\operatorname{tr} \Sigma = \frac{1}{K - 1} \sum_k n_k \lVert g_k - g \rVert^2$ and
    $\lVert g \rVert^2 - \operatorname{tr} \Sigma / N$ are unbiased.

    Args:
        model: The trained module; a wrapper of `DistributedDataParallel` or `torch.compile` is taken off.
        loss: Function `loss(model, batch)` that returns the mean loss over the examples of a batch, shape ().
        batches: List of batches on which to measure, on the model's device; at least two for "noise".
        every: Number of steps between measurements.
        measures: Names of the measures, out of "sharpness", "eigenvalues", "spectrum" and "noise".
        iterations: Maximum number of Lanczos iterations for sharpness and eigenvalues.
        eigenvalues: Number of eigenvalues of the measure "eigenvalues".
        samples: Number of random vectors for the spectrum, 2 or more.
        steps: Number of Lanczos steps for each random vector of the spectrum.
        batch_size: Function that returns the number of examples in a batch; by default the length of the batch's first
            tensor.
        generator: Source of random vectors; by default a new generator with seed 0.

    Attributes:
        history: List of `CurvatureRecord`, one for each measurement.

    Raises:
        InputError: If an argument is invalid; on a measurement, as for `hodiff.HessianOperator`, or if the loss writes
            to parameters.

    Example:
        >>> import torch
        >>> from hodiff.doors import CurvatureMonitor
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> inputs, targets = torch.randn(2, 64, 3), torch.randn(2, 64, 1)
        >>> batches = list(zip(inputs, targets))
        >>> mse = torch.nn.functional.mse_loss
        >>> monitor = CurvatureMonitor(model, lambda model, batch: mse(model(batch[0]), batch[1]), batches, every=5)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in range(10):
        ...     optimizer.zero_grad()
        ...     mse(model(inputs[0]), targets[0]).backward()
        ...     optimizer.step()
        ...     record = monitor.step()
        >>> [record.step for record in monitor.history], round(monitor.history[0].sharpness, 1)
        ([5, 10], 2.2)

    Source: Cohen, Kaur, Li, Kolter, Talwalkar, "Gradient descent on neural networks typically occurs at the edge of
    stability", ICLR 2021; McCandlish, Kaplan, Amodei, "An empirical model of large-batch training" (2018), eq. 2.8 and
    appendix A.1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Sequence[Any],
        *,
        every: int = 100,
        measures: Sequence[str] = ("sharpness",),
        iterations: int = 20,
        eigenvalues: int = 4,
        samples: int = 2,
        steps: int = 20,
        batch_size: Callable[[Any], int] | None = None,
        generator: torch.Generator | None = None,
    ):
        require_callable("CurvatureMonitor", loss=loss)
        self.options = MeasurementOptions(
            every, measures, iterations, eigenvalues, samples, steps, batch_size, generator
        )
        if not isinstance(batches, (list, tuple)):
            raise InputError(
                f"CurvatureMonitor: batches: expected a list of batches, got {type(batches).__name__}; pass some "
                "batches of the training data, such as list(itertools.islice(loader, 4))."
            )
        self.options.require_number_of_batches(len(batches))
        if not isinstance(model, nn.Module):
            raise InputError(f"CurvatureMonitor: model: expected an nn.Module, got {describe(model)}.")
        self.history: list[CurvatureRecord] = []
        self._loss = _LossOfModel(unwrapped(model), loss)
        self._batches = list(batches)
        self._generator = generator or torch.Generator().manual_seed(0)
        self._steps = self._evaluations = 0
        self._hessian: HessianOperator | None = None
        self._form: list[Any] = []
        self._start: Tensor | None = None

    def step(self) -> CurvatureRecord | None:
        """Count a training step, and measure if it is due.

        Returns:
            The record if the step was due, else None.
        """
        self._steps += 1
        return self.measure(self._steps) if self._steps % self.options.every == 0 else None

    def measure(self, step: int) -> CurvatureRecord:
        """Measure now, and append the record to `history`.

        Args:
            step: Number of the training step, for the record.

        Returns:
            The record.

        Raises:
            InputError: If no parameter requires a gradient, or the loss returns no tensor or writes to parameters.
        """
        self._evaluations = 0
        point = {name: p.detach() for name, p in self._loss.named_parameters() if p.requires_grad}
        if not point:
            raise InputError(
                "CurvatureMonitor: model: expected parameters that require a gradient, got none; stop measuring once "
                "all are frozen."
            )
        draws, before = RandomState(point.values(), foreign=True), mark_of(list(self._loss.parameters()))
        with ExitStack() as context:
            context.callback(draws.rewind)
            for device in {p.device.type for p in point.values()}:
                context.enter_context(torch.autocast(device, enabled=False))
            context.enter_context(torch.enable_grad())
            context.enter_context(self._loss.in_evaluation_mode())
            context.enter_context(isolated_state(self._loss.modules()))
            record = self._measured(CurvatureRecord(step), point)
        # The mark of NaN differs from itself.
        if math.isfinite(before) and mark_of(list(self._loss.parameters())) != before:
            raise InputError(
                "CurvatureMonitor: loss: expected a function that leaves parameters as they are, got one that writes "
                "to them, such as to an average of weights; training would not be the same. Pass a loss without that."
            )
        cost = self._evaluations / len(self._batches) + 2 * record.products
        self.history.append(replace(record, gradients=cost))
        return self.history[-1]

    def _measured(self, record: CurvatureRecord, point: dict[str, Tensor]) -> CurvatureRecord:
        if set(self.options.measures) - {"noise"}:
            self._hessian = self._at(point)
            if "sharpness" in self.options.measures:
                record = self._sharpness(record)
            if "eigenvalues" in self.options.measures:
                record = self._eigenvalues(record)
            if "spectrum" in self.options.measures:
                record = self._spectrum(record)
            # The next measurement has another point, and recorded graphs hold memory.
            hessian, self._hessian = self._hessian, self._hessian.at(point)
            del hessian
        return self._noise(record, point) if "noise" in self.options.measures else record

    def plot(self, path: str | Path | None = None) -> list[Axes]:
        """Draw each measure over the steps; the spectrum at the first and the last measurement.

        Args:
            path: File in which to save the figure.

        Returns:
            The matplotlib axes, one for each measure.

        Raises:
            InputError: If nothing has been measured yet.
        """
        if not self.history:
            raise InputError(
                "CurvatureMonitor.plot: expected at least one measurement, got none; call step or measure."
            )
        return curvature(self.history, self.options.measures, path)

    def _loss_at(self, point: dict[str, Tensor], batch: Any) -> Tensor:
        self._evaluations += 1
        return functional_call(self._loss, point, (batch,))

    def _at(self, point: dict[str, Tensor]) -> HessianOperator:
        # Layers may have been frozen or converted since.
        if self._hessian is not None and self._form == _form_of(point):
            return self._hessian.at(point)
        self._form, self._start = _form_of(point), None
        options: Any = {"batch_size": self.options.batch_size, "randomness": "fixed"}
        return HessianOperator(self._loss_at, point, data=self._batches, **options)

    def _sharpness(self, record: CurvatureRecord) -> CurvatureRecord:
        # The residual is on the record, so a missed tolerance needs no warning at each measurement.
        with _unwarned():
            found = sharpness(
                self._hessian,
                start=self._start,
                tol=TOLERANCE,
                max_iterations=self.options.iterations,
                throw=False,
                generator=self._generator,
            )
        self._start = found.vector
        products = record.products + found.products
        return replace(record, sharpness=found.value, residual=found.residual, products=products)

    def _eigenvalues(self, record: CurvatureRecord) -> CurvatureRecord:
        with _unwarned():
            found = eigsh(
                self._hessian,
                self.options.eigenvalues,
                method="lanczos",
                tol=TOLERANCE,
                max_iterations=self.options.iterations,
                throw=False,
                generator=self._generator,
            )
        values, residuals = (each.to("cpu", torch.float64) for each in (found.eigenvalues, found.residual))
        return replace(record, eigenvalues=values, residuals=residuals, products=record.products + found.products)

    def _spectrum(self, record: CurvatureRecord) -> CurvatureRecord:
        found = spectral_density(
            self._hessian, samples=self.options.samples, steps=self.options.steps, generator=self._generator
        )
        return replace(record, spectrum=found, products=record.products + found.products)

    def _noise(self, record: CurvatureRecord, point: dict[str, Tensor]) -> CurvatureRecord:
        sizes = list(map(self.options.batch_size or _length, self._batches))
        # One pass: the sums of n_k g_k and of n_k |g_k|^2 determine the deviations from the mean.
        total, squares = None, 0.0
        for batch, size in zip(self._batches, sizes, strict=True):
            leaves = {name: p.clone().requires_grad_() for name, p in point.items()}
            gradients = torch.autograd.grad(self._loss_at(leaves, batch), list(leaves.values()), allow_unused=True)
            flat = torch.cat([g.reshape(-1) for g in gradients if g is not None]).double()
            total = size * flat if total is None else total.add_(flat, alpha=size)
            squares += size * flat.square().sum().item()
        assert total is not None
        count = sum(sizes)
        mean = (total / count).square().sum().item()
        variance = max(squares - count * mean, 0.0) / (len(sizes) - 1)
        signal = mean - variance / count
        scale = variance / signal if signal > 0 else float("inf")
        return replace(record, noise_scale=scale, gradient_norm=mean**0.5)


def _form_of(point: dict[str, Tensor]) -> list[Any]:
    return [(name, p.shape, p.dtype, p.device) for name, p in point.items()]


class _LossOfModel(nn.Module):
    """The loss of a batch, as a module with the parameters of the model."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        loss = self.loss(self.model, batch)
        if not isinstance(loss, Tensor):
            raise InputError(
                "CurvatureMonitor: loss: expected a function loss(model, batch) that returns the mean loss, a tensor "
                f"of shape (), got {describe(loss)}; pass loss=function that returns it."
            )
        return loss

    @contextmanager
    def in_evaluation_mode(self) -> Iterator[None]:
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def unwrapped(model: nn.Module) -> nn.Module:
    """Take wrappers of `DistributedDataParallel` and `torch.compile` off a model."""
    while True:
        inner = original_of(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model)
        if inner is model:
            return model
        model = inner


@contextmanager
def _unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HodiffWarning)
        yield


def _length(batch: Any) -> int:
    tensors = [each for each in pytree.tree_leaves(batch) if isinstance(each, Tensor) and each.dim()]
    if not tensors:
        raise InputError(
            f"CurvatureMonitor: batches: expected tensors with examples along their first dimension, got "
            f"{describe(batch)}; pass batch_size."
        )
    return len(tensors[0])
