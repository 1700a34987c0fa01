"""Widgets to type the rules of a Function, to type a function, and to choose a quantizer, and see its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.plot.derivatives_by_route import routes
from hodiff.plot.gradient_flow import gradient_flow
from hodiff.plot.straight_through import straight_through
from hodiff.plot.typed_rules import typed_function, typed_map
from hodiff.plot.widgets.panel import Panel, ipywidgets, line

# Choices of forward, backward and jvp; an empty jvp follows from backward.
RULES = {
    "sine": ("x.sin()", "g * x.cos()", ""),
    "swish": ("x * x.sigmoid()", "g * x.sigmoid() * (1 + x * (1 - x.sigmoid()))", ""),
    "exponential, by its output": ("x.exp()", "g * y", ""),
    "sine whose graph is cut": ("x.sin()", "g * x.detach().cos()", "t * x.cos()"),
    "cube with a tangent of half the size": ("x**3", "3 * g * x**2", "1.5 * t * x**2"),
    "rounding, straight through": ("x.round()", "g * torch.ones_like(x)", ""),
}
FIRST_RULES = "sine whose graph is cut"


class FunctionBuilder(Panel):
    """Widget that draws value, derivatives by every route and differences of a Function, picked or typed.

    The picture is that of `hodiff.plot.routes`, for the Function that `hodiff.plot.typed_function` makes. The controls
    are "pick", "forward", "backward", "jvp", "interval" and "order".

    Example:
        >>> import matplotlib as mpl
        >>> mpl.use("Agg")
        >>> builder = FunctionBuilder()
        >>> builder.controls["backward"].value
        'g * x.detach().cos()'
    """

    def __init__(self) -> None:
        forward, backward, jvp = RULES[FIRST_RULES]
        controls = {
            "pick": ipywidgets.Dropdown(options=list(RULES), value=FIRST_RULES, description="pick"),
            "forward": line("forward(x)", forward),
            "backward": line("backward(g, x, y)", backward),
            "jvp": line("jvp(t, x, y)", jvp),
            "interval": ipywidgets.FloatRangeSlider(value=(-3, 3), min=-8, max=8, step=0.1, description="x from, to"),
            "order": ipywidgets.IntSlider(value=3, min=1, max=3, description="order"),
        }
        for control in controls.values():
            control.style.description_width = "9em"
        super().__init__(_draw_routes, controls)
        controls["pick"].observe(self._picked, names="value")

    def _picked(self, change: Any) -> None:
        self.set(**dict(zip(("forward", "backward", "jvp"), RULES[change["new"]], strict=True)))


def _draw_routes(pick: str, forward: str, backward: str, jvp: str, interval: tuple[float, float], order: int) -> Any:
    del pick
    return routes(typed_function(forward, backward, jvp).apply, *interval, order=order)[0].figure


FUNCTIONS = {
    "a small network": "(torch.tanh(x * 2) * torch.tensor([1.0, -2.0, 3.0])).sum()",
    "sigmoids that vanish": "(30 * x).sigmoid().sub(9).sigmoid().sum()",
    "products that explode": "(x * 40).pow(2).mul(40).sum()",
    "a root at zero": "x.clamp(min=0).sqrt().sum()",
    "a part that is detached": "(x.detach() * x.exp()).sum()",
}
FIRST_FUNCTION = "a small network"


class GradientFlow(Panel):
    """Widget that draws the values and gradients at the nodes of a function of a vector, picked or typed.

    The picture is that of `hodiff.plot.gradient_flow`. The controls are "pick", "f" and "x".

    Example:
        >>> import matplotlib as mpl
        >>> mpl.use("Agg")
        >>> view = GradientFlow()
        >>> view.controls["x"].value = "1, 2, 3"
        >>> view.message.value
        ''
    """

    def __init__(self) -> None:
        controls = {
            "pick": ipywidgets.Dropdown(options=list(FUNCTIONS), value=FIRST_FUNCTION, description="pick"),
            "f": line("f(x)", FUNCTIONS[FIRST_FUNCTION]),
            "x": line("x", "0.5, -1, 2"),
        }
        super().__init__(_draw_flow, controls)
        controls["pick"].observe(lambda change: self.set(f=FUNCTIONS[change["new"]]), names="value")


def _draw_flow(pick: str, f: str, x: str) -> Any:
    del pick
    try:
        point = torch.tensor([float(each) for each in x.split(",")])
    except ValueError:
        raise InputError(f"x: expected numbers separated by commas, got {x!r}.") from None
    return gradient_flow(typed_map(f), point).draw().figure


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
        super().__init__(_draw_descent, controls)


def _draw_descent(quantizer: str, surrogate: str, rate: float, steps: int, w1: float, w2: float) -> Any:
    panels = straight_through(QUANTIZERS[quantizer], SURROGATES[surrogate], start=(w1, w2), rate=rate, steps=steps)
    return panels[0].figure
