"""Tests of torch.func transforms inside a function of jets, against explicit formulas."""

import pytest
import torch
from drawing import normals, seeded
from mpmath_series import D
from taylor.nested import along_a_curve, assert_all, laplacian
from torch import nn

import hodiff
from hodiff.taylor import jet

randn = normals(seeded())

W, X, V, Y = randn(4, 4), randn(4), randn(4), randn(4)
ONES = torch.ones(4, dtype=D)
TERMS = [V, X, Y]


def energy(x):
    # Use torch.mv: in a graph, `@` of a constant and a jet is refused.
    return torch.sin(torch.mv(W, x)).sum() + (x**3).sum()


def slope(x):
    return W.mT @ torch.cos(W @ x) + 3 * x**2


def curvature(x):
    return -(W.mT * torch.sin(W @ x)) @ W + torch.diag(6 * x)


def field(x):
    return torch.sin(W @ x) * x


def field_slope(x):
    return torch.cos(W @ x)[:, None] * W * x[:, None] + torch.diag(torch.sin(W @ x))


func = torch.func
# The function with a transform, and its explicit formula.
CASES = {
    "grad": (lambda x: func.grad(energy)(x), slope),
    "grad, closed over": (lambda x: func.grad(lambda w: energy(w * x))(ONES), lambda x: slope(x) * x),
    "grad of one of several": (
        lambda x: func.grad(lambda a, b: energy(a * b), argnums=1)(Y, x),
        lambda x: slope(x * Y) * Y,
    ),
    "grad of both": (
        lambda x: torch.stack(func.grad(lambda a, b: energy(a * b), argnums=(0, 1))(Y, x)),
        lambda x: torch.stack([slope(x * Y) * x, slope(x * Y) * Y]),
    ),
    "grad of a tree": (
        lambda x: func.grad(lambda p: energy(p["a"] * p["b"]))({"a": x, "b": Y})["b"],
        lambda x: slope(x * Y) * x,
    ),
    "grad with more": (
        lambda x: torch.stack(func.grad(lambda a: (energy(a), a * x), has_aux=True)(x)),
        lambda x: torch.stack([slope(x), x * x]),
    ),
    "grad and value": (
        lambda x: torch.cat([each.reshape(-1) for each in func.grad_and_value(energy)(x)]),
        lambda x: torch.cat([slope(x), energy(x)[None]]),
    ),
    "grad of a grad": (
        lambda x: func.grad(lambda a: (func.grad(energy)(a) * x).sum())(x),
        lambda x: curvature(x) @ x,
    ),
    "vjp": (lambda x: func.vjp(field, x)[1](x * x)[0], lambda x: field_slope(x).mT @ (x * x)),
    "vjp by a constant": (lambda x: func.vjp(field, x)[1](Y)[0], lambda x: field_slope(x).mT @ Y),
    "vjp, value": (lambda x: func.vjp(field, x)[0], field),
    "jvp": (lambda x: func.jvp(field, (x,), (x * x,))[1], lambda x: field_slope(x) @ (x * x)),
    "jvp of a constant": (lambda x: func.jvp(field, (Y,), (x,))[1], lambda x: field_slope(Y) @ x),
    "jvp, closed over": (
        lambda x: func.jvp(lambda a: field(a * x), (ONES,), (Y,))[1],
        lambda x: field_slope(x) @ (x * Y),
    ),
    "jacrev": (lambda x: func.jacrev(field)(x), field_slope),
    "jacrev by chunks": (lambda x: func.jacrev(field, chunk_size=2)(x), field_slope),
    "jacrev one by one": (lambda x: func.jacrev(field, chunk_size=1)(x), field_slope),
    "jacfwd": (lambda x: func.jacfwd(field)(x), field_slope),
    "jacfwd, closed over": (
        lambda x: func.jacfwd(lambda a: field(a * x))(ONES),
        lambda x: field_slope(x) * x,
    ),
    "hessian": (lambda x: func.hessian(energy)(x), curvature),
    "vmap": (lambda x: func.vmap(torch.sin)(x), torch.sin),
    "vmap, closed over": (lambda x: func.vmap(lambda w: w * x)(W), lambda x: W * x),
    "vmap by chunks": (lambda x: func.vmap(torch.sin, chunk_size=3)(x), torch.sin),
    "vmap along the last": (
        lambda x: func.vmap(lambda a, b: (a * b, b.sum()), in_dims=(-1, None), out_dims=(1, 0))(W * x, x)[0],
        lambda x: W * x * x[:, None],
    ),
    "vmap of a tree": (
        lambda x: func.vmap(lambda p: p["a"] * p["b"], in_dims=({"a": 0, "b": None},))({"a": x, "b": x}),
        lambda x: x[:, None] * x,
    ),
    "vmap of a grad": (lambda x: func.vmap(func.grad(lambda a: a.sin() * a))(x), lambda x: x.cos() * x + x.sin()),
    "vmap of a grad, closed over": (
        lambda x: func.vmap(func.grad(lambda a: (a * x).prod()))(W),
        lambda x: torch.stack([func.grad(lambda a: (a * x).prod())(row) for row in W]),
    ),
    "grad of a vmap": (
        lambda x: func.grad(lambda a: func.vmap(torch.sin)(a * x).sum())(x),
        lambda x: (x * x).cos() * x,
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_transforms_inside_match_formulas(name):
    f, right = CASES[name]
    assert_all(f, right, X, TERMS)


def test_transforms_of_constants_return_plain_tensors():
    """Transforms of constants return plain tensors, which may be converted to numbers."""

    def f(x):
        (slope_there,) = (func.grad(energy)(Y),)
        return x * float(slope_there.sum()) + func.vmap(torch.sin)(Y) * func.jvp(field, (Y,), (Y,))[1].tolist()[0]

    torch.testing.assert_close(jet(f, (X,), ([V],))[1][0], V * slope(Y).sum())


@pytest.mark.slow
def test_nested_jets_with_a_gradient_inside_match():
    """The mixed derivative of |∇u|² by two parameters, with order 2 in the inner one, is correct."""

    def squared(x):
        return (func.grad(energy)(x) ** 2).sum()

    def inner(g):
        return lambda x: jet(g, (x,), ([V, 0 * V],))[1][1]

    found = jet(inner(squared), (X,), ([Y, X],))
    right = along_a_curve(lambda x: along_a_curve(lambda a: (slope(a) ** 2).sum(), x, [V, 0 * V])[2], X, [Y, X])
    torch.testing.assert_close((found[0], *found[1]), right)
    twice = hodiff.laplacian(hodiff.laplacian(squared))(X)
    torch.testing.assert_close(twice, laplacian(lambda x: laplacian(lambda a: (slope(a) ** 2).sum(), x), X))


def test_jet_inside_a_transform_inside_a_jet_matches():
    f = lambda x: func.grad(lambda a: jet(energy, (a,), ([x, 0 * x],))[1][1])(x)  # noqa: E731
    right = lambda x: func.grad(lambda a: x.detach() @ curvature(a) @ x.detach())(x.detach())  # noqa: E731
    value, _ = jet(f, (X,), ([V],))
    torch.testing.assert_close(value, right(X))


def test_parameter_gradients_match():
    """The gradient by the weights of a residual that contains a gradient matches torch.func."""
    points = randn(6, 2)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def loss(operator):
        def energy_density(x):
            gradient = func.grad(lambda a: net(a).sum())(x)
            return (gradient * gradient).sum()

        return sum(operator(energy_density)(x) for x in points) if operator is trace else operator(energy_density)

    def trace(f):
        return lambda x: torch.trace(func.hessian(f)(x))

    def by_series(f):
        return func.vmap(hodiff.laplacian(f))(points).sum()

    found = torch.autograd.grad(loss(by_series), list(net.parameters()), allow_unused=True)
    right = torch.autograd.grad(loss(trace), list(net.parameters()), allow_unused=True)
    torch.testing.assert_close(found, right)


def test_functional_call_with_moving_parameters_matches():
    """The parameters move, and the input is constant."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().requires_grad_(False)
    parameters = dict(net.named_parameters())
    moves = {name: randn(*each.shape) for name, each in parameters.items()}
    point = randn(3)

    def written_out(p):
        return p["2.weight"] @ torch.tanh(p["0.weight"] @ point + p["0.bias"]) + p["2.bias"]

    zeros = {name: torch.zeros_like(each) for name, each in parameters.items()}
    found = jet(lambda p: func.functional_call(net, p, (point,)), (parameters,), ([moves, zeros, zeros],))

    def at(t):
        return written_out({name: each + t * moves[name] for name, each in parameters.items()})

    right = along_a_curve(at, torch.zeros((), dtype=D), [torch.ones((), dtype=D), *[torch.zeros((), dtype=D)] * 2])
    torch.testing.assert_close((found[0], *found[1]), right)
    assert all(each is parameters[name] for name, each in net.named_parameters())


REFUSED = {
    "an output that is no number": (lambda x: func.grad(field)(x), "to return a scalar"),
    "an output that is no tensor": (lambda x: func.vjp(lambda a: 3.0, x), "return only tensors"),
    "no pair": (lambda x: func.grad(energy, has_aux=True)(x), "should be a tuple"),
    "dimensions that do not fit": (lambda x: func.vmap(torch.sin, in_dims=(0, 0))(x), "in_dims"),
    "outputs that do not fit": (lambda x: func.vmap(torch.sin, out_dims=(0, 0))(x), "out_dims"),
    "a row that varies": (lambda x: func.vmap(torch.sin, out_dims=None)(x), "BatchedTensor when out_dim is None"),
    "cotangents that do not fit": (lambda x: func.vjp(field, x)[1]((x, x)), "structure"),
    "tangents that do not fit": (lambda x: func.jvp(field, (x,), (x, x)), "structure"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejects_unsupported_transforms(name):
    f, words = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError), match=words):
        jet(f, (X,), ([V],))


def constant_part(x):
    with torch.no_grad():
        c = x * x
    return (c * x * x).sum()


COMPILED = {
    "switched off outside": (constant_part, lambda x: (X * X * x * x).sum()),
    "switched off": (constant_part, lambda x: (X * X * x * x).sum()),
    "grad": (lambda x: (func.grad(energy)(x) ** 2).sum(), lambda x: (slope(x) ** 2).sum()),
    "vmap": (lambda x: func.vmap(torch.sin)(x).sum(), lambda x: x.sin().sum()),
    "jvp": (lambda x: func.jvp(energy, (x,), (Y,))[1], lambda x: slope(x) @ Y),
    "cond": (
        lambda x: torch.cond(x.sum() > -100, lambda a: a.sin(), lambda a: a.cos(), (x,)).sum(),
        lambda x: x.sin().sum(),
    ),
    "a function of hodiff": (lambda x: hodiff.functions.swish(x, 1.5).sum(), lambda x: (x * (1.5 * x).sigmoid()).sum()),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_laplacian_matches(name):
    f, right = COMPILED[name]
    torch.compiler.reset()
    total = hodiff.laplacian(f)
    compiled = torch.compile(lambda x: total(x), backend="eager", fullgraph=True)
    with torch.set_grad_enabled(name != "switched off outside"):
        torch.testing.assert_close(compiled(X), laplacian(right, X))


def test_branches_on_values_are_rejected_under_vmap_and_compile():
    """Eager code branches on the value; a batch and a graph have no value."""

    def f(x):
        return x if x > 0 else -x

    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        jet(lambda x: func.vmap(f)(x), (X,), ([V],))
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        func.vmap(lambda x: jet(f, (x,), ([x],)))(X)
    total = hodiff.laplacian(f)
    with pytest.raises(Exception, match="Data-dependent branching"):
        torch.compile(lambda x: total(x), backend="eager", fullgraph=True)(X[0])
