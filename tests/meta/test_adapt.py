"""Tests of the inner loop against explicit loops, finite differences and other variants."""

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from custom_functions import cubed_slope, old_style
from drawing import draw
from meta.problems import Tree, batch, flat, module_loss, network, quartic
from slow_cases import slow_except
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils import _pytree as pytree

import hodiff
from hodiff import InputError, RouteError, meta
from hodiff.meta import SGD, Adam, NonFiniteError, adapt

OPTIMIZERS: dict[str, Callable[[Any], meta.Optimizer]] = {
    "SGD": meta.SGD,
    "momentum": lambda lr: meta.SGD(lr, momentum=0.8, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda lr: meta.SGD(lr, momentum=0.8, nesterov=True),
    "Adam": meta.Adam,
    "AMSGrad": lambda lr: meta.Adam(lr, amsgrad=True),
    "AdamW": lambda lr: meta.AdamW(lr, weight_decay=0.2),
    "RMSprop": meta.RMSprop,
    "centered": lambda lr: meta.RMSprop(lr, centered=True, momentum=0.5),
    "Adagrad": meta.Adagrad,
    "Adadelta": meta.Adadelta,
    "Adamax": meta.Adamax,
    "NAdam": meta.NAdam,
    "Lion": meta.Lion,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "explicit": {"route": "reverse-over-reverse"},
    "mixed": {"route": "forward-over-reverse"},
    "checkpointed": {"checkpoint": 2},
    "checkpointed mixed": {"checkpoint": 2, "route": "forward-over-reverse"},
    "truncated too late": {"truncate": 3},
    "uncorrected": {"correct": False},
    "unchecked": {"check_finite": False},
}
START, SHIFT = draw(3, seed=1), draw(3, seed=2)


def adapt_by(optimizer: str, steps: int, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda w, shift, lr: adapt(quartic, w, shift, OPTIMIZERS[optimizer](lr), steps, **options)


def leaves() -> list[Tensor]:
    rate = torch.tensor(0.05, dtype=torch.float64)
    return [each.clone().requires_grad_() for each in (START, SHIFT, rate)]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_derivatives_match_differences_for_every_optimizer(optimizer: str) -> None:
    """Derivatives by the start, closed-over tensors and the learning rate are correct to second order in both modes."""
    for steps in (1, 2, 3):
        assert gradcheck(
            adapt_by(optimizer, steps), leaves(), check_forward_ad=steps == 2, check_batched_grad=steps == 2
        )
    assert gradgradcheck(adapt_by(optimizer, 2), leaves(), atol=1e-4)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optimizer", slow_except(["SGD", "Adam"], ["Adam"]))
def test_derivatives_match_differences_for_every_variant(optimizer: str, variant: str) -> None:
    f = adapt_by(optimizer, 3, **VARIANTS[variant])
    assert gradcheck(f, leaves(), check_forward_ad=True)
    assert gradgradcheck(f, leaves(), atol=1e-4, check_fwd_over_rev=optimizer == "SGD", fast_mode=True)
    torch.testing.assert_close(f(*leaves()), adapt_by(optimizer, 3)(*leaves()), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("variant", ["plain", "mixed", "checkpointed", "checkpointed mixed"])
def test_batched_backward_matches_differences(variant: str) -> None:
    """`is_grads_batched=True`, as in a vectorized Jacobian of torch, gives the same as one backward pass for each."""
    assert gradcheck(adapt_by("SGD", 2, **VARIANTS[variant]), leaves(), check_batched_grad=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", ["plain", "mixed", "checkpointed", "checkpointed mixed"])
def test_third_derivatives_match_differences(variant: str) -> None:
    """Third derivatives match central differences of the second derivative of the explicit loop."""

    def plain(w: Tensor) -> Tensor:
        for _ in range(3):
            w = w - 0.1 * torch.func.grad(quartic)(w, SHIFT)
        return w.square().sum()

    def ours(w: Tensor) -> Tensor:
        return adapt(quartic, w, SHIFT, SGD(0.1), 3, **VARIANTS[variant]).square().sum()

    u, v, h = draw(3, seed=3), draw(3, seed=4), 1e-4

    def product(w):
        return torch.func.hessian(plain)(w) @ v

    expected = (product(START + h * u) - product(START - h * u)) / (2 * h)
    w = START.clone().requires_grad_()
    (first,) = torch.autograd.grad(ours(w), w, create_graph=True)
    (second,) = torch.autograd.grad(first @ v, w, create_graph=True)
    (third,) = torch.autograd.grad(second @ u, w)
    torch.testing.assert_close(third, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_meta_objective_passes_check() -> None:
    loss = module_loss(network())
    params = {name: each.detach() for name, each in network().named_parameters()}
    support, query = batch(), batch(1)
    hodiff.assert_differentiable(
        lambda w: loss(adapt(loss, {**params, "0.weight": w}, support, SGD(0.1), 2), query),
        params["0.weight"],
        order=2,
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_transforms_match_autograd(variant: str) -> None:
    f = adapt_by("Adam", 3, **VARIANTS[variant])
    shifts, rate = draw(4, 3, seed=5), torch.tensor(0.05, dtype=torch.float64)

    def objective(w, shift):
        return f(w, shift, rate).square().sum()

    expected = []
    for shift in shifts:
        w = START.clone().requires_grad_()
        expected.append(torch.autograd.grad(objective(w, shift), w)[0])
    gradient = torch.func.grad(objective)
    torch.testing.assert_close(torch.stack([gradient(START, shift) for shift in shifts]), torch.stack(expected))
    torch.testing.assert_close(torch.func.vmap(gradient, (None, 0))(START, shifts), torch.stack(expected))
    w = START.clone().requires_grad_()
    batched = torch.func.vmap(lambda shift: objective(w, shift))(shifts).sum()
    torch.testing.assert_close(torch.autograd.grad(batched, w)[0], torch.stack(expected).sum(0))
    _, slope = torch.func.jvp(lambda w: objective(w, shifts[0]), (START,), (SHIFT,))
    torch.testing.assert_close(slope, expected[0] @ SHIFT)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", pytest.param("mixed", marks=pytest.mark.slow)])
def test_compiled_adapt_matches_eager(variant: str) -> None:
    f = adapt_by("Adam", 2, **VARIANTS[variant])
    inputs = leaves()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, f(*inputs))
    for actual, expected in zip(
        torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(f(*inputs).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def slopes(w: Tensor) -> Tensor:
    return torch.func.grad(quartic)(w, SHIFT)


@pytest.mark.parametrize("in_transform", [False, True])
def test_first_order_treats_gradients_as_constants(in_transform: bool) -> None:
    def objective(w: Tensor) -> Tensor:
        return adapt(quartic, w, SHIFT, SGD(0.1, weight_decay=0.5), 3, first_order=True).square().sum()

    w = START.clone()
    for _ in range(3):
        w = w - 0.1 * (slopes(w) + 0.5 * w)
    # The gradient of the square is multiplied by (1 - lr * weight_decay) per step.
    expected = 2 * w * 0.95**3
    if in_transform:
        torch.testing.assert_close(torch.func.grad(objective)(START), expected)
        _, slope = torch.func.jvp(objective, (START,), (SHIFT,))
        torch.testing.assert_close(slope, expected @ SHIFT)
    else:
        start = nn.Parameter(START.clone())
        objective(start).backward()
        torch.testing.assert_close(start.grad, expected)


@pytest.mark.parametrize("options", [{"first_order": True}, {"truncate": 0}])
def test_constant_gradients_stay_constant_in_batches(options: dict[str, Any]) -> None:
    def f(shift: Tensor) -> Tensor:
        return adapt(quartic, START, shift, SGD(0.1), 2, **options).sum()

    assert not torch.func.grad(f)(SHIFT).any()
    assert not torch.func.jvp(f, (SHIFT,), (START,))[1].any()
    assert not f(SHIFT.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("truncate", [0, 1, 2])
@pytest.mark.parametrize("in_transform", [False, True])
def test_truncation_multiplies_the_last_jacobians(truncate: int, in_transform: bool) -> None:
    def objective(w: Tensor, lr: Tensor) -> Tensor:
        return adapt(quartic, w, SHIFT, SGD(lr), 4, truncate=truncate).square().sum()

    rate = torch.tensor(0.1, dtype=torch.float64)
    points = [START]
    for _ in range(4):
        points.append(points[-1] - rate * slopes(points[-1]))
    expected, of_rate = 2 * points[-1], torch.zeros_like(rate)
    for w in reversed(points[4 - truncate : 4]):
        of_rate = of_rate - expected @ slopes(w)
        expected = expected - rate * torch.func.hessian(quartic)(w, SHIFT) @ expected
    start, lr = START.clone().requires_grad_(), rate.clone().requires_grad_()
    if in_transform:
        actual = torch.func.grad(objective, argnums=(0, 1))(START, rate)
        _, slope = torch.func.jvp(objective, (START, rate), (SHIFT, torch.ones_like(rate)))
        torch.testing.assert_close(slope, expected @ SHIFT + of_rate)
    else:
        actual = torch.autograd.grad(objective(start, lr), (start, lr), materialize_grads=True)
    torch.testing.assert_close(actual, (expected, of_rate))


def test_clip_matches_torch_and_is_differentiable() -> None:
    w = nn.Parameter(START.clone())
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        quartic(w, SHIFT).backward()
        nn.utils.clip_grad_norm_([w], 0.3)
        optimizer.step()
    norm = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def f(w, shift, norm):
        return adapt(quartic, w, shift, SGD(0.1), 3, clip=norm)

    torch.testing.assert_close(f(START, SHIFT, norm), w.detach(), rtol=1e-12, atol=1e-12, check_device=False)
    assert gradcheck(f, [*leaves()[:2], norm])
    torch.testing.assert_close(adapt(quartic, START, SHIFT, SGD(0.1), 3, clip=0.3), f(START, SHIFT, norm).detach())
    by_function = adapt(quartic, START, SHIFT, SGD(0.1), 1, clip=lambda g: 2 * g)
    torch.testing.assert_close(by_function, START - 0.2 * slopes(START))


def test_clip_at_zero_gradient_has_no_nan() -> None:
    gradient = torch.func.grad(lambda w: adapt(lambda w, _: (w**2).sum(), w, None, SGD(0.1), 1, clip=1.0).sum())
    torch.testing.assert_close(gradient(torch.zeros(2)), torch.full((2,), 0.8))


def test_learning_rates_may_be_per_element() -> None:
    rates = {"w": torch.rand(3, dtype=torch.float64, requires_grad=True)}
    result = adapt(lambda p, s: quartic(p["w"], s), {"w": START}, SHIFT, SGD(rates), 1)["w"]
    torch.testing.assert_close(torch.autograd.grad(result.sum(), rates["w"])[0], -slopes(START))


def test_unused_frozen_and_tied_parameters_match() -> None:
    params = {"used": START.clone().requires_grad_(), "unused": torch.ones(2, requires_grad=True)}

    def loss(p, s):
        return quartic(p["used"], s)

    for transform in (False, True):

        def compute(p):
            return adapt(loss, p, SHIFT, SGD(0.1, weight_decay=0.5), 1)

        result = torch.func.vmap(lambda _: compute(params))(torch.ones(1)) if transform else compute(params)
        torch.testing.assert_close(result["unused"].flatten(), torch.full((2,), 0.95))
        assert result["unused"].requires_grad
    # A frozen parameter is a constant that the loss closes over. A tied parameter is adapted separately in both places.
    tied = START.clone().requires_grad_()
    pair = adapt(
        lambda p, _: quartic(p["a"], SHIFT) + 2 * quartic(p["b"], SHIFT), {"a": tied, "b": tied}, None, SGD(0.1), 1
    )
    torch.testing.assert_close(pair["a"], START - 0.1 * slopes(START))
    torch.testing.assert_close(pair["b"], START - 0.2 * slopes(START))


def test_tied_modules_match() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    module[2].weight = module[0].weight
    x = draw(4, 2)
    params = dict(module.named_parameters())
    result = adapt(lambda p, x: functional_call(module, p, (x,)).square().mean(), params, x, SGD(0.5), 1)
    module(x).square().mean().backward()
    torch.testing.assert_close(result["0.weight"], module[0].weight - 0.5 * module[0].weight.grad)


def test_start_closed_over_by_the_loss_is_constant() -> None:
    """A proximal term closes over the tensor from which the loop starts."""
    w = START.clone().requires_grad_()
    result = adapt(lambda v, _: ((v - 3 * w) ** 2).sum() / 2, w, None, SGD(0.1), 1)
    torch.testing.assert_close(result, START + 0.2 * START)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), w)[0], torch.full((3,), 1.2, dtype=torch.float64))


@pytest.mark.parametrize("variant", ["plain", "mixed", "checkpointed"])
def test_dropout_is_replayed(variant: str) -> None:
    """Finite differences of a loop with a fixed seed use the same masks as the backward pass."""

    def f(w: Tensor) -> Tensor:
        torch.manual_seed(4)

        def loss(w, x):
            return F.dropout(x * w, 0.5).square().sum() + w.sin().sum()

        return adapt(loss, w, SHIFT, SGD(0.1), 4, **VARIANTS[variant])

    assert gradcheck(f, [START.clone().requires_grad_()])


def test_generator_seeds_the_loop_and_global_state_is_unchanged() -> None:
    def f(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return adapt(lambda w, x: F.dropout(x * w, 0.5).square().sum(), START, SHIFT, SGD(0.1), 4, generator=generator)

    before = torch.get_rng_state()
    first, second, other = f(0), f(0), f(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("variant", ["plain", "mixed", "checkpointed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_match(kind: type[nn.Module], variant: str) -> None:
    module = kind(2, 2, batch_first=True).double()
    x = draw(2, 3, 2)
    params = {name: each.detach() for name, each in module.named_parameters()}

    def f(w: Tensor) -> Tensor:
        def loss(p, x):
            return functional_call(module, p, (x,))[0].square().mean()

        return adapt(loss, {**params, "weight_hh_l0": w}, x, SGD(0.5), 2, **VARIANTS[variant])["weight_hh_l0"]

    assert gradcheck(f, [params["weight_hh_l0"].clone().requires_grad_()])


def test_layer_norm_is_corrected_in_forward_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).double()
    params = {name: each.detach() for name, each in module.named_parameters()}

    def loss(p, x):
        return functional_call(module, p, (x,)).sin().sum()

    def f(w: Tensor) -> Tensor:
        return adapt(loss, {**params, "0.weight": w}, draw(4, 3), SGD(0.5), 2)["0.weight"]

    assert gradcheck(f, [params["0.weight"].clone().requires_grad_()], check_forward_ad=True)


@pytest.mark.parametrize("variant", ["plain", "mixed", "checkpointed"])
def test_buffers_are_passed_from_step_to_step(variant: str) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    x = draw(6, 2)
    params = dict(module.named_parameters())
    held = pytree.tree_map(torch.clone, dict(module.named_buffers()))

    def loss(params: Tree, x: Tensor, buffers: Tree) -> tuple[Tensor, Tree]:
        return functional_call(module, {**params, **buffers}, (x,)).sin().sum(), buffers

    result = adapt(
        loss, params, x, SGD(0.1), 2, buffers=dict(module.named_buffers()), history=True, **VARIANTS[variant]
    )
    for name, each in module.named_buffers():
        assert torch.equal(each, held[name])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        value = module(x).sin().sum()
        losses.append(value.detach())
        value.backward()
        optimizer.step()
    for name, each in module.named_buffers():
        torch.testing.assert_close(result.buffers[name], each)
    torch.testing.assert_close(result.params, dict(module.named_parameters()), check_device=False)
    torch.testing.assert_close(result.losses, torch.stack(losses))


@pytest.mark.parametrize(
    "make", [iter, list, lambda b: lambda step: b[step]], ids=["iterator", "generator", "callable"]
)
def test_batches_may_differ_per_step(make: Callable[[list[Tensor]], Any]) -> None:
    batches = [draw(3, seed=seed) for seed in range(3)]
    task = make(batches)
    result = adapt(quartic, START, (b for b in task) if isinstance(task, list) else task, SGD(0.1), 3, checkpoint=2)
    expected = START
    for each in batches:
        expected = expected - 0.1 * torch.func.grad(quartic)(expected, each)
    torch.testing.assert_close(result, expected)


def test_state_continues_a_loop() -> None:
    whole = adapt(quartic, START, SHIFT, Adam(0.1), 5)
    half = adapt(quartic, START, SHIFT, Adam(0.1), 2, history=True)
    assert half.losses.shape == (2,)
    torch.testing.assert_close(adapt(quartic, half.params, SHIFT, Adam(0.1), 3, state=half.state), whole)
    none = adapt(quartic, START, SHIFT, Adam(0.1), 0, history=True)
    assert none.params is START
    assert none.losses.shape == (0,)


def test_result_requires_no_grad_if_no_input_does() -> None:
    w = START.clone().requires_grad_()
    with torch.no_grad():
        assert not adapt(quartic, w, SHIFT, SGD(0.1), 2).requires_grad
    for variant in VARIANTS.values():
        assert not adapt(quartic, START, SHIFT, SGD(0.1), 2, **variant).requires_grad
    closed_over = torch.ones((), dtype=torch.float64, requires_grad=True)
    assert adapt(lambda w, s: closed_over * quartic(w, s), START, SHIFT, SGD(0.1), 2).requires_grad
    assert torch.equal(adapt(quartic, w, SHIFT, SGD(0.1), 2), adapt(quartic, START, SHIFT, SGD(0.1), 2))


def test_graph_is_freed_with_its_result() -> None:
    for variant in VARIANTS.values():
        w = START.clone().requires_grad_()
        result = adapt(quartic, w, SHIFT, Adam(0.1), 3, **variant)
        result.sum().backward()
        alive = weakref.ref(w)
        gc.disable()
        try:
            del result, w
            assert alive() is None
        finally:
            gc.enable()


def test_progress_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    adapt(quartic, START, SHIFT, SGD(0.1), 7, progress=True)
    assert "7/7" in capsys.readouterr().err


Once = old_style("Once", lambda x: (x**3, x), once_differentiable(cubed_slope))


def test_once_differentiable_loss_is_rejected() -> None:
    w = START.clone().requires_grad_()

    def loss(w, _):
        return Once.apply(w).sum()

    with pytest.raises(RouteError, match=r"Once\.backward is marked once_differentiable"):
        adapt(loss, w, None, SGD(0.1), 1)
    adapt(loss, w, None, SGD(0.1), 1, first_order=True)
    with torch.no_grad():
        adapt(loss, w, None, SGD(0.1), 1)


class Held:
    """Stores a tensor on a class, where the search for closed-over tensors does not look."""

    shift = SHIFT


CONTEXT: ContextVar[Tensor] = ContextVar("shift")


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("options", [{"route": "forward-over-reverse"}, {"checkpoint": 2}], ids=str)
@pytest.mark.parametrize("place", ["class attribute", "context variable", "cache", "cache filled before"])
def test_tensors_lost_by_recomputation_are_rejected(
    place: str, options: dict[str, Any], transformed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hypergradient(shift: Tensor, **options: Any) -> Tensor:
        cached = functools.cache(lambda: shift)
        monkeypatch.setattr(Held, "shift", shift)
        CONTEXT.set(shift)
        if place == "cache filled before":
            cached()
        read = {"class attribute": lambda: Held.shift, "context variable": CONTEXT.get}.get(place, cached)
        adapted = adapt(lambda w, _: quartic(w, read()), START, None, SGD(0.05), 3, **options)
        value = adapted.square().sum()
        return value if transformed else torch.autograd.grad(value, shift)[0]

    derivative = torch.func.grad(hypergradient) if transformed else hypergradient
    shift = SHIFT.clone().requires_grad_(not transformed)
    with pytest.raises(InputError, match="f reaches otherwise; pass it as an argument"):
        functools.partial(derivative, **options)(shift)
    assert derivative(shift).abs().max() > 0.01


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "independent": (lambda: adapt(lambda w, s: s.sum(), START, SHIFT, SGD(), 1), InputError, "depends on the param"),
    "detached": (lambda: adapt(lambda w, s: w.detach().sum(), START, SHIFT, SGD(), 1), InputError, "depends on"),
    "other leaf": (
        lambda: adapt(lambda w, s: (s * leaves()[0]).sum(), START, SHIFT, SGD(), 1),
        InputError,
        "depends on the parameters",
    ),
    "in vmap": (
        lambda: torch.func.vmap(lambda s: adapt(lambda w, s: s.sum(), START, s, SGD(), 1))(draw(2, 3)),
        InputError,
        "depends on the parameters",
    ),
    "early end": (lambda: adapt(quartic, START, iter([SHIFT] * 2), SGD(), 3), InputError, "task: expected 3 .* got 2"),
    "vector": (lambda: adapt(lambda w, s: w - s, START, SHIFT, SGD(), 1), InputError, r"loss: .*\(3,\) float64"),
    "no pair": (
        lambda: adapt(lambda w, s, b: w.sum(), START, SHIFT, SGD(), 1, buffers={}),
        InputError,
        "loss: .*pair|loss: .*buffers",
    ),
    "no callable": (lambda: adapt(SHIFT, START, SHIFT, SGD(), 1), InputError, "loss: expected a callable"),
    "torch.optim": (
        lambda: adapt(quartic, START, SHIFT, torch.optim.SGD([START]), 1),
        InputError,
        "optimizer: .*from_torch",
    ),
    "no optimizer": (lambda: adapt(quartic, START, SHIFT, 0.1, 1), InputError, "optimizer: .*float"),
    "steps": (lambda: adapt(quartic, START, SHIFT, SGD(), -1), InputError, "steps: expected an int of 0 or more"),
    "steps none": (lambda: adapt(quartic, START, SHIFT, SGD(), None), InputError, "steps"),
    "checkpoint": (lambda: adapt(quartic, START, SHIFT, SGD(), 1, checkpoint=0), InputError, "checkpoint"),
    "truncate": (lambda: adapt(quartic, START, SHIFT, SGD(), 1, truncate=True), InputError, "truncate"),
    "clip": (lambda: adapt(quartic, START, SHIFT, SGD(), 1, clip=-1), InputError, "clip: expected a positive norm"),
    "route": (lambda: adapt(quartic, START, SHIFT, SGD(), 1, route="sideways"), InputError, "route: .*sideways"),
    "params": (lambda: adapt(quartic, {"a": 3}, SHIFT, SGD(), 1), InputError, r"params\['a'\]"),
    "state": (lambda: adapt(quartic, START, SHIFT, SGD(), 1, state=3), InputError, "state"),
    "nan start": (lambda: adapt(quartic, START * torch.nan, SHIFT, SGD(), 1), NonFiniteError, "before the first step"),
}


@pytest.mark.parametrize("case", BAD)
def test_rejects_bad_arguments(case: str) -> None:
    call, kind, match = BAD[case]
    with pytest.raises(kind, match=match):
        call()


@pytest.mark.parametrize("options", [*VARIANTS.values(), {"truncate": 1}, {"first_order": True}])
@pytest.mark.parametrize("in_transform", [False, True])
def test_nan_error_names_step_and_parameter(options: dict[str, Any], in_transform: bool) -> None:
    params = {"fine": draw(2).requires_grad_(), "bad": torch.ones(2, dtype=torch.float64, requires_grad=True)}

    def loss(params: Tree, factor: Tensor) -> Tensor:
        return params["fine"].square().sum() + (factor * params["bad"]).sum()

    def run(one: Tensor) -> Tensor:
        batches = [one, one, torch.nan * one, one, one]
        return flat(adapt(loss, params, iter(batches), SGD(0.1), 5, **options))

    if options.get("check_finite", True):
        with pytest.raises(NonFiniteError, match=r"step 2 of 5: the gradient of params\['bad'\] is NaN.*loss is nan"):
            torch.func.vmap(run)(torch.ones(2, dtype=torch.float64)) if in_transform else run(torch.ones(()))
    else:
        assert run(torch.ones(())).isnan().any()


def test_infinite_loss_with_finite_gradients_raises() -> None:
    with pytest.raises(NonFiniteError, match=r"step 0 of 2: the loss is inf, with finite gradients"):
        adapt(lambda w, _: w.sum() + torch.inf, START, None, SGD(0.1), 2)


@pytest.mark.slow
def test_memory_is_constant_without_recording() -> None:
    counter = itertools.count()
    seen = []

    def loss(w: Tensor, shift: Tensor) -> Tensor:
        if next(counter) % 250 == 249:
            seen.append(sum(type(each) is Tensor for each in gc.get_objects()))
        return quartic(w, shift)

    with torch.no_grad():
        adapt(loss, START, SHIFT, SGD(0.01), 1000, check_finite=False)
    # Only the losses of the steps grow: one number per step.
    assert seen[-1] - seen[0] <= 750


def test_adaptation_unpacks() -> None:
    found = adapt(quartic, START, SHIFT, Adam(0.05), 2, history=True)
    params, state, buffers, losses = found
    assert torch.equal(params, adapt(quartic, START, SHIFT, Adam(0.05), 2))
    assert (state.steps, buffers, losses.shape) == ((2,), (), (2,))
    assert params is found.params
