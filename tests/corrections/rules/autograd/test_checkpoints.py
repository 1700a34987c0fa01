"""Models with `torch.utils.checkpoint`: derivatives of every route and order, in the memory of checkpointing."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from memory_use import SavedMemory
from torch import nn
from torch.func import functional_call
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings

D = torch.float64


def contexts():
    return nullcontext(), nullcontext()


def nested(block, h):
    return checkpoint(lambda h: checkpoint(block, h, use_reentrant=False), h, use_reentrant=False)


# Selective checkpointing saves some results to save time; hodiff recomputes all.
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
WAYS = {
    "plain": lambda block, h: block(h),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "by its module": lambda block, h: torch_checkpoint.checkpoint(block, h, use_reentrant=False, early_stop=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "by default": checkpoint,
    "nested": nested,
    "segments": lambda block, h: checkpoint_sequential(block, 2, h, use_reentrant=False),
    "debugged": partial(checkpoint, use_reentrant=False, debug=True),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    "no random state": partial(checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"),
    "in contexts": partial(checkpoint, use_reentrant=False, context_fn=contexts),
}


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.block = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, x):
        return self.last(WAYS[self.way](self.block, self.first(x)))


def by_formula(p, x):
    """The model in primitives."""
    h = (x @ p["first.weight"].T + p["first.bias"]) @ p["block.0.weight"].T + p["block.0.bias"]
    h = h - h.mean(-1, keepdim=True)
    h = h / ((h * h).mean(-1, keepdim=True) + 1e-5).sqrt() * p["block.1.weight"] + p["block.1.bias"]
    h = h.tanh() @ p["block.3.weight"].T + p["block.3.bias"]
    return h @ p["last.weight"].T + p["last.bias"]


def problem(way):
    """Return a module, a loss of its parameters, the loss by the formula, another point, and a direction."""
    torch.manual_seed(0)
    module = Model(way).to(D)
    x = torch.randn(6, 3, dtype=D)
    p = {name: each.detach() + 0.5 * torch.randn_like(each) for name, each in module.named_parameters()}
    v = {name: torch.randn_like(each) for name, each in p.items()}
    return (
        module,
        (lambda p: functional_call(module, p, (x,)).pow(3).sum()),
        (lambda p: by_formula(p, x).pow(3).sum()),
        p,
        v,
    )


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


def product(function, p, v):
    return torch.func.jvp(torch.func.grad(function), (p,), (v,))[1]


@pytest.fixture(autouse=True)
def _quiet():
    with silence_torch_warnings():
        yield
    # In torch 2.11 an error leaves a checkpoint open until its traceback is collected, which takes a second.
    if torch.__version__ < "2.12":
        gc.collect()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "in contexts"])
def test_products_at_another_point_match_by_every_route(way):
    _, loss, formula, p, v = problem(way)
    expected = product(formula, p, v)
    for route in ("auto", *hodiff.ROUTES):
        assert_same(hodiff.hvp(loss, p, v, route=route), expected)
    A = hodiff.HessianOperator(loss, p)
    assert_same(A @ v, expected)
    torch.testing.assert_close(A.to_dense(), hodiff.hessian_matrix(formula, p, correct=False), rtol=1e-8, atol=1e-8)


def gradients(loss, p, *, outside):
    """Gradient and Hessian product by torch's own functions, entirely or partly within `corrected()`."""
    q = {name: each.clone().requires_grad_() for name, each in p.items()}
    with hodiff.corrected():
        value = loss(q)
        if not outside:
            return _gradients(value, q)
    return _gradients(value, q)


def _gradients(value, q):
    first = torch.autograd.grad(value, list(q.values()), create_graph=True)
    second = torch.autograd.grad(sum(each.pow(2).sum() for each in first) / 2, list(q.values()))
    return dict(zip(q, first, strict=True)), dict(zip(q, second, strict=True))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_autograd_within_corrected_matches(way, outside):
    _, loss, formula, p, _ = problem(way)
    first, second = gradients(loss, p, outside=outside)
    slope = torch.func.grad(formula)(p)
    assert_same(first, slope)
    assert_same(second, product(formula, p, slope))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", ["checkpoint", "segments", "nested", "in contexts"])
def test_checkpoint_called_outside_may_be_differentiated_within(way):
    """The checkpoint is torch's, which recomputes its function as in the first run."""
    module, *_ = problem(way)
    x = torch.randn(6, 3, dtype=D)
    parameters = dict(module.named_parameters())
    value = module(x).pow(3).sum()
    with hodiff.corrected():
        found = dict(zip(parameters, torch.autograd.grad(value, list(parameters.values())), strict=True))
    own = {name: each.detach() for name, each in parameters.items()}
    assert_same(found, torch.func.grad(lambda p: by_formula(p, x).pow(3).sum())(own))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", ["checkpoint", "segments", "nested", "in contexts"])
