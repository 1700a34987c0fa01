"""The 27 nonlinear regressions of NIST's Statistical Reference Datasets, with certified values.

`nist_strd.txt` has the numbers of the files at https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml, works of the US
government in the public domain: two starts, certified parameters and their standard deviations, the residual sum of
squares, all to 11 digits, and the observations. NIST computed them in 128 bits from analytic derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def _misra_a(x: Tensor, b: Tensor) -> Tensor:
    return b[0] * (1 - torch.exp(-b[1] * x))


def _chwirut(x: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-b[0] * x) / (b[1] + b[2] * x)


def _lanczos(x: Tensor, b: Tensor) -> Tensor:
    return b[0] * torch.exp(-b[1] * x) + b[2] * torch.exp(-b[3] * x) + b[4] * torch.exp(-b[5] * x)


def _gauss(x: Tensor, b: Tensor) -> Tensor:
    peaks = (b[k] * torch.exp(-((x - b[k + 1]) ** 2) / b[k + 2] ** 2) for k in (2, 5))
    return b[0] * torch.exp(-b[1] * x) + sum(peaks)


def _cubics(x: Tensor, b: Tensor) -> Tensor:
    return (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _enso(x: Tensor, b: Tensor) -> Tensor:
    def cycle(cosine: Tensor, sine: Tensor, period: Tensor | float) -> Tensor:
        angle = 2 * math.pi * x / period
        return cosine * torch.cos(angle) + sine * torch.sin(angle)

    return b[0] + cycle(b[1], b[2], 12.0) + cycle(b[4], b[5], b[3]) + cycle(b[7], b[8], b[6])


# Models by the names of the data sets. Nelson models log y and has two predictors, the columns of x.
MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Misra1a": _misra_a,
    "Chwirut1": _chwirut,
    "Chwirut2": _chwirut,
    "Lanczos3": _lanczos,
    "Gauss1": _gauss,
    "Gauss2": _gauss,
    "DanWood": lambda x, b: b[0] * x ** b[1],
    "Misra1b": lambda x, b: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Kirby2": lambda x, b: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Hahn1": _cubics,
    "Nelson": lambda x, b: b[0] - b[1] * x[:, 0] * torch.exp(-b[2] * x[:, 1]),
    "MGH17": lambda x, b: b[0] + b[1] * torch.exp(-x * b[3]) + b[2] * torch.exp(-x * b[4]),
    "Lanczos1": _lanczos,
    "Lanczos2": _lanczos,
    "Gauss3": _gauss,
    "Misra1c": lambda x, b: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda x, b: b[0] * b[1] * x / (1 + b[1] * x),
    "Roszman1": lambda x, b: b[0] - b[1] * x - torch.arctan(b[2] / (x - b[3])) / math.pi,
    "ENSO": _enso,
    "MGH09": lambda x, b: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "Thurber": _cubics,
    "BoxBOD": _misra_a,
    "Rat42": lambda x, b: b[0] / (1 + torch.exp(b[1] - b[2] * x)),
    "MGH10": lambda x, b: b[0] * torch.exp(b[1] / (x + b[2])),
    "Eckerle4": lambda x, b: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Rat43": lambda x, b: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Bennett5": lambda x, b: b[0] * (b[1] + x) ** (-1 / b[2]),
}


@dataclass(frozen=True)
class Regression:
    """One regression.

    Attributes:
        name: NIST's name.
        level: The level of difficulty: lower, average or higher.
        starts: Two starts, the farther one first.
        certified: The certified parameters.
        deviations: The standard deviations of the parameters.
        squares: The residual sum of squares.
        y: Observations, (m,), or their logarithms.
        x: Predictor, (m,), or predictors (m, 2).
    """

    name: str
    level: str
    starts: tuple[Tensor, Tensor]
    certified: Tensor
    deviations: Tensor
    squares: float
    y: Tensor
    x: Tensor

    def residuals(self, b: Tensor) -> Tensor:
        """Return the predictions minus the observations."""
        return MODELS[self.name](self.x, b) - self.y

    def digits(self, b: Tensor) -> float:
        """Return the number of digits in which the worst parameter agrees with the certified ones, which have 11."""
        return abs((b / self.certified - 1).abs().max().clamp(min=1e-11, max=1.0).log10().item())

    def is_solved_by(self, squares: float) -> bool:
        """Whether the value equals the certified sum."""
        # The data of Lanczos1 come from the model, with a sum of 1e-25, which float64 cannot distinguish from 1e-20.
        floor = 1e-20 if self.name == "Lanczos1" else 0.0
        return abs(squares - self.squares) <= floor + 1e-9 * self.squares


def _read(block: str) -> Regression:
    title, *lines = block.splitlines()
    name, level = title.split()
    numbers = {
        key: torch.tensor([float(each) for each in values], dtype=torch.float64)
        for key, *values in map(str.split, lines)
    }
    return Regression(
        name=name,
        level=level,
        starts=(numbers["start1"], numbers["start2"]),
        certified=numbers["certified"],
        deviations=numbers["deviation"],
        squares=numbers["squares"].item(),
        y=numbers["y"].log() if name == "Nelson" else numbers["y"],
        x=torch.stack([numbers["x1"], numbers["x2"]], 1) if "x1" in numbers else numbers["x"],
    )


_TEXT = (Path(__file__).parent / "nist_strd.txt").read_text(encoding="utf-8")
REGRESSIONS = {each.name: each for each in map(_read, _TEXT.strip().split("\n\n"))}
