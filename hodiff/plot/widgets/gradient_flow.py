"""Widget to type a function and see the values and gradients of its nodes."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.plot.gradient_flow import gradient_flow
from hodiff.plot.typed_rules import typed_map
from hodiff.plot.widgets.panel import Panel, ipywidgets, line

PICKS = {
    "a small network": "(torch.tanh(x * 2) * torch.tensor([1.0, -2.0, 3.0])).sum()",
    "sigmoids that vanish": "(30 * x).sigmoid().sub(9).sigmoid().sum()",
    "products that explode": "(x * 40).pow(2).mul(40).sum()",
    "a root at zero": "x.clamp(min=0).sqrt().sum()",
    "a part that is detached": "(x.detach() * x.exp()).sum()",
}
FIRST = "a small network"


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
            "pick": ipywidgets.Dropdown(options=list(PICKS), value=FIRST, description="pick"),
            "f": line("f(x)", PICKS[FIRST]),
            "x": line("x", "0.5, -1, 2"),
        }
        super().__init__(_draw, controls)
        controls["pick"].observe(lambda change: self.set(f=PICKS[change["new"]]), names="value")


def _draw(pick: str, f: str, x: str) -> Any:
    del pick
    try:
        point = torch.tensor([float(each) for each in x.split(",")])
    except ValueError:
        raise InputError(f"x: expected numbers with commas between, got {x!r}.") from None
    return gradient_flow(typed_map("f", f), point).draw().figure