def test_torch_derivatives_at_another_point_match(way):
    """Torch's own rules are evaluated at the given parameters, not at the module's."""
    _, loss, formula, p, v = problem(way)
    expected = product(formula, p, v)
    assert_same(hodiff.hvp(loss, p, v, correct=False, route="reverse-over-reverse"), expected)
    A = hodiff.HessianOperator(loss, p, correct=False, route="reverse-over-reverse")
    assert_same(A @ v, expected)
    with hodiff.corrected():
        assert_same(A @ v, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_batch_norm_in_training_updates_statistics_once(route):
    """Running statistics equal those of one run by any route, and the product equals that of the formula."""
    torch.manual_seed(0)
    module, x, v = nn.BatchNorm1d(3, dtype=D), torch.randn(4, 3, dtype=D), torch.randn(4, 3, dtype=D)

    def by_formula(x):
        centered = x - x.mean(0)
        return (centered / ((centered**2).mean(0) + 1e-5).sqrt()).tanh().pow(3).sum()

    def loss(x):
        return checkpoint(lambda x: module(x).tanh(), x, use_reentrant=False).pow(3).sum()

    expected = torch.func.jvp(torch.func.grad(by_formula), (x,), (v,))[1]
    torch.testing.assert_close(hodiff.hvp(loss, x, v, route=route).detach(), expected)
    torch.testing.assert_close(module.running_mean, 0.1 * x.mean(0))


@pytest.mark.slow
def test_undifferentiated_checkpoints_run_torch():
    x = torch.ones(2, requires_grad=True)
    assert type(checkpoint(torch.sin, x, use_reentrant=False).grad_fn).__name__ == "SinBackward0"
    with hodiff.corrected():
        assert type(checkpoint(torch.sin, x, use_reentrant=False).grad_fn).__name__ != "SinBackward0"
    assert hodiff.hvp(lambda x: x.sin().sum(), x, x).shape == (2,)
    assert type(checkpoint(torch.sin, x, use_reentrant=False).grad_fn).__name__ == "SinBackward0"


@pytest.mark.slow
def test_decorated_functions_match():
    try:
        decorate = checkpoint.__wrapped__(use_reentrant=False)
    except TypeError:
        pytest.skip("torch has no such decorator before 2.15")
    norm, x = nn.LayerNorm(4, dtype=D), torch.randn(3, 4, dtype=D)
    f = decorate(lambda x: norm(x).sin())
    expected = hodiff.hvp(lambda x: norm(x).sin().pow(3).sum(), x, x)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(lambda x: f(x).pow(3).sum(), x, x, route=route), expected)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: checkpoint(torch.sin, x, use_reentrant=True, k=1),
        lambda x: checkpoint(torch.sin, x, use_reentrant=True, debug=True),
        lambda x: checkpoint(torch.sin, x, use_reentrant=True, context_fn=contexts),
        lambda x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts, determinism_check="no such"),
        lambda x: checkpoint(2, x, use_reentrant=False),
        lambda x: checkpoint(torch.sin, use_reentrant=False),
    ],
)
def test_errors_match_torch(call):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises((ValueError, TypeError)) as by_torch:
        call(x)
    with hodiff.corrected(), pytest.raises(by_torch.type):
        call(x)


@pytest.mark.slow
def test_user_contexts_are_entered_again():
    seen = []

    class Noted:
        def __init__(self, word):
            self.word = word

        def __enter__(self):
            seen.append(self.word)

        def __exit__(self, *_):
            pass

    x = torch.ones(3, dtype=D, requires_grad=True)
    with hodiff.corrected():
        y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=lambda: (Noted("forward"), Noted("again")))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.cos())
    assert seen == ["forward", "again"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "in contexts"])
