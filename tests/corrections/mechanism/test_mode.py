"""`corrected()`: the calls that it affects, its scope, its strict mode, and transforms without corrections."""

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hodiff
from hodiff.corrections import INVALID, UNNEEDED, register, table, unable, unregister
from hodiff.corrections.mechanism.registry import CORRECTIONS
from hodiff.taylor.directional import nested_directional_derivatives
from hodiff.torch_internals.interception import active_function_modes
from hodiff.torch_internals.operators import foreach_by_name, weight_norm

D = torch.float64
X = torch.tensor([1.0, 2.0, 4.0], dtype=D)
V = torch.tensor([1.0, 0.0, 0.0], dtype=D)


def first_of_layer_norm(x):
    return F.layer_norm(x, (3,))[0]


def along(x):
    return torch.func.jvp(first_of_layer_norm, (x,), (V,))[1]


# Torch differentiates these primitives rightly.
def by_hand(x):
    return ((x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt())[0]


TRUTH = torch.func.grad(lambda x: torch.func.jvp(by_hand, (x,), (V,))[1])(X)
WRONG = torch.func.grad(along)(X)


def is_right(product):
    return torch.allclose(product, TRUTH, rtol=1e-10)


def test_torch_alone_is_wrong():
    """The tests below would prove nothing if torch alone were right."""
    assert not is_right(WRONG)


def test_corrected_works_as_context_and_decorator():
    with hodiff.corrected():
        assert is_right(torch.func.grad(along)(X))
    assert torch.equal(torch.func.grad(along)(X), WRONG)
    assert is_right(hodiff.corrected()(torch.func.grad(along))(X))


def test_corrected_ends_with_an_exception():
    with pytest.raises(KeyError), hodiff.corrected():
        raise KeyError
    assert torch.equal(torch.func.grad(along)(X), WRONG)


def test_corrected_nests_and_is_reentrant():
    mode = hodiff.corrected()
    with mode, hodiff.corrected(), mode:
        assert is_right(torch.func.grad(along)(X))
    with mode:
        assert is_right(torch.func.grad(along)(X))


def test_corrected_affects_its_own_thread_only():
    entered, leave, found = threading.Event(), threading.Event(), []

    def inside():
        with hodiff.corrected():
            entered.set()
            leave.wait(10)
            found.append(is_right(torch.func.grad(along)(X)))

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(10)
    assert torch.equal(torch.func.grad(along)(X), WRONG)
    leave.set()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_every_transform_is_corrected_unless_opted_out(route):
    layer = nn.LayerNorm(3).double()

    def f(x):
        return layer(x)[0]

    truth = torch.func.hessian(by_hand)(X)
    for got in (
        hodiff.hvp(f, X, V, route=route),
        hodiff.hessian(f, route=route)(X)[0],
        hodiff.hessian_matrix(f, X, route=route)[0],
    ):
        torch.testing.assert_close(got, truth[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hodiff.hessian_diagonal(f, route=route)(X), truth.diag(), rtol=1e-10, atol=1e-12)
    by_torch = hodiff.hvp(f, X, V, route=route, correct=False)
    assert is_right(by_torch) == (route in hodiff.ROUTES[:2])


def test_directional_derivatives_and_jacobians_are_corrected():
    values = hodiff.directional_derivatives(first_of_layer_norm, X, V, order=3)
    truth = hodiff.directional_derivatives(by_hand, X, V, order=3)
    torch.testing.assert_close(values, truth, rtol=1e-9, atol=1e-12)
    wrong = nested_directional_derivatives(first_of_layer_norm, X, V, order=3, correct=False)
    assert not torch.allclose(wrong[2], truth[2], rtol=1e-3)
    for mode in ("forward", "reverse"):
        twice = hodiff.jacobian(hodiff.jacobian(first_of_layer_norm, mode=mode), mode=mode)(X)
        torch.testing.assert_close(twice, torch.func.hessian(by_hand)(X), rtol=1e-9, atol=1e-12)


def test_vmap_inside_corrected():
    xs = torch.stack([X, X.sin()])
    expected = torch.stack([torch.func.grad(lambda x: torch.func.jvp(by_hand, (x,), (V,))[1])(x) for x in xs])
    with hodiff.corrected():
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(along))(xs), expected, rtol=1e-10, atol=0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_compiled_hvp_is_corrected(route):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: hodiff.hvp(first_of_layer_norm, x, V, route=route), fullgraph=True, backend="aot_eager"
    )
    assert is_right(compiled(X))


