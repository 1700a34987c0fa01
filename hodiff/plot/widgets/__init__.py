"""Interactive plots for notebooks: `from hodiff.plot import widgets`. They need ipywidgets."""

from hodiff.plot.widgets.demos import FunctionBuilder as FunctionBuilder
from hodiff.plot.widgets.demos import GradientFlow as GradientFlow
from hodiff.plot.widgets.demos import StraightThroughDemo as StraightThroughDemo
