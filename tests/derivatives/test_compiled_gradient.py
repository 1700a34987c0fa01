"""Compiled gradients: closed forms, one graph per form of the arguments, and eager execution as the fallback."""

import functools

import pytest
import torch
from drawing import draw
from threads import in_threads
from uncompiled import keep_graphs

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.derivatives import compiled_calls

D = torch.float64


def objective(x, scale, inputs):
    """Sum of cubes of an affine map; `gradient_by_hand` is its gradient."""
    return scale * ((inputs @ x["w"] + x["b"]) ** 3).sum()


def gradient_by_hand(x, scale, inputs):
    slope = 3 * scale * (inputs @ x["w"] + x["b"]) ** 2
    return {"w": inputs.T @ slope, "b": slope.sum(0)}


POINT = {"w": draw(3, 2), "b": draw(2, seed=1)}


@pytest.fixture
def uncompiled(monkeypatch):
    """Run traced graphs without compiling them, and return the list of graphs."""
    return keep_graphs(monkeypatch, compiled_calls)


def close(found, expected):
    return all(torch.allclose(found[name], leaf, rtol=1e-12) for name, leaf in expected.items())


@pytest.mark.slow
def test_inductor_gradient_matches_closed_form():
    with silence_torch_warnings():
        found, value = hodiff.compile_gradient(objective, value=True)(POINT, 0.5, draw(5, 3, seed=2))
    assert close(found, gradient_by_hand(POINT, 0.5, draw(5, 3, seed=2)))
    assert torch.allclose(value, objective(POINT, 0.5, draw(5, 3, seed=2)))
    assert not value.requires_grad


def test_one_graph_per_form_of_the_arguments(uncompiled):
    gradient = hodiff.compile_gradient(objective)
    for seed, scale, rows in ((2, 0.5, 5), (3, 0.5, 5), (4, 2.0, 5), (5, 2.0, 7)):
        inputs = draw(rows, 3, seed=seed)
        point = {name: leaf + seed for name, leaf in POINT.items()}
        assert close(gradient(point, scale, inputs), gradient_by_hand(point, scale, inputs))
    # A new number or shape needs a new graph; new values do not.
    assert len(uncompiled) == 3


@pytest.mark.slow
def test_first_calls_in_several_threads_are_right(uncompiled):
    """During capture, placeholders replace the closed-over tensors; other threads must not use them."""
    weight = draw(2, 4)
    gradients = [hodiff.compile_gradient(lambda x: ((x @ weight) ** 3).sum()) for _ in range(8)]
    points = [draw(rows, 2, seed=rows) for rows in range(1, 9)]

    def first_calls(i):
        return [gradients[i % 8](x) for x in points]

    for found in in_threads(first_calls, range(32), 32):
        assert not isinstance(found, Exception), found
        for value, x in zip(found, points, strict=True):
            torch.testing.assert_close(value, 3 * (x @ weight) ** 2 @ weight.T)
    assert len(uncompiled) == 64


def test_parameters_and_grad_modes_are_accepted(uncompiled):
    inputs = draw(5, 3, seed=2)
    parameters = {name: torch.nn.Parameter(leaf) for name, leaf in POINT.items()}
    gradient = hodiff.compile_gradient(objective)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert close(gradient(parameters, 1.0, inputs), gradient_by_hand(POINT, 1.0, inputs))
    assert all(parameter.grad is None for parameter in parameters.values())


def test_unused_leaf_has_zero_gradient(uncompiled):
    found = hodiff.compile_gradient(lambda x: (x["a"] ** 2).sum())({"a": draw(2), "b": draw(3)})
    assert torch.equal(found["a"], 2 * draw(2))
    assert torch.equal(found["b"], torch.zeros(3, dtype=D))


def test_each_branch_has_a_graph(uncompiled):
    """The function branches on the sign of its sum and selects its positive elements."""

    def absolute(x):
        return (x if x.sum() > 0 else -x).sum() + (x[x > 0] ** 2).sum()

    gradient, x = hodiff.compile_gradient(absolute), torch.tensor([2.0, 1.0, -1.0], dtype=D)
    for point in (x, -x, x + 0.5, -x - 0.5, 3 * x):
        assert torch.equal(gradient(point), point.sum().sign() + 2 * point.clamp(min=0))
    # The points have two combinations of a sign and a number of positive elements.
    assert len(uncompiled) == 2


