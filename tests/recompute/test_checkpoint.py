"""Recomputation preserves gradients of tensors that f reads, random numbers, buffers and autocast; it saves memory."""

import copy
from functools import partial

import pytest
import torch
from memory_use import SavedMemory
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import hodiff
from hodiff.errors import InputError
from hodiff.recompute.checkpoint import _overlap, checkpoint, checkpoint_sequential

D = torch.float64


def plain(f, *args, **kwargs):
    return f(*args, **kwargs)


def first_and_second(output, leaves):
    """Return the gradients of the squared output, and of their squared norm."""
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, retain_graph=True)
    return [*first, *second]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


class Scale(nn.Module):
    """A module that stores tensors in unusual places."""

    def __init__(self):
        super().__init__()
        self.weights = [torch.randn(3, dtype=D, requires_grad=True) for _ in range(2)]
        self.table = {"shift": (torch.randn(3, dtype=D, requires_grad=True), 2.0)}
        self.linear = nn.Linear(3, 3, dtype=D)

    def forward(self, x):
        shift, factor = self.table["shift"]
        return torch.tanh(self.linear(x) * self.weights[0] + factor * shift) * self.weights[1]

    def method(self, x):
        return self(x).sin()

    def leaves(self):
        return [*self.weights, self.table["shift"][0], *self.parameters()]


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return torch.sin(self.w * x)


GLOBAL = torch.linspace(0.5, 1, 3, dtype=D).requires_grad_()


def _reads_a_global(x):
    return torch.sin(GLOBAL * x)


def _default(x, w=GLOBAL):
    return torch.cos(w * x)


def _sources():
    module = Scale()
    w = torch.randn(3, dtype=D, requires_grad=True)
    derived = 2 * w
    lstm = nn.LSTM(3, 3, dtype=D)
    yield "module", module, module.leaves()
    yield "bound method", module.method, module.leaves()
    yield "closure", lambda x: torch.sin(w * x), [w]
    yield "closure over a function", lambda x: _reads_a_global(x) + Slotted(w)(x), [w, GLOBAL]
    yield "tensor and what it comes from", lambda x: torch.sin(w * x) * derived, [w, derived]
    yield "partial", partial(lambda a, x, *, b: torch.sin(a * x) * b, w, b=derived), [w, derived]
    yield "slots", Slotted(w), [w]
    yield "global", _reads_a_global, [GLOBAL]
    yield "default", _default, [GLOBAL]
    yield "lstm", lambda x: lstm(x[None])[0][0], list(lstm.parameters())
    yield "transform", torch.func.vmap(lambda x: torch.sin(w.sum() * x)), [w]


@pytest.mark.parametrize(("f", "leaves"), [pytest.param(f, leaves, id=name) for name, f, leaves in _sources()])
def test_gradients_reach_every_tensor_that_f_reads(f, leaves):
    x = torch.randn(3, dtype=D, requires_grad=True)
    assert_same(*(first_and_second(run(f, x), [x, *leaves]) for run in (checkpoint, plain)))