@pytest.mark.slow
def test_compiling_inside_and_around_corrected():
    torch.compiler.reset()

    def product(x):
        with hodiff.corrected():
            return torch.func.grad(along)(x)

    assert is_right(torch.compile(product, fullgraph=True, backend="aot_eager")(X))
    torch.compiler.reset()
    with hodiff.corrected():
        assert is_right(torch.compile(torch.func.grad(along), backend="aot_eager")(X))


def test_registered_rule_is_used_and_may_decline():
    before = CORRECTIONS[torch.hypot]

    @register(torch.hypot, reason="a test", routes=hodiff.ROUTES, reference="none")
    def rule(input, other):
        return (input**2 + other**2).sqrt() if other.dim() else NotImplemented

    three, four = torch.tensor(3.0, requires_grad=True), torch.tensor([4.0])
    with hodiff.corrected():
        assert torch.hypot(three, four).grad_fn.name() == "SqrtBackward0"
        assert torch.hypot(three, four[0]).grad_fn.name() == "HypotBackward0"  # the rule has returned NotImplemented
    row = next(row for row in table() if row.name == "torch.hypot")
    assert row.kind == "wrong"
    assert row.routes == hodiff.ROUTES
    unregister(torch.hypot)
    assert CORRECTIONS[torch.hypot] is before


def test_error_in_a_rule_is_raised():
    @register(torch.hypot, reason="a test")
    def hypot(input, other):
        raise RuntimeError("mine")

    try:
        with hodiff.corrected():
            with pytest.raises(RuntimeError, match="mine"):
                torch.hypot(torch.ones(2), torch.ones(2))
            with pytest.raises(TypeError, match="hypot"):
                torch.hypot("a", "b")
    finally:
        unregister(torch.hypot)


@pytest.fixture
def strict():
    """A mode that overrides one method: calls that torch may get wrong raise."""

    class Strict(hodiff.corrections.Corrections):
        def declined(self, correction, why, func, args, kwargs):
            result = super().declined(correction, why, func, args, kwargs)
            if not why.torch_is_right:
                raise hodiff.RouteError(f"{correction.name}: not corrected, because {why.because}.")
            return result

    return Strict()


@pytest.fixture
def enter_hypot():
    entered = []

    def enter(answer, **options):
        def rule(input, other):
            if isinstance(answer, Exception):
                raise answer
            return answer

        entered.append(register(torch.hypot, reason="a test", **options)(rule))

    yield enter
    for _ in entered:
        unregister(torch.hypot)


ONES = torch.ones(2)


@pytest.mark.parametrize("answer", [UNNEEDED, NotImplemented, "not covered"])
def test_unneeded_rule_leaves_the_call_to_torch(answer, strict, enter_hypot):
    enter_hypot(answer, covers=(lambda *_: False) if answer == "not covered" else None)
    with hodiff.corrected():
        assert torch.equal(torch.hypot(ONES, ONES), ONES * 2**0.5)
    with strict:
        assert torch.equal(torch.hypot(ONES, ONES), ONES * 2**0.5)


@pytest.mark.parametrize(
    ("answer", "because"),
    [
        (unable("numbers are round"), "because numbers are round"),
        (INVALID, "because its arguments do not fit"),
        (hodiff.InputError("hypot: expected more"), "because hypot: expected more"),
    ],
)
def test_declined_call_raises_with_the_reason_in_strict_mode(answer, because, strict, enter_hypot):
    """Torch's own function runs if nothing is differentiated; `declined` receives the reason."""
    enter_hypot(answer)
    with hodiff.corrected():
        assert torch.equal(torch.hypot(ONES, ONES), ONES * 2**0.5)
    with strict, pytest.raises(hodiff.RouteError, match=because):
        torch.hypot(ONES, ONES)
    with strict, pytest.raises(TypeError, match="hypot"):
        torch.hypot("a", "b")


def dual(f):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(ONES, ONES))