def test_ever_new_numbers_fall_back_to_eager(uncompiled):
    gradient = hodiff.compile_gradient(lambda x: (float(x.detach().sum()) * x).sum())
    for size in (1.0, 2.0):
        assert torch.equal(gradient(size * torch.ones(3)), 3 * size * torch.ones(3))
    with pytest.warns(hodiff.HodiffWarning, match=r"test_compiled_gradient.py:\d+, in .*float.*3.0 became 9.0"):
        assert torch.equal(gradient(3 * torch.ones(3)), 9 * torch.ones(3))
    assert torch.equal(gradient(4 * torch.ones(3)), 12 * torch.ones(3))
    assert torch.equal(gradient(torch.ones(3)), 3 * torch.ones(3))
    assert len(uncompiled) == 2


def test_disagreement_with_eager_falls_back_to_eager(monkeypatch):
    monkeypatch.setattr(
        compiled_calls,
        "compile_graph",
        lambda graph, inputs, **_: lambda *tensors: [2 * each for each in graph(*tensors)],
    )
    gradient = hodiff.compile_gradient(lambda x: (x**2).sum())
    with pytest.warns(hodiff.HodiffWarning, match="disagreed with eager by 1"):
        assert torch.equal(gradient(draw(3)), 2 * draw(3))
    assert torch.equal(gradient(draw(3)), 2 * draw(3))


WEIGHT = torch.ones(3, dtype=D)
SCALE = 1.0


class Weighted(torch.nn.Module):
    """A weighted sum of squares; the weight is a product of all kinds of state that a module can read."""

    power = 2

    def __init__(self):
        super().__init__()
        self.number = 1.0
        self.items = [torch.ones((), dtype=D)]
        self.register_buffer("buffer", torch.ones(3, dtype=D))

    def forward(self, x):
        weight = self.number * self.items[0] * self.buffer * WEIGHT * SCALE * (1 if self.training else 5)
        return (weight * x**self.power).sum()


# Each change makes the sum five times as large, through other state.
FIVEFOLD = {
    "mode": lambda module, _: module.eval(),
    "number": lambda module, _: setattr(module, "number", 5.0),
    "element": lambda module, _: module.items.__setitem__(0, torch.full((), 5.0, dtype=D)),
    "in place": lambda module, _: module.buffer.mul_(5),
    "past the version": lambda module, _: module.items[0].data.mul_(5),
    "buffer": lambda module, _: setattr(module, "buffer", torch.full((3,), 5.0, dtype=D)),
    "global number": lambda _, patch: patch.setitem(globals(), "SCALE", 5.0),
    "global tensor": lambda _, patch: patch.setitem(globals(), "WEIGHT", torch.full((3,), 5.0, dtype=D)),
}


@pytest.mark.parametrize("change", FIVEFOLD)
def test_changed_state_that_f_reads_is_used(change, uncompiled, monkeypatch):
    module, x = Weighted(), torch.tensor([0.5, 1.0, 2.0], dtype=D)
    gradient = hodiff.compile_gradient(module)
    for _ in range(2):
        assert torch.equal(gradient(x), 2 * x)
    assert len(uncompiled) == 1
    FIVEFOLD[change](module, monkeypatch)
    for _ in range(2):
        assert torch.equal(gradient(x), 10 * x)
    # Tensors are inputs of the graph; numbers are constants in it.
    assert len(uncompiled) == 1 + (change in {"mode", "number", "global number"})


def test_changed_closure_variables_are_used(uncompiled):
    x, power, shift = draw(3), 2, draw(3, seed=1)
    gradient = hodiff.compile_gradient(lambda x: ((x - shift) ** power).sum())
    assert torch.allclose(gradient(x), 2 * (x - shift))
    shift = draw(3, seed=2)
    assert torch.allclose(gradient(x), 2 * (x - shift))
    power = 3
    assert torch.allclose(gradient(x), 3 * (x - shift) ** 2)
    power = 2
    assert torch.allclose(gradient(x), 2 * (x - shift))
    assert len(uncompiled) == 2


