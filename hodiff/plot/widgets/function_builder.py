"""Widget to type the rules of a Function and see its derivatives by every route."""

from __future__ import annotations

from typing import Any

from hodiff.plot.routes import routes
from hodiff.plot.typed_rules import typed_function
from hodiff.plot.widgets.panel import Panel, ipywidgets, line

# Choices of forward, backward and jvp; an empty jvp follows from backward.
PICKS = {
    "sine": ("x.sin()", "g * x.cos()", ""),
    "swish": ("x * x.sigmoid()", "g * x.sigmoid() * (1 + x * (1 - x.sigmoid()))", ""),
    "exponential, by its output": ("x.exp()", "g * y", ""),
    "sine whose graph is cut": ("x.sin()", "g * x.detach().cos()", "t * x.cos()"),
    "cube with a tangent of half the size": ("x**3", "3 * g * x**2", "1.5 * t * x**2"),
    "rounding, straight through": ("x.round()", "g * torch.ones_like(x)", ""),
}
FIRST = "sine whose graph is cut"


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
        forward, backward, jvp = PICKS[FIRST]
        controls = {
            "pick": ipywidgets.Dropdown(options=list(PICKS), value=FIRST, description="pick"),
            "forward": line("forward(x)", forward),
            "backward": line("backward(g, x, y)", backward),
            "jvp": line("jvp(t, x, y)", jvp),
            "interval": ipywidgets.FloatRangeSlider(value=(-3, 3), min=-8, max=8, step=0.1, description="x from, to"),
            "order": ipywidgets.IntSlider(value=3, min=1, max=3, description="order"),
        }
        for control in controls.values():
            control.style.description_width = "9em"
        super().__init__(_draw, controls)
        controls["pick"].observe(self._picked, names="value")

    def _picked(self, change: Any) -> None:
        self.set(**dict(zip(("forward", "backward", "jvp"), PICKS[change["new"]], strict=True)))


def _draw(pick: str, forward: str, backward: str, jvp: str, interval: tuple[float, float], order: int) -> Any:
    del pick
    return routes(typed_function(forward, backward, jvp).apply, *interval, order=order)[0].figure
