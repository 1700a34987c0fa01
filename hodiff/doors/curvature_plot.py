"""The plot of curvature during training."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hodiff.common.trees import describe
from hodiff.doors.curvature_measurements import CurvatureRecord
from hodiff.errors import InputError
from hodiff.plot import spectral_density
from hodiff.plot.shared import require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INSTALL = 'pip install "hodiff[plot]"'
LABELS = {"sharpness": "sharpness", "eigenvalues": "eigenvalues", "noise": "noise scale in examples"}


def require_plot(caller: str, path: Any) -> None:
    """Raise before training if a plot cannot be saved after it."""
    if path is None:
        return
    if not isinstance(path, (str, PathLike)):
        raise InputError(f"{caller}: plot: expected the path of a file, got {describe(path)}.")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"{caller}: plot: expected a file in an existing folder, got {str(path)!r}; create {folder}.")
    require_package("matplotlib.pyplot", f"{caller}: plot", _INSTALL)


def curvature(history: Sequence[CurvatureRecord], measures: Sequence[str], path: str | Path | None) -> list[Axes]:
    """Draw each measure over the steps; spectra of the first and the last record only."""
    pyplot = require_package("matplotlib.pyplot", "CurvatureMonitor.plot", _INSTALL)
    size = (6, 2.5 * len(measures))
    figure, columns = pyplot.subplots(len(measures), squeeze=False, figsize=size, layout="constrained")
    axes = list(columns[:, 0])
    for name, ax in zip(measures, axes, strict=True):
        if name == "spectrum":
            _draw_spectra(history[:: max(len(history) - 1, 1)], ax)
            continue
        ax.plot([record.step for record in history], [_numbers(record, name) for record in history], marker=".")
        ax.set_xlabel("training step")
        ax.set_ylabel(LABELS[name])
    if path is not None:
        figure.savefig(path)
    return axes


def _numbers(record: CurvatureRecord, name: str) -> Any:
    if name == "eigenvalues":
        assert record.eigenvalues is not None
        return record.eigenvalues.tolist()
    return record.sharpness if name == "sharpness" else record.noise_scale


def _draw_spectra(records: Sequence[CurvatureRecord], ax: Axes) -> None:
    tops = []
    for record in records:
        assert record.spectrum is not None
        spectral_density(record.spectrum, ax)
        ax.lines[-1].set_label(f"step {record.step}")
        tops.append(ax.get_ylim())
    # Each drawing sets the limits for itself.
    ax.set_ylim(min(low for low, _ in tops), max(high for _, high in tops))
    ax.set_title("")
    ax.legend()
