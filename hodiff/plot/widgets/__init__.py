"""Interactive plots for notebooks: `from hodiff.plot import widgets`. They need ipywidgets."""

from hodiff.plot.widgets.function_builder import FunctionBuilder as FunctionBuilder
from hodiff.plot.widgets.gradient_flow import GradientFlow as GradientFlow
from hodiff.plot.widgets.straight_through import StraightThroughDemo as StraightThroughDemo
