"""Tests of the interactive plots, driven like in a notebook by setting the values of controls."""

import sys

import matplotlib.pyplot as plt
import pytest

import hodiff
from hodiff.plot import widgets

PNG = b"\x89PNG"


def picture(panel) -> bytes:
    return bytes(panel.picture.value)


def assert_redraws(panel, **values) -> None:
    """Assert that every change redraws the plot, and leaves no figure open."""
    for name, value in values.items():
        before = picture(panel)
        panel.controls[name].value = value
        assert panel.message.value == ""
        assert picture(panel).startswith(PNG)
        assert picture(panel) != before, name
    assert not plt.get_fignums()


@pytest.mark.slow
def test_function_builder_follows_its_controls():
    builder = widgets.FunctionBuilder()
    assert_redraws(builder, order=1, backward="g * x.cos() * 2", interval=(-1.0, 1.0))
    drawn = picture(builder)
    builder.controls["backward"].value = "g * x.cos("
    assert "InputError: typed_function: backward: expected an expression in g, x and y" in builder.message.value
    assert "&#x27;g * x.cos(&#x27;" in builder.message.value, "escaped"
    assert picture(builder) == drawn, "the last picture stays"
    builder.controls["backward"].value = "g * x.nothing()"
    assert "AttributeError" in builder.message.value
    builder.controls["pick"].value = "swish"
    assert builder.controls["forward"].value == "x * x.sigmoid()"
    assert builder.message.value == ""
    assert picture(builder) != drawn


@pytest.mark.slow
def test_gradient_flow_follows_its_controls():
    view = widgets.GradientFlow()
    assert_redraws(view, x="1, 2, 3", f="(x * x).sum()", pick="sigmoids that vanish")
    assert view.controls["f"].value == "(30 * x).sigmoid().sub(9).sigmoid().sum()"
    view.controls["x"].value = "1, a"
    assert "x: expected numbers separated by commas" in view.message.value
    view.controls["x"].value = "1, 2"
    view.controls["f"].value = "x"
    assert "gradient_flow: f: expected one real floating-point number" in view.message.value


@pytest.mark.slow
def test_straight_through_demo_follows_its_controls():
    assert_redraws(widgets.StraightThroughDemo(), quantizer="sign", surrogate="tanh", w1=0.5)


@pytest.mark.slow
def test_several_changes_redraw_once(monkeypatch):
    demo = widgets.StraightThroughDemo()
    drawn = []
    monkeypatch.setattr(demo, "_redraw", lambda: drawn.append(1))
    demo.set(w1=0.0, w2=0.1, steps=7)
    assert drawn == [1]


def test_missing_ipywidgets_raises_with_install_command(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("hodiff.plot.widgets")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delattr(hodiff.plot, "widgets")
    with pytest.raises(
        hodiff.HodiffError, match=r'needs ipywidgets, which is not installed; pip install "hodiff\[notebook\]"'
    ):
        from hodiff.plot import widgets as _  # noqa: F401
