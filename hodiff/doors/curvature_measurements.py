"""What is measured of a loss during training: options, and one record for each measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_callable, require_generator, require_int
from hodiff.errors import InputError
from hodiff.estimators import SpectralDensity

NAMES = ("sharpness", "eigenvalues", "spectrum", "noise")


@dataclass(frozen=True)
class MeasurementOptions:
    """The options of `CurvatureMonitor`, which explains them, validated."""

    every: int = 100
    measures: Sequence[str] = ("sharpness",)
    iterations: int = 20
    eigenvalues: int = 4
    samples: int = 2
    steps: int = 20
    batch_size: Callable[[Any], int] | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("iterations", 1), ("eigenvalues", 1), ("samples", 2), ("steps", 1)):
            require_int("CurvatureMonitor", name, getattr(self, name), least)
        names = self.measures
        if not isinstance(names, (list, tuple)) or not names or {*names} - {*NAMES} or len({*names}) < len(names):
            raise InputError(
                f"CurvatureMonitor: measures: expected a list of different names, out of {', '.join(NAMES)}, got "
                f"{names!r}."
            )
        if self.batch_size is not None:
            require_callable("CurvatureMonitor", batch_size=self.batch_size)
        require_generator("CurvatureMonitor", "generator", self.generator)

    def require_number_of_batches(self, count: int) -> MeasurementOptions:
        """Return the options; raise if there are too few batches for the measures."""
        least = 2 if "noise" in self.measures else 1
        if count < least:
            raise InputError(
                f"CurvatureMonitor: batches: expected {least} or more batches for {', '.join(self.measures)}, got "
                f"{count}; pass more of the training data."
            )
        return self


@dataclass(frozen=True, eq=False)
class CurvatureRecord:
    r"""Measurements after one training step; None for what was not measured.

    Attributes:
        step: Number of training steps so far.
        gradients: Cost, in gradients of the loss on the measured batches.
        products: Number of Hessian-vector products.
        sharpness: Largest eigenvalue of the Hessian.
        residual: $\|H v - \lambda v\|$ of the sharpness: an eigenvalue lies no farther away from `sharpness`.
        eigenvalues: Eigenvalues of largest absolute value, ascending, (k,), float64 on the CPU.
        residuals: Residuals of `eigenvalues`, (k,).
        spectrum: Density of all eigenvalues, as `hodiff.estimators.spectral_density` returns it.
        noise_scale: Variance of a single example's gradient over the squared norm of the mean gradient, in examples;
            infinite if the batches are too small to show a mean gradient.
        gradient_norm: Norm of the gradient on the measured batches.
    """

    step: int
    gradients: float = 0.0
    products: int = 0
    sharpness: float | None = None
    residual: float | None = None
    eigenvalues: Tensor | None = None
    residuals: Tensor | None = None
    spectrum: SpectralDensity | None = None
    noise_scale: float | None = None
    gradient_norm: float | None = None

    def numbers(self) -> dict[str, float]:
        """Return the measured numbers by name, for a logger."""
        named = {
            "sharpness": self.sharpness,
            "noise_scale": self.noise_scale,
            "gradient_norm": self.gradient_norm,
            "gradients": self.gradients,
        }
        if self.eigenvalues is not None:
            named |= {f"eigenvalue_{i}": each for i, each in enumerate(self.eigenvalues.flip(0).tolist())}
        return {name: value for name, value in named.items() if value is not None}
