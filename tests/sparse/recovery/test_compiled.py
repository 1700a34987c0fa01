"""Compiled sparse Hessians equal eager ones, with one graph per argument structure and current closed-over values."""

from functools import partial

import pytest
import scipy.sparse
import torch
from cases import rosenbrock
from uncompiled import keep_graphs

import hodiff
from hodiff import InputError
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.derivatives import compiled_calls
from hodiff.sparse import color, hessian, hessian_pattern, jacobian, lagrangian_hessian, value_and_hessian
from tests.sparse.problems import PROBLEMS, D, point


@pytest.fixture
def uncompiled(monkeypatch):
    """Run the graphs as traced, without compiling."""
    return keep_graphs(monkeypatch, compiled_calls)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", PROBLEMS)
def test_traced_hessian_matches_dense(name, uncompiled):
    f, n = PROBLEMS[name]
    x = point(n)
    dense = hodiff.hessian_matrix(f, x)
    of_f = value_and_hessian(f, compile=True, method="acyclic")
    for where in (x, 0.9 * x):
        value, found = of_f(where)
        dense = hodiff.hessian_matrix(f, where)
        torch.testing.assert_close(value, f(where))
        torch.testing.assert_close(found.to_dense(), dense, rtol=1e-12, atol=1e-11 * dense.abs().max().item())
    assert len(uncompiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROBLEMS)[::2])
def test_compiled_hessian_matches_dense(name):
    f, n = PROBLEMS[name]
    x = point(n)
    dense = hodiff.hessian_matrix(f, x)
    with silence_torch_warnings():
        found = hessian(f, compile=True)(x).to_dense()
    torch.testing.assert_close(found, dense, rtol=1e-12, atol=1e-11 * dense.abs().max().item())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forward_mode_inside_the_function_matches(compile):
    """The derivatives contain zeros without storage, which modes and compiled code must not read."""

    def f(x):
        return torch.func.jvp(torch.func.grad(lambda y: (y**4).sum()), (x,), (torch.ones_like(x),))[1].square().sum()

    x = point(5)
    with silence_torch_warnings():
        found = hessian(f, compile=compile)(x).to_dense()
    torch.testing.assert_close(found, torch.diag(1728 * x**2))


def test_changed_closure_variables_are_used(uncompiled):
    weights = point(6)

    def f(p, *, power):
        return (weights * (p["a"][1:] - p["a"][:-1]) ** power).sum() + p["b"] ** 2

    of_f = hessian(f, compile=True)
    for power in (2, 3):
        for _ in range(2):
            p = {"a": point(7), "b": torch.tensor(0.5, dtype=D)}
            torch.testing.assert_close(
                of_f(p, power=power).to_dense(), hodiff.hessian_matrix(partial(f, power=power), p)
            )
            weights.mul_(1.5)
    assert len(uncompiled) == 2


def test_changed_closure_pattern_is_found_again(uncompiled):
    step = [1]
    of_f = hessian(lambda x: (x[step[0] :] * x[: -step[0]]).sum(), compile=True)
    for step[0] in (1, 3):
        expected = torch.zeros(8, 8, dtype=D)
        expected.diagonal(step[0]).fill_(1)
        assert torch.equal(of_f(point(8)).to_dense(), expected + expected.T)


def test_lower_precision_inside_is_not_taken_for_missing_entries(uncompiled):
    def f(x):
        return (x[1:].float() * x[:-1].float().square()).sum()

    dense = hodiff.hessian_matrix(f, point(30))
    torch.testing.assert_close(hessian(f, compile=True)(point(30)).to_dense(), dense, rtol=1e-5, atol=1e-5)


def test_chunks_and_multipliers_match(uncompiled):
    def constraints(x):
        return x[1:] * x[:-1] ** 2

    x, multipliers = point(10), point(9)
    of_pair = lagrangian_hessian(rosenbrock, constraints, compile=True, chunk_size=1)
    dense = hodiff.hessian_matrix(lambda x: rosenbrock(x) + multipliers @ constraints(x), x)
    torch.testing.assert_close(of_pair(x, multipliers).to_dense(), dense)


def test_untraceable_function_runs_eagerly_with_a_warning():
    def f(x):
        return (x * torch.from_numpy(x.detach().numpy() ** 2)).sum() + (x**3).sum()

    with pytest.warns(hodiff.HodiffWarning, match=r"sparse.hessian: the product .*runs eagerly"):
        found = hessian(f, compile=True, pattern=scipy.sparse.eye_array(4))(point(4)).to_dense()
    torch.testing.assert_close(found, hodiff.hessian_matrix(f, point(4)))


def test_compile_is_rejected_inside_transforms(uncompiled):
    x = point(5)
    coloring = color(hessian_pattern(rosenbrock, x))
    with pytest.raises(InputError, match=r"sparse.hessian: expected a call outside of .*compile=True"):
        torch.func.vmap(hessian(rosenbrock, coloring=coloring, format="values", compile=True))(torch.stack([x, x]))


def test_rejects_bad_options():
    with pytest.raises(InputError, match=r"sparse.hessian: route: expected 'auto' or .*with compile=True"):
        hessian(rosenbrock, compile=True, route="forward-over-reverse")
    with pytest.raises(InputError, match=r"sparse.hessian: compile"):
        hessian(rosenbrock, compile="yes")
    with pytest.raises(TypeError, match=r"hessian\(\) got an unexpected keyword argument 'compiled'"):
        hessian(rosenbrock, compiled=True)


IN_COMPILED_CODE = {
    "hessian": lambda x: hessian(rosenbrock)(x).to_dense() @ x,
    "value": lambda x: value_and_hessian(rosenbrock)(x)[0] * x,
    "lagrangian": lambda x: lagrangian_hessian(rosenbrock, lambda x: x[1:] * x[:-1])(x, x[1:]).to_dense() @ x,
    "jacobian": lambda x: jacobian(lambda x: x[1:] * x[:-1])(x).to_dense() @ x,
    "pattern": lambda x: torch.from_numpy(hessian_pattern(rosenbrock, x).toarray()) * x,
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", IN_COMPILED_CODE)
def test_compiled_code_breaks_the_graph_and_matches(name):
    f, x = IN_COMPILED_CODE[name], point(6)
    torch.testing.assert_close(torch.compile(f, backend="eager")(x), f(x))
