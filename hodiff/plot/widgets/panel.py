"""Base of the interactive plots: controls, a picture that follows them, and a line for errors."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from hodiff.displays import element
from hodiff.errors import HodiffError
from hodiff.plot.shared import require_package

REMEDY = 'pip install "hodiff[notebook]"'
ipywidgets = require_package("ipywidgets", "hodiff.plot.widgets", REMEDY)
pyplot = require_package("matplotlib.pyplot", "hodiff.plot.widgets", REMEDY)

DPI = 75
_VBox: Any = ipywidgets.VBox
# Errors that a half-typed expression may raise; any other error is a bug of hodiff.
WHILE_TYPING = (HodiffError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)


class Panel(_VBox):
    """Controls above a picture that is redrawn whenever a control changes.

    If drawing fails, the last picture stays and `message` gives the reason.

    Args:
        draw: Makes a figure from the controls' values.
        controls: Controls by name.

    Attributes:
        controls: Controls by name; setting the `value` of a control redraws.
        picture: The PNG, in `picture.value`.
        message: The error, in `message.value`; empty if there is none.
    """

    def __init__(self, draw: Callable[..., Any], controls: Mapping[str, Any]):
        self._draw = draw
        self.controls = dict(controls)
        self.picture = ipywidgets.Image(format="png")
        self.message = ipywidgets.HTML()
        self._held = False
        super().__init__([*self.controls.values(), self.message, self.picture])
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._redraw()

    def set(self, **values: Any) -> None:
        """Set several controls, and redraw once."""
        self._held = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self._held = False
        self._redraw()

    def _changed(self, _: Any) -> None:
        if not self._held:
            self._redraw()

    def _redraw(self) -> None:
        try:
            figure = self._draw(**{name: control.value for name, control in self.controls.items()})
        except WHILE_TYPING as error:
            self.message.value = element("b", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            pyplot.close("all")
            return
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
        # A notebook would show the open figure a second time.
        pyplot.close(figure)
        self.picture.value, self.message.value = buffer.getvalue(), ""


def line(description: str, value: str) -> Any:
    """Return a text field that is read as it is typed."""
    layout = ipywidgets.Layout(width="60%")
    return ipywidgets.Text(value=value, description=description, continuous_update=True, layout=layout)
