"""Tests of plotted values and gradients at the nodes of a graph, against closed forms."""

import matplotlib.pyplot as plt
import pytest
import torch
from custom_functions import cubed_slope, custom

import hodiff
from hodiff.plot import RAISES, gradient_flow, graph
from hodiff.plot.gradient_flow import NOT_FINITE, SIZES

X = torch.tensor([0.0, 1.0], dtype=torch.float64)


Cube = custom("Cube", lambda x: x**3, cubed_slope)


def lines(picture, name):
    return list(picture.boxes[name].lines[1:])


def test_nodes_show_values_and_gradients():
    # f = (x0 + 2)³ + (x1 + 2)³ at (0, 1).
    picture = gradient_flow(lambda x: Cube.apply(x + 2).sum(), X)
    assert picture.boxes["f"].lines == ("f = 35",)
    assert lines(picture, "SumBackward0_0") == ["value 35", "gradient 1"]
    assert lines(picture, "CubeBackward_0") == ["value [8, 27]", "gradient [1, 1]"]
    assert lines(picture, "AddBackward0_0") == ["value [2, 3]", "gradient [12, 27]"]
    assert lines(picture, "AccumulateGrad_0") == ["value [0, 1]", "gradient [12, 27]"]
    assert picture.boxes["CubeBackward_0"].thick
    assert not picture.boxes["AddBackward0_0"].thick
    assert ("CubeBackward_0", "AddBackward0_0") in picture.arrows


def test_views_and_several_outputs_match():
    def f(x):
        first, second = x.unbind()
        largest, _ = torch.stack([first * 3, second]).view(1, 2).max(dim=1)
        return largest.squeeze()

    picture = gradient_flow(f, torch.tensor([2.0, 5.0]))
    assert lines(picture, "UnbindBackward0_0") == ["value 0: 2", "value 1: 5", "gradient 0: 3", "gradient 1: 0"]
    assert lines(picture, "MulBackward0_0") == ["value 6", "gradient 1"]
    assert lines(picture, "ViewBackward0_0") == ["value [6, 5]", "gradient [1, 0]"]


def test_modules_and_closed_over_tensors_match():
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 2)
    picture = gradient_flow(lambda x: torch.nn.functional.mse_loss(layer(x), torch.zeros(1, 2)), torch.ones(1, 2))
    expected = layer(torch.ones(1, 2)).detach()
    assert lines(picture, "AddmmBackward0_0")[0] == f"value [{', '.join(f'{each:.3g}' for each in expected[0])}]"
    assert lines(picture, "AddmmBackward0_0")[1] == f"gradient [{', '.join(f'{each:.3g}' for each in expected[0])}]"
    leaves = [box.lines for box in picture.boxes.values() if box.shape == "ellipse"]
    assert sorted(each[0] for each in leaves) == ["leaf", "leaf", "x"]
    # Drawing leaves the gradients of the parameters unchanged.
    assert all(each.grad is None for each in layer.parameters())


@pytest.mark.parametrize(
    ("factor", "size"),
    [
        (0.0, "no gradient"),
        (1e-8, "gradient below 1e-6"),
        (1e-5, "gradient below 1e-3"),
        (1.0, "gradient up to 1e3"),
        (1e4, "gradient above 1e3"),
    ],
)
def test_colours_show_gradient_sizes(factor, size):
    picture = gradient_flow(lambda x: (x * factor).sum(), X)
    assert picture.boxes["AccumulateGrad_0"].colour == SIZES[size][1]
    assert set(picture.colours) == {size, "gradient up to 1e3"}


def test_infinite_gradients_are_red():
    picture = gradient_flow(lambda x: x.sqrt().sum(), X)
    assert picture.boxes["SqrtBackward0_0"].colour == SIZES["gradient up to 1e3"][1]
    assert picture.boxes["AccumulateGrad_0"].colour == RAISES
    assert picture.colours[NOT_FINITE] == RAISES


def test_draws_and_saves(tmp_path):
    picture = gradient_flow(lambda x: Cube.apply(x["a"] + 2).sum(), {"a": X})
    ax = picture.draw()
    assert "CubeBackward\nvalue [8, 27]\ngradient [1, 1]" in {text.get_text() for text in ax.texts}
    plt.close(ax.figure)
    picture.save(tmp_path / "flow.png")
    assert picture._repr_svg_() == picture._repr_svg_(), "the same picture has the same text"


@pytest.mark.parametrize("x", [torch.ones(()), torch.ones(1)])
@pytest.mark.parametrize("draw", [gradient_flow, graph])
def test_identity_is_drawn_as_a_leaf(draw, x):
    ax = draw(lambda x: x, x).draw()
    assert any(text.get_text().startswith("x") for text in ax.texts)
    plt.close(ax.figure)


def test_rejects_bad_arguments():
    with pytest.raises(hodiff.InputError, match="gradient_flow: f: expected a function that depends on x"):
        gradient_flow(lambda x: x.detach().sum(), X)
    with pytest.raises(hodiff.InputError, match="gradient_flow: f: expected one real floating-point number"):
        gradient_flow(torch.sin, X)