def test_autocast_and_default_dtype_have_their_own_graphs(uncompiled):
    weight, x = torch.randn(4, 4), torch.randn(4)
    gradient = hodiff.compile_gradient(lambda x: (weight @ x).pow(2).sum())
    plain = gradient(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradient(x)
        expected = torch.func.grad(lambda x: (weight @ x).pow(2).sum())(x)
    assert torch.equal(cast, expected)
    assert not torch.equal(cast, plain)


@pytest.mark.slow
def test_ever_new_state_falls_back_to_eager(uncompiled):
    module, x = Weighted(), torch.ones(3, dtype=D)
    gradient = hodiff.compile_gradient(module)

    def scaled(number):
        module.number = number
        return gradient(x)

    for i in range(16):
        assert torch.equal(scaled(float(i)), 2 * i * x)
    with pytest.warns(hodiff.HodiffWarning, match="has changed 16 times"):
        assert torch.equal(scaled(16.0), 32 * x)
    assert torch.equal(scaled(17.0), 34 * x)
    assert torch.equal(scaled(3.0), 6 * x)
    assert len(uncompiled) == 16


@pytest.mark.parametrize("where", ["list", "cell"])
def test_function_that_changes_its_state_falls_back_to_eager(where, uncompiled):
    calls, count = [], 0

    def f(x):
        nonlocal count
        if where == "list":
            calls.append(1)
        else:
            count += 1
        return (x**2).sum()

    gradient = hodiff.compile_gradient(f)
    with pytest.warns(hodiff.HodiffWarning, match="changes what it reads"):
        gradient(torch.ones(2))
    before = len(calls) + count
    gradient(torch.ones(2))
    assert len(calls) + count == before + 1
    assert len(uncompiled) == 1


def test_unreachable_tensor_falls_back_to_eager(uncompiled):
    x, hidden = torch.ones(2), torch.ones(2)
    held = iter([hidden])
    (multiply,) = (each.mul for each in held)
    gradient = hodiff.compile_gradient(lambda x: multiply(x**2).sum())
    with pytest.warns(
        hodiff.HodiffWarning, match=r"reads a tensor of shape \(2,\).*, numbers 1, 1, .*neither an argument"
    ):
        assert torch.equal(gradient(x), 2 * x)
    hidden.mul_(5)
    assert torch.equal(gradient(x), 10 * x)


def test_running_statistics_are_updated_once_per_call(uncompiled):
    modules = [torch.nn.BatchNorm1d(3, dtype=D) for _ in range(2)]
    x = draw(4, 3)
    gradient = hodiff.compile_gradient(lambda x: modules[0](x).pow(3).sum())
    for _ in range(3):
        gradient(x)
        modules[1](x)
    for name, buffer in modules[1].named_buffers():
        assert torch.allclose(modules[0].get_buffer(name), buffer)


def test_running_statistics_are_updated_once_with_branches(uncompiled):
    modules = [torch.nn.BatchNorm1d(3, dtype=D) for _ in range(2)]
    x = draw(4, 3)
    gradient = hodiff.compile_gradient(lambda x: modules[0](x).pow(3).sum() * (1 if modules[0](x).sum() < 1 else 2))
    for _ in range(2):
        gradient(x)
        for _ in range(2):
            modules[1](x)
    for name, buffer in modules[1].named_buffers():
        assert torch.allclose(modules[0].get_buffer(name), buffer), name
    assert len(uncompiled) == 1


def test_rejects_bad_arguments():
    with pytest.raises(hodiff.InputError, match="f: expected a callable"):
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


def test_warning_locates_an_unreachable_tensor():
    @functools.lru_cache
    def table(n: int) -> torch.Tensor:
        return torch.arange(n).double() + 0.5

    table(3)
    gradient = hodiff.compile_gradient(lambda x: (x.sin() * table(3)).sum())
    said = (
        r"shape \(3,\) and dtype float64, numbers 0\.5, 1\.5, 2\.5, at test_compiled_gradient\.py:\d+, in .*table\(3\)"
    )
    with pytest.warns(hodiff.HodiffWarning, match=said):
        gradient(torch.ones(3, dtype=torch.float64))
