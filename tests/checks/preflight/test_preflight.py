"""Verdicts and remarks of `preflight` on models and functions."""

import re

import pytest
import torch
import torch.nn.functional as F
from custom_functions import Square, cubed_slope, custom, old_style
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.corrections.mechanism.registry import CORRECTIONS

# Has neither jvp nor vmap, and a backward that cannot be differentiated
Cut = old_style("Cut", lambda x: (x**3, x), once_differentiable(cubed_slope))


MODEL = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh())
X = torch.ones(2, 3)


def test_corrected_operator_is_reported_with_its_calls():
    report = hodiff.preflight(MODEL, X)
    assert report.ok
    uses = {each.name: each for each in report.operators}
    norm = uses["torch.nn.functional.layer_norm"]
    assert norm.calls == 1
    assert norm.routes["reverse-over-forward"] == "corrected"
    assert set(uses["torch.nn.functional.linear"].routes.values()) == {"right"}
    by_torch_alone = hodiff.preflight(MODEL, X, correct=False)
    assert not by_torch_alone.ok
    assert by_torch_alone.routes["reverse-over-forward"] == "wrong"
    assert by_torch_alone.routes["reverse-over-reverse"] == "right"
    assert "inside hodiff.corrected()" in str(by_torch_alone)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:Warning")
def test_exported_and_traced_models_have_the_same_verdicts():
    exported = torch.export.export(MODEL, (X,)).module()
    for report in (hodiff.preflight(exported, X), hodiff.preflight(MODEL, X)):
        assert [each.routes for each in report.operators] == [
            each.routes for each in hodiff.preflight(MODEL, X).operators
        ]
    (script,) = hodiff.preflight(torch.jit.trace(MODEL, X), X).operators
    assert script.name == "torch.jit.ScriptFunction"
    assert script.routes["forward-over-reverse"] == "corrected"
    (script,) = hodiff.preflight(torch.jit.trace(MODEL, X), X, correct=False).operators
    assert script.routes["forward-over-reverse"] == "wrong"
    determinant = hodiff.preflight(torch.ops.aten.linalg_det.default, torch.eye(2))
    assert determinant.operators[0].routes == hodiff.preflight(torch.linalg.det, torch.eye(2)).operators[0].routes


def test_declined_calls_have_the_verdict_of_torch():
    rows = torch.tensor([[0, 1]])

    def corrected_then_declined(x):
        return F.embedding_bag(rows, x) + F.embedding_bag(rows, x.clone(), max_norm=1.0)

    (use,) = (each for each in hodiff.preflight(corrected_then_declined, X).operators if "embedding_bag" in each.name)
    assert use.calls == 2
    assert set(use.routes.values()) == {"raises"}
    unneeded = hodiff.preflight(nn.Embedding(3, 2), torch.tensor([0, 1]))
    assert unneeded.ok


def test_functions_without_a_rule_have_the_verdict_of_torch(monkeypatch):
    monkeypatch.delitem(CORRECTIONS, F.layer_norm)
    report = hodiff.preflight(MODEL, X)
    assert report.routes["reverse-over-forward"] == "wrong"
    assert report.routes["reverse-over-reverse"] == "right"


def test_verdicts_agree_with_products():
    """The verdicts for torch alone agree with products by the routes."""
    x, v = X.double(), torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh()).double()

    def loss(x):
        return model(x)[:, 0].exp().sum()

    routes = hodiff.preflight(loss, x, correct=False).routes
    truth = hodiff.hvp(loss, x, v)
    for route in hodiff.ROUTES:
        product = hodiff.hvp(loss, x, v, route=route, correct=False)
        assert torch.allclose(product, truth, rtol=1e-6) == (routes[route] in {"right", "not smooth"}), route


def test_defects_of_custom_functions_are_listed():
    report = hodiff.preflight(lambda x: Square.apply(Cut.apply(x)).sum(), X)
    assert {each.name for each in report.functions} == {"Cut"}
    defects = " ".join(each.defect for each in report.functions)
    for word in ("once_differentiable", "forward takes ctx", "no jvp", "no batching rule"):
        assert word in defects
    assert not report.ok
    assert report.routes["reverse-over-reverse"] == "wrong"
    assert report.routes["forward-over-forward"] == "raises"
    assert hodiff.preflight(lambda x: Square.apply(x).sum(), X).ok
    assert hodiff.preflight(lambda x: hodiff.functions.swish(x).sum(), X).ok


