"""Weight normalization and other parametrizations, by torch's operators and modules, against plain formulas."""

import warnings

import pytest
import torch
from drawing import draw
from slow_cases import slow_except
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings

D = torch.float64

FUNCTIONS = {
    "rows": (lambda v, g: torch._weight_norm(v, g, 0), (draw(3, 4), draw(3, 1, seed=1))),
    "columns": (lambda v, g: torch._weight_norm(v, g, 1), (draw(3, 4), draw(1, 4, seed=1))),
    "all": (lambda v, g: torch._weight_norm(v, g, -1), (draw(3, 4), draw(seed=1))),
    "last of three": (lambda v, g: torch._weight_norm(v, g, dim=2), (draw(2, 3, 2), draw(1, 1, 2, seed=1))),
    "second of three": (lambda v, g: torch._weight_norm(v, g, 1), (draw(2, 3, 2), draw(1, 3, 1, seed=1))),
    "by keyword": (lambda v, g: torch._weight_norm(v=v, g=g), (draw(3, 2), draw(3, 1, seed=1))),
    "numbers in a row": (lambda v, g: torch._weight_norm(v, g), (draw(3, 2), draw(3, seed=1))),
    "strided": (lambda v, g: torch._weight_norm(v.mT, g), (draw(2, 3), draw(3, 1, seed=1))),
    "kernel": (lambda v, g: torch._weight_norm_interface(v, g, 0)[0], (draw(3, 4), draw(3, 1, seed=1))),
    "kernel's norms": (lambda v, g: torch._weight_norm_interface(v, g, 1)[1] + g, (draw(3, 2), draw(1, 2, seed=1))),
    "norm of all": (lambda v: torch.norm_except_dim(v, 2, -1), (draw(3, 4),)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", slow_except(FUNCTIONS, list(FUNCTIONS)[::3]))
def test_derivatives_match_differences_by_every_route(name):
    f, inputs = FUNCTIONS[name]
    hodiff.assert_differentiable(hodiff.corrected()(f), inputs, order=3, scipy=False)


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_match_torch(name, dtype):
    f, inputs = FUNCTIONS[name]
    if dtype == torch.float16 and name.startswith(("kernel", "numbers")):
        pytest.skip("torch's kernel does not take 16 bits")
    inputs = [each.to(dtype) for each in inputs]
    torch.testing.assert_close(hodiff.corrected()(f)(*inputs), f(*inputs))


@pytest.mark.parametrize("shape", [(2,), (), (4, 1)])
def test_rejects_wrong_number_of_norms(shape):
    with hodiff.corrected(), pytest.raises(hodiff.HodiffError, match="weight_norm: g: expected one number for each"):
        torch._weight_norm(draw(3, 4), draw(*shape))


def test_one_element_rows_match_closed_form():
    v, g = draw(3), draw(3, seed=1)
    got = hodiff.hvp(lambda x: torch._weight_norm(*x).pow(3).sum(), (v, g), (v, g))
    torch.testing.assert_close(got, (torch.zeros_like(v), 6 * g * g * v.sign()))


def test_empty_tensors_are_accepted():
    with hodiff.corrected():
        assert torch._weight_norm(draw(3, 0), draw(3, 1)).shape == (3, 0)
        assert torch._weight_norm(draw(0, 3), draw(0, 1)).shape == (0, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch._weight_norm(draw(3, 4), torch.ones(3, 1), 0),
        lambda: torch._weight_norm(draw(3, 4), 2.0, 0),
        lambda: torch._weight_norm(draw(3, 4), draw(3, 1), 2),
        lambda: torch._weight_norm_interface(draw(2, 3, 4), draw(1, 3, 1), 1),
    ],
)
def test_invalid_arguments_raise_the_error_of_torch(call):
    with pytest.raises((RuntimeError, TypeError, IndexError)) as by_torch:
        call()
    with hodiff.corrected(), pytest.raises(by_torch.type):
        call()


# Each weight by its formula, from the parameters and the module's buffers

ORIGINAL = "parametrizations.weight.original"
V, G, U = ORIGINAL + "1", ORIGINAL + "0", "parametrizations.weight.0._u"


def norm(v, dims):
    return (v * v).sum(dims, keepdim=True).sqrt()


def divided_by_largest_singular_value(W, u, v):
    """The weight over its largest singular value, whose singular vectors are constants in evaluation."""
    return W / (u @ W @ v)


def exponential(X):
    return torch.linalg.matrix_exp(X.tril() - X.tril().T)


def cayley(X):
    one, A = torch.eye(len(X), dtype=D), X.tril() - X.tril().T
    return torch.linalg.inv(one - A / 2) @ (one + A / 2)


def reflections(X):
    n, k = X.shape
    Q = torch.eye(n, dtype=D)
    for i in range(k):
        w = torch.cat([torch.zeros(i, dtype=D), torch.ones(1, dtype=D), X[i + 1 :, i]])
        Q = Q - Q @ torch.outer(w, w) * 2 / (w @ w)
    return Q[:, :k] * X.diagonal().detach()


def by_hooks(parametrize, module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated
        return parametrize(module, **options)


MODULES = {
    "weight_norm": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda p, _: p[G] * p[V] / norm(p[V], 1),
    ),
    "weight_norm of columns": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1),
        lambda p, _: p[G] * p[V] / norm(p[V], 0),
    ),
    "weight_norm of all": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=None),
        lambda p, _: p[G] * p[V] / norm(p[V], (0, 1)),
    ),
    "weight_norm by hooks": (
        lambda: by_hooks(nn.utils.weight_norm, nn.Linear(4, 3)),
        lambda p, _: p["weight_g"] * p["weight_v"] / norm(p["weight_v"], 1),
    ),
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
        lambda p, b: divided_by_largest_singular_value(p[ORIGINAL], b[U], b["parametrizations.weight.0._v"]),
    ),
    "spectral_norm by hooks": (
        lambda: by_hooks(nn.utils.spectral_norm, nn.Linear(4, 3)).eval(),
        lambda p, b: divided_by_largest_singular_value(p["weight_orig"], b["weight_u"], b["weight_v"]),
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda p, b: b["parametrizations.weight.0.base"] @ exponential(p[ORIGINAL]),
    ),
    "orthogonal by Cayley": (
        lambda: parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"),
        lambda p, b: b["parametrizations.weight.0.base"] @ cayley(p[ORIGINAL]),
    ),
    "orthogonal by reflections": (
        lambda: parametrizations.orthogonal(nn.Linear(3, 4), use_trivialization=False),
        lambda p, _: reflections(p[ORIGINAL]),
    ),
}


