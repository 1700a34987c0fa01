"""Tests of plotted derivatives against closed forms, and of the drawn graph against its known nodes."""

import re
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from custom_functions import custom
from torch.autograd.function import once_differentiable

import hodiff
from hodiff.functions import ElementwiseFunction
from hodiff.plot import COLOURS, RAISES, derivatives, graph
from hodiff.plot.backward_graph import layered

BLUE, ORANGE, GREEN = COLOURS[:3]


OnceSine = custom("OnceSine", lambda x: x.sin(), once_differentiable(lambda ctx, g: ctx.saved_tensors[0].cos() * g))


class Square(ElementwiseFunction):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def slope(index, x):
        return 2 * x


def curves(ax):
    return [line.get_xydata().T for line in ax.lines if line.get_marker() == "None"]


def dots(ax):
    return [line.get_xydata().T for line in ax.lines if line.get_marker() == "."]


def test_function_title_is_its_class_name():
    assert derivatives(OnceSine.apply, 0, 1, order=1).get_title() == "OnceSine and its derivatives"


def test_curves_and_dots_match_closed_forms():
    ax = derivatives(torch.sin, -2, 3, order=4, points=50)
    exact = [np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x), np.sin]
    assert len(curves(ax)) == 5
    for (x, y), form in zip(curves(ax), exact, strict=True):
        np.testing.assert_allclose(x, np.linspace(-2, 3, 50), rtol=0, atol=1e-15)
        np.testing.assert_allclose(y, form(x), rtol=0, atol=1e-14)
    for (x, y), form in zip(dots(ax), exact[1:], strict=True):
        assert len(x) == 25
        np.testing.assert_allclose(y, form(x), rtol=0, atol=1e-7)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["$f$", "$f'$", "$f''$", "$f'''$", "$f^{(4)}$", "differences by SciPy"]
    assert [a.get_color() for a in ax.lines[1::2]] == [b.get_color() for b in ax.lines[2::2]]


def test_dots_show_a_wrong_derivative():
    ax = derivatives(OnceSine.apply, 0.1, 3)
    assert not curves(ax)[2][1].any()
    x, y = dots(ax)[1]
    np.testing.assert_allclose(y, -np.sin(x), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("f", "second"),
    [
        (lambda x: 3 * x, lambda x: 0 * x),
        (lambda x: torch.ones((), dtype=x.dtype), lambda x: 0 * x),
        (lambda x: x.reshape(1) ** 2, lambda x: 0 * x + 2),
        (lambda x: x**3 if x > 0 else -(x**3), lambda x: 6 * abs(x)),
        (Square.apply, lambda x: 0 * x + 2),
    ],
    ids=["linear", "constant", "one element", "control flow", "Function"],
)
def test_second_derivative_curve_matches_closed_form(f, second):
    with torch.no_grad():
        x, y = curves(derivatives(f, -1, 1.5, points=20))[2]
    np.testing.assert_allclose(y, second(x), rtol=0, atol=1e-14)


def test_f_is_evaluated_inside_the_interval_only():
    asked = []

    def f(x):
        asked.append(x.item())
        return x.sqrt()

    ax = derivatives(f, 0, 2, order=1)
    assert min(asked) == 0
    assert max(asked) == 2
    x, y = dots(ax)[0]
    np.testing.assert_allclose(y[1:], 0.5 / np.sqrt(x[1:]), rtol=1e-6)


def test_draws_into_given_axes():
    figure, axes = plt.subplots(1, 2)
    assert derivatives(torch.sin, 0, 1, order=0, ax=axes[1]) is axes[1]
    assert not axes[0].lines
    assert len(axes[1].lines) == 1
    assert derivatives(torch.sin, 0, 1).figure is not figure


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.sin, 1, 1), "derivatives: low, high: expected finite numbers with low < high, got 1 and 1"),
        ((torch.sin, 0, float("inf")), "low, high: expected finite"),
        ((torch.sin, "0", 1), "low, high: expected finite"),
        ((lambda x: x.expand(3), 0, 1), r"derivatives: f: expected one real .* got shape \(3,\) of torch.float64"),
        ((lambda x: x.item(), 0, 1), "got float"),
    ],
)
def test_derivatives_rejects_bad_arguments(arguments, message):
    with pytest.raises(hodiff.InputError, match=message):
        derivatives(*arguments)