DERIVATIVES = {
    "autograd": lambda f: f(ONES.clone().requires_grad_()),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(ONES),
    "jvp": lambda f: torch.func.jvp(f, (ONES,), (ONES,)),
    "jvp inside": lambda f: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (ONES,))[1].sum())(ONES),
    "jvp of a batch": lambda f: torch.func.jvp(torch.func.vmap(f), (ONES,), (ONES,)),
    "batch of a jvp": lambda f: torch.func.vmap(lambda x: torch.func.jvp(f, (x,), (x,)))(ONES),
    "batch of autograd": lambda f: torch.func.vmap(f)(ONES.clone().requires_grad_()),
    "dual numbers": dual,
}
CONSTANT = {
    "plain": lambda f: f(ONES),
    "no_grad": lambda f: torch.no_grad()(f)(ONES.clone().requires_grad_()),
    "vmap": lambda f: torch.func.vmap(f)(ONES),
    "a constant in grad": lambda f: torch.func.grad(lambda x: (x * f(ONES)).sum())(ONES),
    "a constant in jvp": lambda f: torch.func.jvp(lambda x: x * f(ONES), (ONES,), (ONES,)),
    "a detached input in grad": lambda f: torch.func.grad(lambda x: (x * f(x.detach())).sum())(ONES),
    "beside dual numbers": lambda f: dual(lambda x: x * f(ONES)),
}


@pytest.mark.parametrize("kind", ["wrong", "missing"])
@pytest.mark.parametrize("take", [*DERIVATIVES, *CONSTANT])
def test_derivative_through_a_declined_call_is_rejected(take, kind, enter_hypot):
    """A missing derivative is left to torch, and a call without a derivative runs."""
    enter_hypot(unable("numbers are round"), kind=kind, routes=hodiff.ROUTES[2:])

    def call():
        {**DERIVATIVES, **CONSTANT}[take](lambda x: torch.hypot(x, ONES if x.dim() else ONES[0]))

    with hodiff.corrected():
        if kind == "missing" or take in CONSTANT:
            call()
        else:
            with pytest.raises(hodiff.RouteError, match=r"because numbers are round; .* by reverse-over-forward, forw"):
                call()


@pytest.mark.parametrize(("mended", "runs"), [("", True), ("2.0", False), ("99.0", True)])
def test_rule_is_skipped_in_versions_where_torch_is_fixed(mended, runs, strict, enter_hypot):
    enter_hypot(torch.zeros(()), mended=mended)
    with strict:
        assert torch.equal(torch.hypot(ONES, ONES), torch.zeros(()) if runs else ONES * 2**0.5)
    assert (CORRECTIONS[torch.hypot].reason == "a test") == runs
    assert next(row for row in table() if (row.name, row.reason) == ("torch.hypot", "a test")).mended == mended


def test_subclasses_with_their_own_rule_are_asked_first():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "loud" if func is F.layer_norm else super().__torch_function__(func, types, args, kwargs or {})

    with hodiff.corrected():
        assert F.layer_norm(torch.ones(3).as_subclass(Loud), (3,)) == "loud"