def test_custom_operators_are_reported():
    @torch.library.custom_op("hodiff_tests::sine", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    sine.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, inputs, output: None)

    def report(correct):
        found = hodiff.preflight(lambda x: sine(x).sum(), X, correct=correct)
        (use,) = (each for each in found.operators if "sine" in each.name)
        return found, use

    found, use = report(correct=False)
    assert list(use.routes.values()) == ["not audited", "raises", "wrong", "wrong"]
    assert "hodiff's transforms" in use.remedy
    assert found.routes["reverse-over-reverse"] == "not audited"
    found, use = report(correct=True)
    assert set(use.routes.values()) == {"corrected"}
    assert set(found.routes.values()) == {"not audited"}
    assert "hodiff_tests::sine is a custom Function" in str(found)
    sine.register_autograd(None)
    found, use = report(correct=True)
    assert set(use.routes.values()) == {"raises"}
    assert "register_autograd" in use.remedy


def test_empty_table_has_no_head():
    assert str(hodiff.preflight(nn.Linear(3, 2), X)).startswith("1 call of operators that are right by every route\n")
    assert str(hodiff.preflight(MODEL, X)).split("\n")[0].endswith("  ff")


def test_in_place_buffer_updates_are_supported_as_the_remark_says():
    """hodiff differentiates through in-place changes of buffers; torch.func refuses them, as the remark says."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    p = {name: each.detach() for name, each in model.named_parameters()}
    loss = lambda p: torch.func.functional_call(model, p, (torch.eye(3),)).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
        torch.func.hessian(loss)(p)
    H = hodiff.hessian_matrix(loss, p)
    torch.testing.assert_close(hodiff.HessianOperator(loss, p) @ torch.ones(len(H)), H.sum(1), rtol=1e-4, atol=1e-4)


def test_remarks_name_random_numbers_and_in_place_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = model[1].running_mean.clone()
    remarks = " ".join(hodiff.preflight(model, X).remarks)
    assert "draws random numbers" in remarks
    assert "aten::add_ changes an input, parameter or buffer in place (once): torch.func raises" in remarks
    assert torch.equal(model[1].running_mean, before)  # preflight leaves the model unchanged
    hodiff.preflight(lambda x: model(x).sum(), X)
    assert torch.equal(model[1].running_mean, before)
    assert not hodiff.preflight(model.eval(), X).remarks


def test_table_lists_operators_routes_and_verdicts():
    text = str(hodiff.preflight(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), X))
    lines = text.splitlines()
    assert lines[0].split() == ["operator", "calls", "rr", "fr", "rf", "ff"]
    assert lines[1].split()[0] == "torch.nn.functional.layer_norm"
    assert lines[-5:-1] == [f"{route}: {verdict}" for route, verdict in hodiff.preflight(MODEL, X).routes.items()]


def test_inputs_are_left_unchanged():
    x = torch.ones(2, 3)
    hodiff.preflight(lambda x: x.mul_(2).sum() if x.requires_grad is False else (x * 2).sum(), x)
    assert torch.equal(x, torch.ones(2, 3))
    assert not x.requires_grad


def test_rejects_non_callables():
    with pytest.raises(hodiff.InputError, match=r"expected a module or a function, got int"):
        hodiff.preflight(3)


# Has a defect that inspection of its methods and attributes cannot detect
Plain = custom(
    "Plain", lambda x: x**3, lambda ctx, g: 3 * ctx.saved_tensors[0].detach() ** 2 * g, cubed_slope, vmap=True
)


VERDICTS = {
    "right": (lambda x: (1 / x) ** 2 + x.exp(), True, "all four routes are right"),
    "corrected": (lambda x: torch.nn.functional.layer_norm(x, (3,)), True, "all four routes are right"),
    "wrong by some": (
        lambda x: torch.nn.functional.layer_norm(x, (3,)),
        False,
        "take reverse-over-reverse, forward-over-reverse",
    ),
    "unknown": (Plain.apply, True, r"not all is known, compare the routes with hodiff.check\(f, x\)"),
    "random": (lambda x: torch.nn.functional.dropout(x, 0.5), True, "all four routes are right, but see the remarks"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_last_line_is_the_verdict(name):
    f, correct, words = VERDICTS[name]
    last = str(hodiff.preflight(f, X, correct=correct)).splitlines()[-1]
    assert re.fullmatch(f"verdict: {words}.*", last), last


def test_custom_function_is_not_audited():
    """Its gradient is a constant to a second derivative, which only a comparison detects."""
    report = hodiff.preflight(Plain.apply, X)
    assert set(report.routes.values()) == {"not audited"}
    assert any("Plain is a custom Function" in each for each in report.remarks)


def test_keyword_inputs_are_accepted():
    report = hodiff.preflight(lambda *, x, mask: (x * mask).logsumexp(-1), x=X, mask=torch.ones_like(X))
    assert report.ok
    assert {each.name for each in report.operators} == {"torch.Tensor.mul", "torch.Tensor.logsumexp"}


def without_recording(x):
    with torch.no_grad():
        y = 2 * x
    return y * x


CUTS = {
    "no_grad": without_recording,
    "leaf": lambda x: torch.nn.Parameter(2 * x) * x,
    "detach": lambda x: x.detach() * x,
    "data": lambda x: x.data * x,
    "item": lambda x: x.sum().item() * x,
}


@pytest.mark.parametrize("name", CUTS)
def test_cut_graph_is_remarked(name):
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    found = hodiff.preflight(CUTS[name], x)
    assert "out of the graph (1 times)" in found.remarks[0]
    assert found.verdict.endswith("see the remarks")
    assert not hodiff.preflight(lambda x: x * x.max(), x).remarks


def test_closed_over_leaves_are_no_cuts():
    w = torch.nn.Parameter(torch.ones(3))
    assert not hodiff.preflight(lambda x: x * w, torch.ones(3)).remarks


def test_functions_with_hooks_are_not_audited():
    def f(x):
        y = 2 * x
        y.register_hook(torch.neg)
        return y * y

    found = hodiff.preflight(f, torch.ones(3))
    assert set(found.routes.values()) == {"not audited"}
    assert "register_hook" in found.remarks[0]


def penalty(x):
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return g.square().sum()


def test_verdict_covers_a_gradient_inside_the_function():
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    assert hodiff.preflight(penalty, x).verdict == "verdict: all four routes are right"
    alone = hodiff.preflight(penalty, x, correct=False)
    assert (alone.routes["reverse-over-reverse"], alone.routes["forward-over-reverse"]) == ("right", "raises")
    inside = torch.func.vmap(torch.func.grad(lambda x: x.sin()))
    assert hodiff.preflight(lambda x: inside(x).sum(), x, correct=False).routes["forward-over-reverse"] == "right"


def test_branches_on_values_are_located_at_their_line():
    def branches(x):
        if x.sum() > 0:
            return x**2
        return int((x.detach() > 0).sum()) * x**3

    (said,) = hodiff.preflight(branches, X).remarks
    assert re.search(
        r"branches on values .* at test_preflight.py:\d+, in branches, `if x.sum\(\) > 0:` \(1 times\)", said
    )
    report = hodiff.preflight(branches, -X)
    assert any("`return int((x.detach() > 0).sum()) * x**3`" in each for each in report.remarks)
    assert report.verdict.endswith("but see the remarks")
    with pytest.raises(RuntimeError):  # as the remark says
        torch.func.vmap(branches)(X)


def test_branches_on_constants_are_not_remarked():
    def branches(x, mask):
        if mask.any() and len(x) == 2 and x.shape[0] > 1 and torch.zeros_like(x).sum() == 0:
            return torch.where(x > 0, x, x**2)
        return x

    assert hodiff.preflight(branches, X, torch.tensor([True, False])).remarks == ()


def test_draws_without_second_derivative_are_reported_to_raise():
    def draws(a):
        return torch.distributions.Gamma(a, 1.0).rsample()

    report = hodiff.preflight(draws, X + 1)
    assert set(report.routes.values()) == {"raises"}
    assert "_standard_gamma: torch has only its gradient" in str(report)
    for route in hodiff.ROUTES:  # as the report says
        with pytest.raises(hodiff.RouteError):
            hodiff.hvp(lambda a: draws(a).sum(), X + 1, X, route=route)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x):
        return checkpoint(lambda x: torch.tanh(self.layer(x)), self.layer(x), use_reentrant=self.reentrant)


def raises_by(f, x, **options):
    """Return the routes by which a product of the function raises."""

    def fails(route):
        try:
            hodiff.hvp(lambda x: f(x).pow(2).sum(), x, torch.ones_like(x), route=route, **options)
        except (hodiff.RouteError, RuntimeError):
            return True
        return False

    return {route for route in hodiff.ROUTES if fails(route)}


def in_saved_memory(x):
    with torch.autograd.graph.save_on_cpu():
        return x.tanh()


QUERIES = torch.linspace(-1, 1, 16).reshape(1, 2, 4, 2)
NORMALIZED = nn.BatchNorm1d(3).eval()
CALLS = {
    "checkpoint": (Checkpointed(False), X),
    "reentrant checkpoint": (Checkpointed(True), X),
    "hooks on what is saved": (in_saved_memory, X),
    "attention by a fused kernel": (lambda q: F.scaled_dot_product_attention(q, q, q), QUERIES),
    "attention by operators": (
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4, requires_grad=True)),
        QUERIES,
    ),
    "batch norm in evaluation": (NORMALIZED, X),
    "instance norm by running statistics": (
        lambda x: F.instance_norm(x[None], torch.zeros(2), torch.ones(2), use_input_stats=False),
        X,
    ),
    "draws of what is differentiated": (lambda x: torch.bernoulli(x, p=0.5) * x, X),
}


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_routes_raise_exactly_where_reported(name, correct):
    if name == "checkpoint" and not correct and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 gives the inputs to a Function without jvp, whose result it does not use")
    f, x = CALLS[name]
    routes = hodiff.preflight(f, x, correct=correct).routes
    assert {route for route, word in routes.items() if word == "raises"} == raises_by(f, x, correct=correct)
    assert "wrong" not in routes.values()


def test_dtype_conversion_without_effect_is_no_cut():
    class Converting(nn.Linear):
        def forward(self, x):
            return nn.Linear.forward(self.to(torch.float32), x)

    report = hodiff.preflight(Converting(3, 3), X)
    assert (report.cuts, report.remarks) == (0, ())


@pytest.mark.parametrize(
    "function",
    [
        torch.multiply,
        torch.subtract,
        torch.divide,
        lambda x, y: torch.clip(x, 0.2) * y,
        lambda x, y: torch.concat([x, y]).swapaxes(0, 1),
        lambda x, y: torch.special.expit(x).type(torch.float32) + y.cpu(),
        lambda x, y: (x @ x.T).inverse() @ y.adjoint().negative().mH,
        lambda x, y: x.clone().multiply_(y).arctan_(),
    ],
)
def test_operator_aliases_are_known(function):
    x, y = torch.rand(2, 2, dtype=torch.float64) + 1, torch.rand(2, 2, dtype=torch.float64)
    assert hodiff.preflight(function, x, y).verdict == "verdict: all four routes are right"


def test_attention_without_dropout_is_not_called_random():
    assert hodiff.preflight(CALLS["attention by a fused kernel"][0], QUERIES, correct=False).remarks == ()


def test_real_base_with_complex_exponent_is_reported_wrong_in_forward_mode():
    """Forward mode of torch drops the imaginary part of the tangent of a real base with a complex exponent."""
    x = torch.tensor([0.5, 1.0], dtype=torch.float64)
    plain = hodiff.preflight(lambda x: (x ** (1 + 2j)).abs().square().sum(), x, correct=False)
    assert plain.routes == {hodiff.ROUTES[0]: "right"} | dict.fromkeys(hodiff.ROUTES[1:], "wrong")
    assert "wrong" not in hodiff.preflight(lambda x: (x**2).sum(), x, correct=False).routes.values()
    assert set(hodiff.preflight(lambda x: (x ** (1 + 2j)).abs().sum(), x).routes.values()) == {"corrected"}


@pytest.mark.parametrize("values", [torch.linalg.eigvalsh, lambda C: torch.linalg.eigh(C)[0]])
def test_nearly_equal_eigenvalues_are_remarked(values):
    near, apart = (torch.diag(torch.tensor([1.0, 1.0 + gap, 3.0], dtype=torch.float64)) for gap in (1e-10, 1e-3))
    assert "nearly equal eigenvalues (1 times)" in str(hodiff.preflight(lambda C: values(C).log().sum(), near))
    assert "nearly equal" not in str(hodiff.preflight(lambda C: values(C).log().sum(), apart))
