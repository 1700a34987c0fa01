"""Tests of torch's control flow operators, compiled and exported code, and disabled gradients inside a function."""

import pytest
import torch
from drawing import normals, seeded
from mpmath_series import D
from taylor.nested import assert_all
from torch import nn

import hodiff
from hodiff.taylor import jet

operators = torch._higher_order_ops

randn = normals(seeded())

X, V, W = randn(4), randn(4), randn(4, 4)
TERMS = [V, randn(4), randn(4)]


def sums(x):
    """Compute the state and the outputs of the scan below, in forward order."""
    state, rows = x[0], []
    for each in x.unbind():
        rows.append(state + each)
        state = state * each
    return torch.stack([state, *rows])


def step(state, x):
    return state * x, state + x


def scanned(x, *, reverse=False):
    state, rows = operators.scan(step, x[0], x, reverse=reverse)
    return torch.cat([state[None], rows])


def backwards(x):
    """Compute the state and the outputs of the scan in reverse order, with outputs at the places of their elements."""
    state, rows = x[0], []
    for each in x.unbind()[::-1]:
        rows.append(state + each)
        state = state * each
    return torch.stack([state, *rows[::-1]])


def along_columns(x):
    return operators.scan(step, x, W * x, dim=1)[1]


def by_columns(x):
    state, columns = x, []
    for column in (W * x).unbind(1):
        columns.append(state + column)
        state = state * column
    return torch.stack(columns, 1)


def plain(x):
    return torch.sin(x) * x


class Plain(nn.Module):
    def forward(self, x):
        return torch.sin(x) * x


CASES = {
    "cond": (lambda x: torch.cond(x.sum() > -100, lambda a: a.sin(), lambda a: a.cos(), (x,)), torch.sin),
    "cond, the other": (lambda x: torch.cond(x.sum() > 100, lambda a: a.sin(), lambda a: a.cos(), (x,)), torch.cos),
    "cond, closed over": (lambda x: torch.cond(x.sum() > -100, lambda: x.sin(), lambda: x.cos(), ()), torch.sin),
    "cond in a batch": (
        lambda x: torch.vmap(lambda a: torch.cond(a > 0, lambda a: a.sin(), lambda a: a.cos(), (a,)))(x),
        lambda x: torch.where(x.detach() > 0, x.sin(), x.cos()),
    ),
    "while_loop": (
        lambda x: torch.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * x), (torch.tensor(0), x))[1],
        lambda x: x**4,
    ),
    "scan": (scanned, sums),
    "scan from the end": (lambda x: scanned(x, reverse=True), backwards),
    "scan along columns": (along_columns, by_columns),
    "associative_scan": (
        lambda x: operators.associative_scan(torch.mul, x, 0, combine_mode="generic"),
        lambda x: torch.stack([x[: k + 1].prod() for k in range(4)]),
    ),
    "associative_scan from the end": (
        lambda x: operators.associative_scan(torch.mul, x, 0, True, combine_mode="generic"),
        lambda x: torch.stack([x[k:].prod() for k in range(4)]),
    ),
    "map": (lambda x: operators.map(lambda row, a: row * a, W, x), lambda x: W * x),
    "a script": (torch.jit.script(plain), plain),
    "an exported program": (torch.export.export(Plain(), (X,)).module(), plain),
    "compiled code": (torch.compile(plain, backend="eager"), plain),
    "a branch of Python": (lambda x: x.sin() if x.sum() > -100 else x.cos(), torch.sin),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_control_flow_matches_plain_python(name):
    f, right = CASES[name]
    assert_all(f, right, X, TERMS)


@pytest.mark.parametrize("name", ["cond", "while_loop", "scan", "map"])
def test_uncorrected_control_flow_matches_forward_mode(name):
    f, right = CASES[name]
    found = jet(f, (X,), ([V],), correct=False)
    torch.testing.assert_close(found[1][0], torch.func.jvp(right, (X,), (V,))[1])


def test_operators_are_unchanged_outside_jets():
    torch.testing.assert_close(torch.compile(CASES["cond"][0], backend="eager", fullgraph=True)(X), X.sin())
    torch.testing.assert_close(torch.cond(True, torch.sin, torch.cos, (X,)), X.sin())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "in_python"),
    [
        (lambda x: torch.cat((x, x * x)).prod(), lambda x: torch.cat([x, x * x]).prod()),
        (lambda x: torch.stack(x.split(1)).prod(), lambda x: x.prod()),
        (lambda x: operators.scan(step, x[0], x)[1].prod(), lambda x: 2 * x[0] * (x[0] ** 2 + x[1])),
        (lambda x: operators.map(torch.sin, x).prod(), lambda x: x.sin().prod()),
    ],
)
def test_compiled_tuples_and_loops_match(f, in_python):
    x = X[:2]
    found = torch.compile(lambda x: hodiff.laplacian(f)(x), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, torch.func.hessian(in_python)(x).trace())


@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)])
def test_functions_bound_before_import_are_rejected(moving):
    own = operators.scan.__wrapped__
    state, rows = (lambda x, moves=moves: x if moves else X for moves in moving)
    with pytest.raises(hodiff.RouteError, match=r"bound before hodiff was imported"):
        jet(lambda x: own(step, state(x)[0], rows(x))[0] + 0 * x[0], (X,), ([V],))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_with_a_length_matches(reverse):
    """A scan may have a length instead of inputs, as in torch 2.15."""

    def logistic(x, rows):
        assert rows is None
        return 3 * x * (1 - x), {"square": x * x}

    def f(x):
        last, rows = operators.scan(logistic, x, length=3, reverse=reverse)
        return torch.stack([last, *rows["square"]])

    def by_hand(x):
        found = []
        for _ in range(3):
            found.append(x * x)
            x = 3 * x * (1 - x)
        return torch.stack([x, *(found[::-1] if reverse else found)])

    value, (slope,) = jet(f, (X,), ([V],))
    right = torch.func.jvp(by_hand, (X,), (V,))
    torch.testing.assert_close((value, slope), right)