class Doubled(TorchFunctionMode):
    """Doubles the results of two functions that no rule calls."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in (F.layer_norm, Tensor.sin) else result


def by_doubled(x):
    return (2 * F.layer_norm(2 * x.sin(), (3,))).pow(3).sum()


OF_DOUBLED = {
    **{route: lambda f, route=route: hodiff.hvp(f, X, V, route=route) for route in hodiff.ROUTES},
    "jacobian": lambda f: hodiff.jacobian(f)(X),
    "operator": lambda f: hodiff.HessianOperator(f, X) @ V,
    "value": lambda f: hodiff.corrected()(f)(X),
    "nested": lambda f: hodiff.corrected()(hodiff.jacobian(f))(X),
}


@pytest.mark.parametrize("name", OF_DOUBLED)
def test_outer_function_modes_see_corrected_functions(name):
    expected = OF_DOUBLED[name](by_doubled)
    with Doubled():
        torch.testing.assert_close(OF_DOUBLED[name](lambda x: F.layer_norm(x.sin(), (3,)).pow(3).sum()), expected)
    with hodiff.corrected(), Doubled(), hodiff.corrected():
        torch.testing.assert_close(OF_DOUBLED[name](lambda x: F.layer_norm(x.sin(), (3,)).pow(3).sum()), expected)


def test_mode_stack_is_restored_after_an_error():
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise ValueError("refused")

    with Refusing() as outer, hodiff.corrected() as inner:
        with pytest.raises(ValueError, match="refused"):
            F.layer_norm(X, (3,))
        assert active_function_modes() == [outer, inner]


def test_register_rejects_bad_arguments():
    with pytest.raises(hodiff.InputError, match="expected at least one torch function"):
        register(reason="x")
    with pytest.raises(hodiff.InputError, match="expected callables, got str"):
        register("torch.relu", reason="x")
    with pytest.raises(hodiff.InputError, match="kind: expected one of"):
        register(torch.relu, reason="x", kind="odd")
    with pytest.raises(hodiff.InputError, match="rule: expected a callable, got int"):
        register(torch.hypot, reason="x")(3)


def test_table_lists_each_function_once():
    names = [row.name for row in table()]
    assert names == sorted(set(names))
    for row in table():
        assert row.reason
        assert row.kind in {"wrong", "missing", "slow"}
        assert set(row.routes) <= set(hodiff.ROUTES)
        # `routes` lists second derivatives; some rules are for third derivatives, tails or overflow only.
        elsewhere = any(word in row.reason for word in ("third", "tails", "overflows"))
        assert row.kind == "slow" or (row.reference and (row.routes or elsewhere)), row


def test_documentation_lists_every_correction():
    page = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "corrections.md").read_text(encoding="utf-8")
    for row in table():
        (line,) = (each for each in page.splitlines() if each.startswith(f"| `{row.name}` |"))
        assert line.endswith(f"| {row.mended} |"), "run python tests/corrections/write_table.py"


ADDED = foreach_by_name()["add"]


@pytest.mark.slow
@pytest.mark.parametrize("route", [route for route in hodiff.ROUTES if route != "forward-over-forward"])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: weight_norm(x.outer(x), 2 * torch.ones(3, 1, dtype=D), 0).pow(3).sum(),
        lambda x: torch.vander(x, 3).pow(2).sum(),
        lambda x: ADDED([x * x], x.sum())[0].pow(3).sum(),
        lambda x: torch.linspace(x[0], x[1], 4, dtype=D).pow(3).sum(),
    ],
    ids=["weight_norm", "vander", "foreach", "linspace"],
)
def test_dynamo_traces_rules_of_private_functions(f, route):
    """dynamo traces rules of private functions without a break."""
    x, v = torch.tensor([0.5, 1.0, 2.0], dtype=D), torch.tensor([1.0, -0.5, 0.3], dtype=D)
    torch.compiler.reset()
    product = torch.compile(lambda x: hodiff.hvp(f, x, v, route=route), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(product(x), hodiff.hvp(f, x, v, route=route))


@pytest.mark.slow
def test_rules_of_hidden_functions_apply_in_compiled_code_of_a_mode_made_before():
    """torch.overrides does not list `torch._weight_norm` and `F.hardsigmoid`, whose compiled rules torch lacks."""
    program = """
import torch, hodiff
mode = hodiff.corrected()
x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
calls = {
    "weight_norm": lambda x: torch._weight_norm(x, torch.ones(1, 1, dtype=x.dtype), 0),
    "hardsigmoid": torch.nn.functional.hardsigmoid,
}
for name, call in calls.items():
    def loss(x):
        return (call(x / 2) * x.sin()).pow(2).sum()
    f = mode(loss)
    def product(x):
        return torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x)
    torch.compiler.reset()
    found = torch.compile(product, backend="aot_eager")(x)
    print(name, torch.allclose(found, hodiff.hvp(loss, x, torch.ones_like(x))))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "weight_norm True\nhardsigmoid True\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_pow_with_tensor_exponent_is_right():
    """The second derivative of x^(x - 1/2) at 1/2, where the exponent is 0, is log² x + 2 / x."""
    x = torch.tensor([0.5, 1.0, 2.0], dtype=D)
    torch.compiler.reset()
    ones = torch.ones_like(x)
    product = torch.compile(lambda x: hodiff.hvp(lambda x: (x ** (x - 0.5)).sum(), x, ones), backend="aot_eager")(x)
    assert not product.requires_grad
    assert float(product[0]) == pytest.approx(math.log(0.5) ** 2 + 4)
