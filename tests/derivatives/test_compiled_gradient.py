"""Compiled gradients: closed forms, one graph a form of the arguments, and eager where compiling fails."""

import pytest
import torch

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.derivatives import compiled_gradient

D = torch.float64


def objective(x, scale, inputs):
    """Sum of cubes of an affine map, whose gradient is written out below."""
    return scale * ((inputs @ x["w"] + x["b"]) ** 3).sum()


def gradient_by_hand(x, scale, inputs):
    slope = 3 * scale * (inputs @ x["w"] + x["b"]) ** 2
    return {"w": inputs.T @ slope, "b": slope.sum(0)}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


POINT = {"w": draw(3, 2), "b": draw(2, seed=1)}


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs that would be compiled, which run as they were traced."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiled_gradient, "compile_graph", keep)
    return graphs


def close(found, expected):
    return all(torch.allclose(found[name], leaf, rtol=1e-12) for name, leaf in expected.items())


def test_the_compiler_itself():
    with silence_torch_warnings():
        found, value = hodiff.compile_gradient(objective, value=True)(POINT, 0.5, draw(5, 3, seed=2))
    assert close(found, gradient_by_hand(POINT, 0.5, draw(5, 3, seed=2)))
    assert torch.allclose(value, objective(POINT, 0.5, draw(5, 3, seed=2)))
    assert not value.requires_grad


def test_one_graph_a_form(uncompiled):
    gradient = hodiff.compile_gradient(objective)
    for seed, scale, rows in ((2, 0.5, 5), (3, 0.5, 5), (4, 2.0, 5), (5, 2.0, 7)):
        inputs = draw(rows, 3, seed=seed)
        point = {name: leaf + seed for name, leaf in POINT.items()}
        assert close(gradient(point, scale, inputs), gradient_by_hand(point, scale, inputs))
    # Another number is another graph, and so are other shapes; other values are not.
    assert len(uncompiled) == 3


def test_parameters_and_modes(uncompiled):
    inputs = draw(5, 3, seed=2)
    parameters = {name: torch.nn.Parameter(leaf) for name, leaf in POINT.items()}
    gradient = hodiff.compile_gradient(objective)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert close(gradient(parameters, 1.0, inputs), gradient_by_hand(POINT, 1.0, inputs))
    assert all(parameter.grad is None for parameter in parameters.values())


def test_a_leaf_that_is_ignored_has_zeros(uncompiled):
    found = hodiff.compile_gradient(lambda x: (x["a"] ** 2).sum())({"a": draw(2), "b": draw(3)})
    assert torch.equal(found["a"], 2 * draw(2))
    assert torch.equal(found["b"], torch.zeros(3, dtype=D))


def test_branches_stay_eager():
    def absolute(x):
        return x.sum() if x.sum() > 0 else -x.sum()

    gradient = hodiff.compile_gradient(absolute)
    with pytest.warns(hodiff.HodiffWarning, match="could not be compiled"):
        assert torch.equal(gradient(torch.ones(2)), torch.ones(2))
    # The form is known to fail, and both branches are right.
    assert torch.equal(gradient(-torch.ones(2)), -torch.ones(2))


def test_disagreement_stays_eager(monkeypatch):
    monkeypatch.setattr(
        compiled_gradient,
        "compile_graph",
        lambda graph, inputs: lambda *tensors: [2 * each for each in graph(*tensors)],
    )
    gradient = hodiff.compile_gradient(lambda x: (x**2).sum())
    with pytest.warns(hodiff.HodiffWarning, match="disagreed with eager by 1"):
        assert torch.equal(gradient(draw(3)), 2 * draw(3))
    assert torch.equal(gradient(draw(3)), 2 * draw(3))


def test_refuses():
    with pytest.raises(hodiff.InputError, match="f must be callable"):
        hodiff.compile_gradient(3)
    gradient = hodiff.compile_gradient(lambda x: (x**2).sum())
    with pytest.raises(hodiff.InputError, match="cannot differentiate"):
        gradient(torch.arange(3))
    with pytest.raises(hodiff.InputError, match=r"outside of torch.func"):
        torch.func.vmap(gradient)(torch.ones(2, 3))
    with pytest.raises(hodiff.InputError, match="shape"):
        hodiff.compile_gradient(lambda x: x**2)(torch.ones(2))
    with pytest.raises(hodiff.InputError, match="does not depend"):
        hodiff.compile_gradient(lambda x: torch.ones(()))(torch.ones(2))