@pytest.mark.parametrize("options", [{"order": -1}, {"order": 1.0}, {"points": 1}, {"points": True}])
def test_derivatives_rejects_bad_counts(options):
    with pytest.raises(hodiff.InputError, match=f"derivatives: {next(iter(options))}: expected an int of"):
        derivatives(torch.sin, 0, 1, **options)


def test_missing_matplotlib_raises_with_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(hodiff.HodiffError, match=r'derivatives: needs matplotlib, .* pip install "hodiff\[plot\]"'):
        derivatives(torch.sin, 0, 1)
    picture = graph(torch.sin, torch.tensor(1.0))
    assert "SinBackward0" in picture.source
    with pytest.raises(hodiff.HodiffError, match=r'graph: needs matplotlib, .* pip install "hodiff\[plot\]"'):
        picture.draw()


def nodes(picture):
    """Return the attributes of all nodes, by name."""
    found = re.findall(r'^\t"?([^"\s]+)"? \[(.*)\]$', picture.source, flags=re.MULTILINE)
    return {name: attributes for name, attributes in found if name not in {"graph", "node"}}


def edges(picture):
    return re.findall(r'^\t"?([^"\s]+)"? -> "?([^"\s]+)"?$', picture.source, flags=re.MULTILINE)


def of_colour(picture, colour):
    return {name for name, attributes in nodes(picture).items() if colour in attributes}


def test_graph_colours_nodes_by_order():
    picture = graph(lambda x: x.sin().sum(), torch.ones(3))
    assert of_colour(picture, BLUE) == {"SumBackward0_0", "SinBackward0_0"}
    assert of_colour(picture, ORANGE) == {"MulBackward0_0", "CosBackward0_0"}
    assert set(edges(picture)) == {
        ("order1_0", "SumBackward0_0"),
        ("SumBackward0_0", "SinBackward0_0"),
        ("SinBackward0_0", "AccumulateGrad_0"),
        ("order2_0", "MulBackward0_0"),
        ("MulBackward0_0", "CosBackward0_0"),
        ("CosBackward0_0", "AccumulateGrad_0"),
    }