def test_closed_over_parameters_are_differentiated_by_transforms():
    """Parameters of `functional_call` are differentiated by every route, while the input is a constant."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    x = torch.randn(5, 3, dtype=D)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    v = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(run, parameters):
        return run(lambda x: torch.func.functional_call(module, parameters, (x,)), x).square().sum()

    expected = hodiff.hvp(partial(loss, plain), parameters, v)
    for route in hodiff.ROUTES:
        product = hodiff.hvp(partial(loss, checkpoint), parameters, v, route=route)
        for name, value in expected.items():
            torch.testing.assert_close(product[name], value, rtol=1e-11, atol=1e-11)


class Registry:
    """A class attribute, which the search for tensors skips."""

    w: torch.Tensor


def _hidden(w):
    Registry.w = w
    return checkpoint(lambda x: (x * Registry.w).sum(), torch.ones(3, dtype=D))


def _by_dual_numbers(w):
    with forward_ad.dual_level():
        return _hidden(forward_ad.make_dual(w, w))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda w: _hidden(w.clone().requires_grad_()),
        lambda w: _hidden(w.clone().requires_grad_() * 2),
        lambda w: torch.func.grad(_hidden)(w),
        lambda w: torch.func.jvp(_hidden, (w,), (w,)),
        lambda w: torch.func.vmap(_hidden)(torch.stack([w, w])),
        lambda w: torch.func.grad(lambda w: torch.func.grad(_hidden)(w).sum())(w),
        lambda w: torch.func.vmap(torch.func.grad(_hidden))(torch.stack([w, w])),
        lambda w: torch.func.grad(lambda w: torch.func.vmap(_hidden)(torch.stack([w, w])).sum())(w),
        _by_dual_numbers,
    ],
    ids=["leaf", "derived", "grad", "jvp", "vmap", "grad-grad", "vmap-grad", "grad-vmap", "dual"],
)
def test_unreachable_tensor_raises(differentiate):
    with pytest.raises(InputError, match=r"checkpoint: f: expected every tensor .* pass it as an argument"):
        differentiate(torch.randn(3, dtype=D))


def test_dropout_and_batch_norm_match_an_uncheckpointed_run():
    original = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(D)
    x = torch.randn(6, 4, dtype=D, requires_grad=True)
    results = []
    for run in (checkpoint, plain):
        module = copy.deepcopy(original)
        torch.manual_seed(1)
        output = run(module, x)
        derivatives = first_and_second(output, [x, *module.parameters()])
        results.append([output, *derivatives, *module.buffers(), torch.get_rng_state()])
    scale = max(float(each.detach().abs().max()) for each in results[1][:-1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * scale)


def test_generators_are_replayed():
    x = torch.randn(5, dtype=D, requires_grad=True)
    results = []
    for run in (checkpoint, plain):
        generator = torch.Generator().manual_seed(3)
        y = run(lambda x, generator=generator: x.square() * torch.randn(5, generator=generator, dtype=D), x)
        results.append([y, *first_and_second(y, [x]), generator.get_state()])
    assert_same(*results)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap_matches(randomness):
    def gradient(run, x):
        torch.manual_seed(2)

        def f(x):
            return run(lambda x: torch.nn.functional.dropout(x, 0.5) * x, x).sum()

        return torch.func.vmap(torch.func.grad(f), randomness=randomness)(x)

    x = torch.randn(3, 8, dtype=D)
    assert torch.equal(gradient(checkpoint, x), gradient(plain, x))


def test_jacobian_draws_once_for_all_rows():
    """The rows share one recomputation under vmap, where torch refuses to draw random numbers."""
    x = torch.randn(8, dtype=D)

    def f(x):
        return torch.nn.functional.dropout(x, 0.5)

    torch.manual_seed(2)
    y = f(x)
    torch.manual_seed(2)
    J = torch.func.jacrev(lambda x: checkpoint(f, x))(x)
    torch.testing.assert_close(J, torch.diag(2.0 * (y != 0).to(D)))


def test_autocast_is_restored():
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for run in (checkpoint, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(lambda x: linear(x).tanh(), x)
        assert y.dtype == torch.bfloat16
        results.append([y, *torch.autograd.grad(y.float().sum(), [x, *linear.parameters()])])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_float32_scalars_times_python_numbers(route):
    """Forward mode of torch gives their tangents in float64."""

    def f(w, x, call):
        return 0.3 * call(lambda h: (h @ w).tanh(), x).mean() ** 2

    w, v, x = torch.randn(3, 4), torch.randn(3, 4), torch.randn(5, 3)
    found = hodiff.hvp(f, w, v, x, checkpoint, route=route)
    truth = hodiff.hvp(f, w.double(), v.double(), x.double(), lambda inner, h: inner(h))
    torch.testing.assert_close(found, truth.float(), rtol=1e-5, atol=1e-7)


def test_torch_function_modes_are_restored():
    """A function mode that is active in the forward pass is active in the recomputation."""

    class Negate(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return -function(*args, **(kwargs or {})) if function is torch.sin else function(*args, **(kwargs or {}))

    x = torch.randn(3, dtype=D, requires_grad=True)
    with Negate():
        y = checkpoint(lambda x: torch.sin(x), x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], -x.cos())


def test_loop_variables_rebound_later_do_not_matter():
    weights = [torch.randn(3, 3, dtype=D, requires_grad=True) for _ in range(3)]
    blocks = [nn.Linear(3, 3, dtype=D) for _ in range(3)]
    start = torch.randn(3, dtype=D, requires_grad=True)
    leaves = [start, *weights, *(p for block in blocks for p in block.parameters())]

    def chain(run):
        x = start
        for power, (w, block) in enumerate(zip(weights, blocks, strict=True), start=1):
            x = run(lambda x: torch.tanh(block(x @ w)) ** power, x)
        return x

    assert_same(*(first_and_second(chain(run), leaves) for run in (checkpoint, plain)))


FACTOR = 1.0


class Factors(nn.Module):
    """A product of numbers from all the places where a module can store them."""

    def __init__(self):
        super().__init__()
        self.number, self.items, self.table = 1.0, [1.0], {"a": 1.0}
        self.act, self.inner = torch.sin, nn.Dropout(0.5).eval()

    def forward(self, x):
        factor = self.number * self.items[0] * self.table["a"] * FACTOR * (1 if self.training else 3)
        return self.inner(factor * self.act(x))


def test_recomputation_uses_the_state_of_the_first_run(monkeypatch):
    changes = [
        lambda f: f.eval(),
        lambda f: setattr(f, "number", 2.0),
        lambda f: f.items.__setitem__(0, 2.0),
        lambda f: f.table.update(a=2.0),
        lambda f: f.table.clear(),
        lambda f: monkeypatch.setitem(globals(), "FACTOR", 2.0),
        lambda f: setattr(f, "act", torch.cos),
        lambda f: f.inner.train(),
        lambda f: delattr(f, "number"),
    ]
    x = torch.randn(3, dtype=D, requires_grad=True)
    for change in changes:
        f = Factors()
        y = checkpoint(f, x)
        change(f)
        state = [f.training, f.inner.training, vars(f).get("number"), f.act, list(f.items), dict(f.table), FACTOR]
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.testing.assert_close(slope, x.cos())
        torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], -x.sin())
        assert state == [
            f.training, f.inner.training, vars(f).get("number"), f.act, list(f.items), dict(f.table), FACTOR
        ]  # fmt: skip
        monkeypatch.undo()


def test_hooks_of_the_first_run_are_called_in_their_order():
    module = nn.Identity()
    doubled = module.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    added = module.register_forward_pre_hook(lambda _, args: (1 + args[0],))
    x = torch.tensor(3.0, requires_grad=True)
    y = checkpoint(lambda u: module(u) ** 3, x)
    doubled.remove()
    module.register_forward_pre_hook(lambda _, args: (args[0] - 5,))
    before = list(module._forward_pre_hooks)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], torch.tensor(6.0 * 7**2))
    assert list(module._forward_pre_hooks) == before
    assert before[0] == added.id


def test_counter_counts_the_first_run_only():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x**2

    f, x = Counting(), torch.ones(2, requires_grad=True)
    y = checkpoint(f, x)
    torch.autograd.grad(y.sum(), x)
    assert f.calls == 1


def test_side_effects_happen_once():
    count, seen = 0, []
    w = torch.randn(3, dtype=D, requires_grad=True)

    def f(x):
        nonlocal count
        count += 1
        return w * x

    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    seen.append(count)
    torch.autograd.grad(y.sum(), [x, w])
    assert (seen, count) == ([1], 1)
    assert f.__closure__[f.__code__.co_freevars.index("w")].cell_contents is w
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: w * x / (1 // 0), x)
    assert w.requires_grad


def test_pytrees_and_keyword_arguments_are_accepted():
    def f(x, n, *, options):
        return {"a": n * x.sin(), "b": (options["k"] * x, "text", x.argmax(), None)}

    x = torch.randn(3, dtype=D, requires_grad=True)
    out = checkpoint(f, x, 2, options={"k": x})
    assert out["b"][1] == "text"
    assert out["b"][2].dtype == torch.int64
    assert out["b"][3] is None
    (gradient,) = torch.autograd.grad(out["a"].sum() + out["b"][0].sum(), x)
    torch.testing.assert_close(gradient, 2 * x.cos() + 2 * x)


def test_gradient_inside_the_function_is_differentiated():
    def force(x):
        x.requires_grad_()
        return torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]

    x = torch.randn(3, dtype=D)
    checkpoint(force, x)
    assert not x.requires_grad
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(checkpoint(force, x).sum(), x)[0], 6 * x)


def test_unused_parameters_have_no_grad():
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    checkpoint(lambda x: module["used"](x), torch.randn(2)).sum().backward()
    assert module["used"].weight.grad is not None
    assert module["unused"].weight.grad is None


def test_memory_at_first_and_second_order_is_bounded():
    n = 256
    w = torch.randn(8, dtype=D, requires_grad=True)
    x = torch.randn(n, 8, dtype=D, requires_grad=True)

    def deep(x):
        for _ in range(20):
            x = torch.tanh(x * w) + x.sin()
        return x

    held = {}
    for run in (checkpoint, plain):
        with SavedMemory() as saved:
            y = run(deep, x)
            forward = saved.nbytes()
            u = torch.randn_like(y).requires_grad_()
            (slope,) = torch.autograd.grad(y, x, u, create_graph=True)
            held[run] = (forward, saved.nbytes())
        assert slope.shape == x.shape
    one = n * 8 * 8
    assert held[checkpoint] == (one + w.nbytes, 2 * one + w.nbytes)
    assert held[plain][0] > 20 * one
    assert held[plain][1] > 40 * one


def test_segments_save_their_inputs_only():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()) for _ in range(9)]
    chain = nn.Sequential(*layers)
    x = torch.randn(64, 16, requires_grad=True)
    expected = torch.autograd.grad(chain(x).sum(), [x, *chain.parameters()])
    parameters = sum(p.nbytes for p in chain.parameters())
    for segments in (1, 3, 9):
        with SavedMemory() as saved:
            y = checkpoint_sequential(chain, segments, x)
        assert saved.nbytes() == segments * x.nbytes + parameters
        for a, b in zip(torch.autograd.grad(y.sum(), [x, *chain.parameters()]), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_backward_frees_the_graph_unless_retained():
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(torch.sin, x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_batched_gradients_match():
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(lambda x: torch.sin(x) * x.sum(), x)
    (J,) = torch.autograd.grad(y, x, torch.eye(3, dtype=D), is_grads_batched=True)
    torch.testing.assert_close(J, torch.diag(x.cos() * x.sum()) + x.sin()[:, None])


def test_compiled_checkpoint_matches():
    w = torch.randn(3, dtype=D)

    def f(x):
        return checkpoint(lambda x: (w * x).sin(), x).sum()

    compiled = torch.compile(torch.func.grad(f), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, dtype=D)
    torch.testing.assert_close(compiled(x), torch.func.grad(f)(x))


def test_works_in_inference_mode():
    x = torch.randn(3, dtype=D)
    f = lambda x: checkpoint(torch.tanh, x).sum()  # noqa: E731
    with torch.inference_mode():
        torch.testing.assert_close(torch.func.grad(f)(x), 1 - x.tanh() ** 2)
        second = -2 * x.tanh() * (1 - x.tanh() ** 2)
        torch.testing.assert_close(hodiff.hvp(f, x, x), second * x)
        torch.testing.assert_close(torch.func.hessian(f)(x), torch.diag(second))


def test_tensor_left_behind_in_inference_mode_is_rejected():
    left = []

    def f(x):
        left.append(x.sin())
        return x.cos()

    def g(x):
        return (checkpoint(f, x) + left.pop()).sum()

    with torch.inference_mode(), pytest.raises(InputError, match="stores in an attribute, a list or a variable"):
        torch.func.grad(g)(torch.randn(3, dtype=D))


def test_rejects_bad_arguments():
    x = torch.ones(2)
    with pytest.raises(InputError, match=r"checkpoint: f: expected a callable, got Tensor"):
        checkpoint(x, x)
    with pytest.raises(InputError, match=r"segments: expected an int from 1 to 2, got 3"):
        checkpoint_sequential([torch.sin, torch.cos], 3, x)
    with pytest.raises(InputError, match=r"functions: expected a callable, got int"):
        checkpoint_sequential([torch.sin, 2], 1, x)


# Functions that return their argument, or share memory with it.
SHARING = {
    "the argument": lambda a: a,
    "a view": lambda a: a.view(2),
    "a part": lambda a: a[:1],
    "the argument and another tensor": lambda a: (a, a.sin())[0],
    "a new tensor": lambda a: 2 * a,
}


@pytest.mark.parametrize("kind", ["hodiff", "torch", "torch, reentrant"])
@pytest.mark.parametrize("name", SHARING)
def test_result_that_is_the_argument_can_be_changed_in_place(name, kind):
    wrap = {
        "hodiff": checkpoint,
        "torch": partial(torch_checkpoint, use_reentrant=False),
        "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    }[kind]

    def f(x, call):
        y = x * 1
        z = call(SHARING[name], y)
        z.mul_(x[0])
        return (y**3).sum() + x[1] * (z**2).sum()

    x = torch.tensor([0.5, -0.7], dtype=torch.float64)
    expected = hodiff.hessian(lambda x: f(x, lambda g, y: g(y)))(x)
    for route in hodiff.ROUTES:
        found = hodiff.hessian(lambda x: f(x, wrap), route=route)(x)
        torch.testing.assert_close(found, expected)


def test_argument_that_is_returned_with_other_results_is_the_same_tensor():
    x = torch.tensor([0.5, -0.7], dtype=torch.float64, requires_grad=True)
    y = x.sin()
    same, other = checkpoint(lambda a: (a, a.exp()), y)
    assert same is y
    torch.testing.assert_close(torch.autograd.grad((same * other).sum(), x)[0], (1 + y) * y.exp() * x.cos())


# Functions that return views of tensors inside of them, or of their argument.
VIEWS = {
    "a part": lambda a: a.sin()[1:],
    "a part of a stack": lambda a: torch.stack([a, a.exp()], 1)[:, 1],
    "expanded": lambda a: a.sin().sum().expand(3),
    "transposed": lambda a: (a[:, None] * a.exp()).T,
    "a part of the argument": lambda a: a[1:],
    "a trajectory's end": lambda a: hodiff.odeint(lambda t, y: y.sin(), a, torch.tensor([0.0, 0.5], dtype=D))[-1],
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if "trajectory" in each else ()) for each in VIEWS]
)
def test_views_have_tangents_of_dual_numbers(name):
    """Tangents, gradients of dual numbers, and batches of both, against reverse mode without a checkpoint."""
    f = VIEWS[name]
    x, v = torch.tensor([0.5, -0.7], dtype=D), torch.tensor([0.3, 1.1], dtype=D)
    jacobian = torch.autograd.functional.jacobian(f, x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(checkpoint(f, forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(tangent, jacobian @ v)

    def loss(f, x):
        return f(x).sin().sum()

    hessian = torch.autograd.functional.hessian(partial(loss, f), x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), v)
        (gradient,) = torch.autograd.grad(loss(partial(checkpoint, f), dual), dual)
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, hessian @ v)
    found = torch.autograd.functional.hessian(
        partial(loss, partial(checkpoint, f)), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    )
    torch.testing.assert_close(found, hessian)


def test_results_of_dual_numbers_that_share_memory_still_share_it():
    def f(x):
        y = x.sin()
        return y, y[1:]

    x, v = torch.tensor([0.5, -0.7], dtype=D), torch.tensor([0.3, 1.1], dtype=D)
    with forward_ad.dual_level():
        whole, part = checkpoint(f, forward_ad.make_dual(x, v))
        whole.mul_(2)
        value, tangent = forward_ad.unpack_dual(part)
    torch.testing.assert_close(value, 2 * x.sin()[1:])
    torch.testing.assert_close(tangent, 2 * (x.cos() * v)[1:])


def test_parts_of_a_result_do_not_overlap():
    whole = torch.ones(3, 6)
    first, second = whole.chunk(2, -1)
    assert not _overlap(first, second)
    assert _overlap(whole, second)
    assert _overlap(whole[:, :4], second)
    assert not _overlap(first, first.clone())


# Recording by torch itself refuses such changes.
@pytest.mark.parametrize("route", [each for each in hodiff.ROUTES if each != "reverse-over-reverse"])
def test_results_that_share_memory_change_together_in_transforms(route):
    def f(call, x):
        whole, part = call(lambda x: (y := x.sin(), y[1:]), x)
        whole.mul_(x)
        return part.square().sum()

    x = torch.tensor([0.5, -0.7], dtype=D)
    found = torch.func.grad(partial(f, checkpoint))(x)
    torch.testing.assert_close(found, torch.func.grad(partial(f, plain))(x))
    batched = torch.func.vmap(torch.func.grad(partial(f, checkpoint)))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(batched[0], found)
    torch.testing.assert_close(
        hodiff.hessian(partial(f, checkpoint), route=route)(x), hodiff.hessian(partial(f, plain))(x)
    )