@pytest.mark.parametrize(
    ("length", "xs", "said"),
    [(3, X, "expected 4, .* got 3"), (True, None, "expected a number .* got True"), (-1, None, ".* got -1")],
)
def test_scan_rejects_inconsistent_length(length, xs, said):
    with pytest.raises(hodiff.InputError, match=f"scan: length: {said}"):
        jet(lambda x: operators.scan(step, x[0], xs, length=length)[0], (X,), ([V],))


@pytest.mark.parametrize("options", [{"xs": torch.zeros(4, 0, dtype=D), "dim": 1}, {"length": 0}])
def test_scan_without_steps_returns_its_state(options):
    """A scan without steps returns the state and empty outputs, as in torch 2.15."""

    def f(x):
        state, rows = operators.scan(lambda c, a: (c * c, {"twice": 2 * c, "none": None}), x.sin(), **options)
        assert rows["none"] is None
        assert rows["twice"].shape == ((4, 0) if "xs" in options else (0, 4))
        return state.sum() + rows["twice"].sum()

    torch.testing.assert_close(hodiff.laplacian(f)(X), -X.sin().sum())


def test_associative_scan_of_nothing_is_accepted():
    f = lambda x: operators.associative_scan(torch.add, (x * x)[:0], 0, combine_mode="generic").sum() + x.prod()  # noqa: E731
    torch.testing.assert_close(hodiff.laplacian(f)(X), torch.zeros((), dtype=D))


def test_loop_whose_rows_differ_is_rejected():
    def f(x):
        return torch.vmap(lambda a: torch.while_loop(lambda a: a < 3, lambda a: (a + 1,), (a,))[0])(x)

    with pytest.raises(hodiff.InputError, match="one answer that is known"):
        jet(f, (X,), ([V],))


def no_grad_constant(x):
    with torch.no_grad():
        c = x * x
    return c * x


def enable_grad_inside_no_grad(x):
    with torch.no_grad():
        c = x * x
        with torch.enable_grad():
            d = x * x
    return c * d


def switched(x):
    torch.set_grad_enabled(False)
    c = x * x
    torch.set_grad_enabled(True)
    return c * x


def inference(x):
    with torch.inference_mode():
        c = x * x
    return c * x


def in_place_under_no_grad(x):
    """Write in place under no_grad; the tensor's earlier derivative is unchanged, as in torch."""
    y = x * x
    with torch.no_grad():
        y.mul_(3)
    return y * x


def with_a_jet(x):
    """A series that is computed under no_grad has its derivatives."""
    with torch.no_grad():
        _, (slope,) = jet(lambda a: a**3, (x,), ([torch.ones_like(x)],))
    return slope * x


def with_a_gradient(x):
    with torch.no_grad():
        slope = torch.func.grad(lambda a: (a**3).sum())(x)
    return slope * x


def with_a_gradient_by_another(x):
    with torch.no_grad():
        slope = torch.func.grad(lambda w: ((w * x) ** 3).sum())(torch.ones_like(X))
    return slope * x


def with_a_product(x):
    with torch.no_grad():
        product = hodiff.hvp(lambda a: (a**3 * x).sum(), torch.ones_like(X), torch.ones_like(X))
    return product * x


CONSTANT = {
    "no_grad": (no_grad_constant, lambda x: X * X * x),
    "enable_grad inside": (enable_grad_inside_no_grad, lambda x: X * X * x * x),
    "set_grad_enabled": (switched, lambda x: X * X * x),
    "inference_mode": (inference, lambda x: X * X * x),
    "a jet": (with_a_jet, lambda x: 3 * X * X * x),
    "a gradient": (with_a_gradient, lambda x: 3 * X * X * x),
    "a gradient by another": (with_a_gradient_by_another, lambda x: 3 * X**3 * x),
    "a Hessian product": (with_a_product, lambda x: 6 * X * x),
    "written": (in_place_under_no_grad, lambda x: (x * x - X * X + 3 * X * X) * x),
}


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("name", CONSTANT)
def test_disabled_gradients_are_constants(name, recording):
    """Derivatives that are disabled inside f are zero, whatever the grad mode outside."""
    f, right = CONSTANT[name]
    if name == "set_grad_enabled" and not recording:
        pytest.skip("nothing is switched")
    with torch.set_grad_enabled(recording):
        found = jet(f, (X,), (TERMS[:2],))
    torch.testing.assert_close(found, jet(right, (X,), (TERMS[:2],)))


def test_modules_may_write_constants_into_buffers():
    """Writes to buffers of constants work as without jets."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=D))

        def forward(self, x):
            self.calls.add_(1)
            return x.sin()

    module = Counting()
    torch.testing.assert_close(jet(module, (X,), ([V],))[1][0], X.cos() * V)
    assert module.calls == 1


def test_writing_derivatives_into_a_buffer_is_rejected():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, dtype=D))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x * 0.1)
            return x * self.mean

    with pytest.raises(hodiff.InputError, match="cannot write a jet to a constant tensor"):
        jet(Averaging(), (X,), ([V],))


def test_torch_tensor_of_values_is_rejected_with_a_remedy():
    with pytest.raises((TypeError, hodiff.HodiffError), match=r"torch\.stack"):
        jet(lambda x: torch.tensor([x[0], x[1]]), (X,), ([V],))