def test_graph_is_drawn_without_graphviz(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    picture = graph(lambda x: x.sin().sum(), torch.ones(3))
    ax = picture.draw()
    assert ax.get_title() == "backward of f to order 2"
    drawn = {text.get_text(): text.get_position() for text in ax.texts if text.get_text()}
    assert set(drawn) == {"\n".join(box.lines) for box in picture.boxes.values()}
    assert drawn["f"][1] > drawn["SumBackward0"][1] > drawn["SinBackward0"][1] > drawn["x\n(3,)"][1]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["order 1", "order 2"]
    plt.close(ax.figure)
    open_figures = plt.get_fignums()
    assert "<svg" in picture._repr_svg_()
    for name in ("picture.png", "picture.dot"):
        picture.save(tmp_path / name)
    assert plt.get_fignums() == open_figures
    assert (tmp_path / "picture.dot").read_text(encoding="utf-8") == picture.source


def test_layout_keeps_parallel_chains_in_order():
    """Two parallel chains stay in order, and an arrow across two layers avoids their nodes."""
    arrows = [("a", "d"), ("b", "c"), ("d", "e"), ("c", "f"), ("e", "g"), ("f", "g"), ("b", "g")]
    layout = layered(dict.fromkeys("abcdefg", 1.0), arrows, 1.0)
    x = {name: place[0] for name, place in layout.places.items()}
    assert (x["a"] < x["b"]) == (x["d"] < x["c"]) == (x["e"] < x["f"])
    assert [y for _, y in layout.ways["b", "g"]] == [-0.5, -1.5, -2.5, -3.5]
    for way_x, layer in zip([x for x, _ in layout.ways["b", "g"][1:-1]], ("cd", "ef"), strict=True):
        assert min(abs(way_x - x[name]) for name in layer) >= 0.7 - 1e-12


def test_third_order_adds_nodes():
    picture = graph(lambda x: x.sin().sum(), torch.ones(3), order=3)
    assert of_colour(picture, BLUE) == {"SumBackward0_0", "SinBackward0_0"}
    assert any(name.startswith("SinBackward0") for name in of_colour(picture, GREEN))
    assert "∇²f · 1 by x" in picture.source


def test_first_order_has_no_gradient_nodes():
    assert not of_colour(graph(lambda x: x.sin().sum(), torch.ones(3), order=1), ORANGE)


def test_constant_gradient_has_no_second_order_nodes():
    picture = graph(lambda x: 3 * x.sum(), torch.ones(3), order=3)
    assert of_colour(picture, BLUE)
    assert not of_colour(picture, ORANGE) | of_colour(picture, GREEN)


def test_leaves_are_named_and_left_unchanged():
    parameters = {"weight": torch.ones(1, 2), "bias: all": torch.ones(1)}
    outside = torch.ones(1, requires_grad=True)

    def f(p):
        return (F.linear(torch.ones(3, 2), p["weight"], p["bias: all"]) * outside).tanh().sum()

    picture = graph(f, parameters)
    leaves = {attributes for attributes in nodes(picture).values() if "ellipse" in attributes}
    assert len(leaves) == 3
    for label in ("x['weight']\\n(1, 2)", "x['bias: all']\\n(1,)", "leaf\\n(1,)"):
        assert any(label in attributes for attributes in leaves)
    assert "∇f by x['weight']" in picture.source
    assert not any(leaf.requires_grad for leaf in parameters.values())
    assert outside.grad is None


def test_custom_functions_are_highlighted():
    drawn = nodes(graph(lambda x: Square.apply(x).sum(), torch.ones(3)))
    assert "penwidth=3" in drawn["SquareBackward_0"]
    assert "penwidth=1" in drawn["SumBackward0_0"]


def test_saved_tensors_show_their_shapes():
    f = lambda x: (Square.apply(x) * x.new_ones(2, 3)).sum()  # noqa: E731
    with_shapes = nodes(graph(f, torch.ones(3), saved=True))
    assert "saved (3,)" in with_shapes["SquareBackward_0"]
    assert "other (2, 3)" in with_shapes["MulBackward0_0"]
    assert "(2, 3)" not in nodes(graph(f, torch.ones(3)))["MulBackward0_0"]


def attention(q):
    return F.scaled_dot_product_attention(q, q.detach(), q.detach()).sum()


@pytest.mark.parametrize(
    ("f", "x", "marked", "dead_end", "third"),
    [
        # torch finds no path to x behind the first Function, and does not try.
        (lambda x: (OnceSine.apply(x) ** 2).sum(), torch.ones(3), {"OnceSineBackward_0"}, "Error_0", set()),
        (attention, torch.ones(1, 1, 2, 4), set(), "NotImplemented_0", {"order3_raises"}),
    ],
    ids=["once_differentiable", "not implemented"],
)
def test_dead_ends_are_red(f, x, marked, dead_end, third):
    picture = graph(f, x)
    assert of_colour(picture, RAISES) == {dead_end} | marked
    assert dead_end not in [tail for tail, _ in edges(picture)]
    assert of_colour(graph(f, x, order=3), RAISES) == {dead_end} | marked | third
    assert picture.colours["no further derivative"] == RAISES


@pytest.mark.parametrize(
    "f",
    [
        # The cotangents are constants, so no node of second order represents the missing derivative.
        lambda x: OnceSine.apply(x).sum(),
        lambda x: OnceSine.apply(3 * x).sum(),
        lambda x: x.square().sum() + OnceSine.apply(x).sum(),
        lambda x: OnceSine.apply(x.exp()).sum() * 2,
    ],
    ids=["at the end", "at the start", "beside others", "behind others"],
)
def test_once_differentiable_functions_are_marked(f):
    picture = graph(f, torch.ones(3))
    assert of_colour(picture, RAISES) == {"OnceSineBackward_0"}
    assert "once_differentiable" in nodes(picture)["OnceSineBackward_0"]
    assert "no further derivative" not in graph(lambda x: Square.apply(x).sum(), torch.ones(3)).colours


def test_long_chain_does_not_recurse():
    def f(x):
        for _ in range(3000):
            x = x.sin()
        return x

    assert len(of_colour(graph(f, torch.tensor(1.0), order=1), BLUE)) == 3000


@pytest.mark.parametrize(
    ("f", "x", "options", "message"),
    [
        (torch.sin, torch.ones(3), {}, r"graph: f: expected one real .* got shape \(3,\)"),
        (lambda x: x.detach().sum(), torch.ones(3), {}, "graph: f: expected a function that depends on x"),
        (torch.sin, torch.tensor(1), {}, "graph: cannot differentiate with respect to x"),
        (torch.sin, torch.tensor(1.0), {"order": 0}, "graph: order: expected an int of 1 or more, got 0"),
    ],
)
def test_graph_rejects_bad_arguments(f, x, options, message):
    with pytest.raises(hodiff.InputError, match=message):
        graph(f, x, **options)