def problem(name):
    """Return a loss of a module's parameters, the loss by the weight's formula, a point and a direction."""
    make, weight = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    point = {
        key: each.detach() + 0.3 * torch.randn_like(each).tril(-1)
        for key, each in module.named_parameters()
        if each.dim() > 1
    } | {key: each.detach() for key, each in module.named_parameters() if each.dim() < 2}
    direction = {key: torch.randn_like(each) for key, each in point.items()}
    x, state = torch.randn(5, module.in_features, dtype=D), {k: b.clone() for k, b in module.named_buffers()}

    def loss(p):
        return functional_call(module, p, (x,)).sin().pow(3).sum()

    def by_formula(p, state=state):
        return (x @ weight(p, state).T + p["bias"]).sin().pow(3).sum()

    return module, loss, by_formula, point, direction


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(
            found[key], expected[key], rtol=1e-8, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("name", MODULES)
def test_products_of_parametrized_modules_match_formula(name):
    _, loss, by_formula, p, v = problem(name)
    torch.testing.assert_close(loss(p), by_formula(p))
    expected = torch.func.jvp(torch.func.grad(by_formula), (p,), (v,))[1]
    for route in ("auto", *hodiff.ROUTES):
        assert_same(hodiff.hvp(loss, p, v, route=route), expected)
    assert_same(hodiff.HessianOperator(loss, p) @ v, expected)


def test_trace_and_diagonal_match_formula():
    _, loss, by_formula, p, _ = problem("weight_norm")
    H = hodiff.hessian_matrix(by_formula, p, correct=False)
    trace = hodiff.estimators.trace(hodiff.HessianOperator(loss, p), method="exact")
    assert trace.value == pytest.approx(H.trace().item())
    diagonal = torch.cat([each.flatten() for each in hodiff.hessian_diagonal(loss)(p).values()])
    torch.testing.assert_close(diagonal, H.diagonal())


def test_gauss_newton_matches_formula():
    module, _, _, p, v = problem("weight_norm")
    x, target = torch.randn(5, 4, dtype=D), torch.randn(5, 3, dtype=D)

    def by_formula(p):
        return x @ (p[G] * p[V] / norm(p[V], 1)).T + p["bias"]

    found = hodiff.GaussNewtonOperator(module, nn.MSELoss(reduction="sum"), p, x, target, reduction="sum") @ v
    pushed = torch.func.jvp(by_formula, (p,), (v,))[1]
    assert_same(found, torch.func.vjp(by_formula, p)[1](2 * pushed)[0])


def test_inner_loop_gradient_matches_formula():
    _, loss, by_formula, p, _ = problem("weight_norm")

    def after(start, loss):
        return loss(hodiff.meta.adapt(lambda p, _: loss(p), start, None, hodiff.meta.SGD(0.01), 3))

    def by_hand(start):
        for _ in range(3):
            slope = torch.func.grad(by_formula)(start)
            start = {key: start[key] - 0.01 * slope[key] for key in start}
        return by_formula(start)

    found = hodiff.corrected()(torch.func.grad(after))(p, loss)
    assert_same(found, torch.func.grad(by_hand)(p))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight_norm", "weight_norm by hooks"])
def test_compiled_operator_matches_formula(name):
    _, loss, by_formula, p, v = problem(name)
    expected = torch.func.jvp(torch.func.grad(by_formula), (p,), (v,))[1]
    with silence_torch_warnings():
        assert_same(hodiff.HessianOperator(loss, p, compile=True) @ v, expected)


@pytest.mark.slow
@pytest.mark.parametrize("route", [route for route in hodiff.ROUTES if route != "forward-over-forward"])
def test_compiled_hvp_matches_formula(route):
    _, loss, by_formula, p, v = problem("weight_norm")
    expected = torch.func.jvp(torch.func.grad(by_formula), (p,), (v,))[1]
    torch.compiler.reset()
    product = torch.compile(lambda p, v: hodiff.hvp(loss, p, v, route=route), backend="aot_eager")
    with silence_torch_warnings():
        assert_same(product(p, v), expected)


def test_preflight_reports_weight_norm():
    module = parametrizations.weight_norm(nn.Linear(4, 3))
    assert hodiff.preflight(module, torch.randn(2, 4)).ok
    assert set(hodiff.preflight(module, torch.randn(2, 4), correct=False).routes.values()) == {"wrong"}


def test_spectral_norm_in_training_keeps_its_vectors_constant():
    """Torch's gradient does so, too: power iteration updates the vectors in each call, without a graph."""
    module, loss, by_formula, p, v = problem("spectral_norm")
    module.train()
    found = hodiff.hvp(loss, p, v)
    moved = {name: each.clone() for name, each in module.named_buffers()}
    assert_same(found, torch.func.jvp(torch.func.grad(lambda p: by_formula(p, moved)), (p,), (v,))[1])
    with pytest.raises(hodiff.InputError, match=r"model.eval\(\)"):
        hodiff.HessianOperator(loss, p) @ v