def test_dropout_matches_an_uncheckpointed_run(way):
    block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 4)).to(D)
    x = torch.randn(6, 4, dtype=D, requires_grad=True)
    found = []
    for each in (way, "plain"):
        torch.manual_seed(1)
        with hodiff.corrected():
            y = WAYS[each](block, x).pow(2).sum()
        torch.manual_seed(2)
        found.append([y, *torch.autograd.grad(y, [x, *block.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_autocast_state_of_the_call_is_restored():
    block, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    found = []
    for way in ("checkpoint", "plain"):
        with hodiff.corrected(), torch.autocast("cpu", torch.bfloat16):
            y = WAYS[way](block, x)
        assert y.dtype == torch.bfloat16
        found.append(torch.autograd.grad(y.float().sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.slow
def test_memory_of_a_product_matches_checkpointing():
    """When the gradient is recorded, each block holds its input and cotangents, not its intermediate results."""
    blocks = [nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10))).to(D) for _ in range(4)]
    parameters = sum(each.nbytes for block in blocks for each in block.parameters())
    x = torch.randn(500, 8, dtype=D)
    held = {}
    for way in ("checkpoint", "plain"):
        q = x.clone().requires_grad_()
        with hodiff.corrected(), SavedMemory() as saved:
            h = q
            for block in blocks:
                h = WAYS[way](block, h)
            forward = saved.nbytes()
            (slope,) = torch.autograd.grad(h.sin().sum(), q, create_graph=True)
            held[way] = forward, saved.nbytes()
        assert slope.shape == x.shape
    assert held["checkpoint"][0] <= 4 * x.nbytes + parameters
    assert held["checkpoint"][1] <= 10 * x.nbytes + parameters
    assert held["plain"][0] > 40 * x.nbytes
    assert held["plain"][1] > 80 * x.nbytes


@pytest.mark.slow
def test_gauss_newton_and_inner_loops_match():
    module, loss, formula, p, v = problem("checkpoint")
    x, target = torch.randn(6, 3, dtype=D), torch.randn(6, 2, dtype=D)
    found = hodiff.GaussNewtonOperator(module, nn.MSELoss(reduction="sum"), p, x, target, reduction="sum") @ v
    pushed = torch.func.jvp(lambda p: by_formula(p, x), (p,), (v,))[1]
    assert_same(found, torch.func.vjp(lambda p: by_formula(p, x), p)[1](2 * pushed)[0])

    def after(function):
        def outer(start):
            return function(hodiff.meta.adapt(lambda p, _: function(p), start, None, hodiff.meta.SGD(1e-3), 2))

        return hodiff.corrected()(torch.func.grad(outer))(p)

    assert_same(after(loss), after(formula))


@pytest.mark.slow
def test_preflight_sees_functions_inside_checkpoints():
    module, *_ = problem("checkpoint")
    names = {use.name for use in hodiff.preflight(module, torch.randn(6, 3, dtype=D)).operators}
    assert "torch.nn.functional.layer_norm" in names


@pytest.mark.slow
def test_compiled_operator_matches():
    _, loss, formula, p, v = problem("checkpoint")
    assert_same(hodiff.HessianOperator(loss, p, compile=True) @ v, product(formula, p, v))


@pytest.mark.slow
# Newer versions have another name for the method.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_checkpointing_matches(reentrant):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=12, max_position_embeddings=8)
    model, tokens = transformers.BertModel(config).to(D), torch.randint(0, 30, (2, 5))
    p = {name: each.detach() + 0.02 * torch.randn_like(each) for name, each in model.named_parameters()}
    v = {name: torch.randn_like(each) for name, each in p.items()}

    def loss(p):
        torch.manual_seed(1)  # for dropout
        return functional_call(model.train(), p, (tokens,)).last_hidden_state.pow(3).mean()

    expected = hodiff.hvp(loss, p, v)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(hodiff.hvp(loss, p, v), expected)


def gradient_by_a_new_leaf(x, w):
    x = x.detach().requires_grad_()
    return torch.autograd.grad((w @ x).sin(), x, create_graph=True)[0]


def by_its_input(x, w):
    return torch.autograd.grad((w @ x).sin(), x, create_graph=True)[0]


def gradient_by_an_intermediate(x, w):
    y = x * w
    return torch.autograd.grad(y.sin().sum(), y, create_graph=True)[0] * x


def gradient_by_input_or_clone(x, w):
    with torch.enable_grad():
        y = x if x.requires_grad else x.clone().requires_grad_()
        return torch.autograd.grad((w @ y).sin(), y, create_graph=True)[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "forces", [gradient_by_a_new_leaf, by_its_input, gradient_by_an_intermediate, gradient_by_input_or_clone]
)
def test_gradients_taken_inside_match_to_second_order(forces):
    """Forces of a potential, as molecular models compute them, are right to second order."""
    x, w = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in ([0.5, -1.0], [1.0, 0.3]))

    def derivatives(f):
        loss = f(x, w).pow(3).sum()
        first = torch.autograd.grad(loss, (x, w), create_graph=True, materialize_grads=True)
        return (*first, torch.autograd.grad(first[1].pow(2).sum(), w)[0])

    expected = derivatives(forces)
    with hodiff.corrected():
        found = derivatives(lambda x, w: checkpoint(forces, x, w, use_reentrant=False))
    torch.testing.assert_close(found, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_gradients_taken_inside_match_by_every_route(route):
    x, v = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([1.0, 0.3], dtype=torch.float64)
    w = torch.tensor([1.0, 0.3], dtype=torch.float64)
    found = hodiff.hvp(lambda w: checkpoint(gradient_by_a_new_leaf, x, w, use_reentrant=False).sum(), w, v, route=route)
    expected = hodiff.hvp(lambda w: (w * (w @ x).cos()).sum(), w, v)
    torch.testing.assert_close(found, expected)
