"""Widget to choose a quantizer and a surrogate and see the path of descent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.plot.straight_through import straight_through
from hodiff.plot.widgets.panel import Panel, ipywidgets

QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "round": torch.round,
    "floor": torch.floor,
    "sign": torch.sign,
    "round to halves": lambda x: (2 * x).round() / 2,
}
SURROGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x.clone(),
    "clip to [-1, 1]": lambda x: x.clamp(-1, 1),
    "tanh": torch.tanh,
    "sigmoid steps": lambda x: x - torch.sin(2 * torch.pi * x) / (2 * torch.pi),
}


class StraightThroughDemo(Panel):
    """Widget that draws values, slopes and descent for a quantizer, a surrogate and a learning rate.

    The picture is that of `hodiff.plot.straight_through`. The controls are "quantizer", "surrogate", "rate", "steps",
    "w1" and "w2", where descent begins.

    Example:
        >>> import matplotlib as mpl
        >>> mpl.use("Agg")
        >>> demo = StraightThroughDemo()
        >>> demo.controls["quantizer"].options
        ('round', 'floor', 'sign', 'round to halves')
    """

    def __init__(self) -> None:
        slider = {"min": -2.4, "max": 2.4, "step": 0.1, "continuous_update": False}
        controls = {
            "quantizer": ipywidgets.Dropdown(options=list(QUANTIZERS), description="forward"),
            "surrogate": ipywidgets.Dropdown(options=list(SURROGATES), description="surrogate"),
            "rate": ipywidgets.FloatLogSlider(value=0.1, min=-2, max=0, description="rate", continuous_update=False),
            "steps": ipywidgets.IntSlider(value=60, min=1, max=300, description="steps", continuous_update=False),
            "w1": ipywidgets.FloatSlider(value=-1.6, description="first weight", **slider),
            "w2": ipywidgets.FloatSlider(value=1.7, description="second weight", **slider),
        }
        super().__init__(_draw, controls)


def _draw(quantizer: str, surrogate: str, rate: float, steps: int, w1: float, w2: float) -> Any:
    panels = straight_through(QUANTIZERS[quantizer], SURROGATES[surrogate], start=(w1, w2), rate=rate, steps=steps)
    return panels[0].figure
