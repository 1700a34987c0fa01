"""Tests of functional optimizers against torch.optim, closed forms and finite differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as pytree

import hodiff
from hodiff import InputError, meta

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    "Adam": [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1},
        {"betas": (0.5, 0.7), "eps": 1e-3},
        {"decoupled_weight_decay": True, "weight_decay": 0.2},
    ],
    "AdamW": [{}, {"amsgrad": True}, {"weight_decay": 0.1, "betas": (0.0, 0.5)}],
    "RMSprop": [
        {},
        {"momentum": 0.9},
        {"centered": True},
        {"momentum": 0.5, "centered": True, "weight_decay": 0.1, "alpha": 0.7, "eps": 1e-4},
    ],
    "Adagrad": [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.2, "weight_decay": 0.1, "eps": 1e-3}],
    "Adadelta": [{}, {"rho": 0.5, "eps": 1e-3, "weight_decay": 0.1}],
    "Adamax": [{}, {"betas": (0.5, 0.7), "eps": 1e-2, "weight_decay": 0.1}],
    "NAdam": [
        {},
        {"momentum_decay": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.2},
    ],
}
ROWS = [
    pytest.param(name, options | {"lr": 0.05} | common, id=f"{name}-{number}{'-maximize' * bool(common)}")
    for name, rows in OPTIONS.items()
    for number, options in enumerate(rows)
    for common in ({}, {"maximize": True})
]
# The tested points are smooth; NAdam has the dtype of the test.
EVERY = [(name, options) for name, rows in OPTIONS.items() for options in (rows[0], rows[-1])]


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"w": (3, 2), "b": (2,), "s": ()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def objective(params: dict[str, Tensor]) -> Tensor:
    return (params["w"] @ params["b"] - 1).square().sum().log1p() + params["s"].sin() * params["b"].tanh().sum()


def run(rule: meta.Optimizer, params: Any, steps: int, state: Any = None) -> tuple[Any, meta.OptimizerState]:
    state = state or rule.init(params)
    for _ in range(steps):
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        grads = torch.autograd.grad(objective(leaves), list(leaves.values()))
        params, state = rule.update(dict(zip(params, grads, strict=True)), state, params)
    return params, state


def run_torch(optimizer: torch.optim.Optimizer, params: dict[str, Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        objective(params).backward()
        optimizer.step()


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_ten_steps_match_torch(name: str, options: dict[str, Any]) -> None:
    expected = {key: leaf.requires_grad_() for key, leaf in start().items()}
    run_torch(getattr(torch.optim, name)(expected.values(), **options), expected, 10)
    actual, _ = run(getattr(meta, name)(**options), start(), 10)
    assert_equal(actual, expected)
    assert (actual["w"] - start()["w"]).abs().min() > 1e-6


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_tensor_settings_match_numbers(name: str, options: dict[str, Any]) -> None:
    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return value if isinstance(value, bool) else torch.tensor(value, dtype=torch.float64)

    cls = getattr(meta, name)
    tensors = {key: convert(value) for key, value in options.items()}
    tree = {**tensors, "lr": {key: torch.full_like(leaf, options["lr"]) for key, leaf in start().items()}}
    # torch computes NAdam's product of momenta in float32. With tensors as settings, hodiff computes it in float64.
    tolerance = 1e-6 if name == "NAdam" else 1e-12
    expected, _ = run(cls(**options), start(), 10)
    for each in (tensors, tree):
        actual, _ = run(cls(**each), start(), 10)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
def test_lion_matches_its_formula(weight_decay: float, maximize: bool) -> None:
    expected = {name: leaf.clone() for name, leaf in start().items()}
    momentum = {name: torch.zeros_like(leaf) for name, leaf in expected.items()}
    for _ in range(10):
        leaves = {name: leaf.requires_grad_() for name, leaf in expected.items()}
        grads = torch.autograd.grad(objective(leaves), list(leaves.values()))
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            grad = -grad if maximize else grad
            with torch.no_grad():
                update = (0.9 * momentum[name] + 0.1 * grad).sign()
                expected[name] = leaf - 0.05 * (update + weight_decay * leaf)
                momentum[name] = 0.99 * momentum[name] + 0.01 * grad
    actual, _ = run(meta.Lion(0.05, weight_decay=weight_decay, maximize=maximize), start(), 10)
    assert_equal(actual, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "options"), [*EVERY, ("Lion", {}), ("Lion", {"weight_decay": 0.1})])
def test_derivatives_of_two_steps_match_differences(name: str, options: dict[str, Any]) -> None:
    """Derivatives by gradients, parameters and all numeric settings are correct to second order in both modes."""
    options = {"lr": 0.05, **options}
    numbers = {key: value for key, value in options.items() if isinstance(value, float) and key != "eps"}

    def two_steps(first: Tensor, second: Tensor, param: Tensor, *values: Tensor) -> Tensor:
        rule = getattr(meta, name)(**options | dict(zip(numbers, values, strict=True)))
        state = rule.init(param)
        for grad in (first, second):
            param, state = rule.update(grad, state, param)
        return param

    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs += [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in numbers.values()]
    assert gradcheck(two_steps, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(two_steps, inputs, atol=1e-4)


@pytest.mark.parametrize("name", [*OPTIONS, "Lion"])
def test_derivatives_at_zero_gradients_have_no_nan(name: str) -> None:
    """The derivative by a zero gradient follows the formula, without NaN from the square root of zero."""
    rule = getattr(meta, name)(lr=0.5)

    def step(grad: Tensor) -> Tensor:
        param = torch.ones(2, dtype=torch.float64)
        state = rule.init(param)
        for _ in range(2):
            param, state = rule.update(grad, state, param)
        return param.sum()

    zero = torch.zeros(2, dtype=torch.float64)
    gradient = torch.func.grad(step)(zero)
    assert gradient.isfinite().all()
    assert hodiff.hessian(step)(zero).isfinite().all()
    if name in {"Adam", "RMSprop"}:
        # sum_t lr (1 - b^t)/(1 - b^t) / eps, since the denominator is eps to first order.
        torch.testing.assert_close(gradient, torch.full_like(zero, -2 * 0.5 / 1e-8))


def test_root_derivatives_at_zero_are_finite() -> None:
    from hodiff.meta.optimizer import root

    x = torch.tensor([0.0, 4.0, -1e-20], dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return root(x).sum()

    torch.testing.assert_close(root(x), torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(torch.func.grad(f)(x), torch.tensor([0.0, 0.25, 0.0], dtype=torch.float64))
    diagonal = torch.tensor([0.0, -1 / 32, 0.0], dtype=torch.float64)
    torch.testing.assert_close(torch.func.hessian(f)(x), torch.diag(diagonal))


@pytest.mark.parametrize("name", [*OPTIONS, "Lion"])
def test_vmap_matches_a_loop(name: str) -> None:
    rule = getattr(meta, name)(lr=0.1)
    params, grads = torch.randn(4, 3), torch.randn(4, 3)

    def two(grad: Tensor, param: Tensor) -> tuple[Tensor, meta.OptimizerState]:
        param, state = rule.update(grad, rule.init(param), param)
        return rule.update(grad.sin(), state, param)

    batched, state = torch.func.vmap(two)(grads, params)
    assert state.steps == (2,)
    for i in range(4):
        one, own = two(grads[i], params[i])
        torch.testing.assert_close(batched[i], one)
        torch.testing.assert_close(pytree.tree_map(lambda t, i=i: t[i], state.slots), own.slots)


def test_missing_gradient_leaves_parameter_and_state() -> None:
    rule = meta.AdamW(0.1)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    new, state = rule.update({"a": torch.ones(2), "b": None}, rule.init(params), params)
    assert new["b"] is params["b"]
    assert state.steps == (1, 0)
    assert (new["a"] != 1).all()


def test_update_is_out_of_place_and_keeps_dtypes() -> None:
    rule = meta.Adam(torch.tensor(0.1, dtype=torch.float64))
    params = {"a": torch.ones(2), "b": torch.ones((), dtype=torch.bfloat16)}
    before = pytree.tree_map(torch.clone, params)
    new, _ = rule.update(params, rule.init(params), params)
    assert {key: leaf.dtype for key, leaf in new.items()} == {"a": torch.float32, "b": torch.bfloat16}
    torch.testing.assert_close(params, before)


@pytest.mark.parametrize(("name", "options"), ROWS[::2])
def test_from_torch_continues_the_optimizer(name: str, options: dict[str, Any]) -> None:
    expected = {key: leaf.requires_grad_() for key, leaf in start().items()}
    groups = [{"params": [expected["w"], expected["s"]]}, {"params": [expected["b"]], "lr": 0.01, "weight_decay": 0.3}]
    optimizer = getattr(torch.optim, name)(groups, **options)
    for steps in (0, 4):
        run_torch(optimizer, expected, steps)
        rule, state = meta.from_torch(optimizer, expected)
        params = {key: leaf.detach().clone() for key, leaf in expected.items()}
        params, _ = run(rule, params, 6, state)
        run_torch(optimizer, expected, 6)
        assert_equal(params, expected)


def test_from_torch_without_params_takes_groups_in_order() -> None:
    layer = nn.Linear(2, 1)
    rule, state = meta.from_torch(torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.5))
    assert isinstance(rule, meta.SGD)
    assert (rule.lr, rule.momentum) == (0.3, 0.5)
    assert [slots["momentum_buffer"].shape for slots in state.slots] == [(1, 2), (1,)]


def test_from_torch_keeps_differing_betas() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [a]}, {"params": [b], "betas": (0.5, 0.999)}])
    rule, _ = meta.from_torch(optimizer, {"a": a, "b": b})
    assert rule.betas == ({"a": 0.9, "b": 0.5}, 0.999)


def sgd_step(lr: Any = 0.1, grad: Any = None) -> Any:
    rule, param = meta.SGD(lr), torch.ones(2)
    return rule.update(param if grad is None else grad, rule.init(param), param)


def sgd_state() -> tuple[Tensor, meta.OptimizerState, Tensor]:
    return torch.ones(2), meta.SGD().init(torch.ones(2)), torch.ones(2)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: meta.SGD(-1.0), r"SGD: lr: expected a number of at least 0"),
        (lambda: meta.SGD("fast"), r"SGD: lr"),
        (lambda: meta.SGD({"a": -1.0}), r"SGD: lr"),
        (lambda: meta.SGD(nesterov=True), r"SGD: nesterov"),
        (lambda: meta.SGD(momentum=0.9, nesterov=True, dampening=0.1), r"SGD: nesterov"),
        (lambda: meta.Adam(betas=(0.9, 1.0)), r"Adam: betas: .* below 1"),
        (lambda: meta.Adam(betas=0.9), r"Adam: betas: expected a pair"),
        (lambda: meta.Adam(amsgrad=1), r"Adam: amsgrad: expected True or False"),
        (lambda: meta.Adam(torch.tensor(1)), r"Adam: lr"),
        (lambda: meta.Adam().init({"a": torch.ones(2, dtype=torch.int64)}), r"Adam.*params\['a'\]"),
        (lambda: meta.Adam({"b": 0.1}).init({"a": torch.ones(2)}), r"Adam: lr: .*\['a'\].*\['b'\]"),
        (lambda: meta.Adam().update(1, None, torch.ones(2)), r"Adam: state"),
        (lambda: meta.Adam().update({"a": torch.ones(2)}, None, torch.ones(2)), r"Adam: grads"),
        (lambda: sgd_step(grad=torch.ones(1)), r"SGD: grads: expected \(2,\) float32 .* got \(1,\) float32"),
        (lambda: sgd_step(lr=torch.ones(3, 1)), r"SGD: lr: .*broadcasts to params, \(2,\)"),
        (lambda: meta.Adam().update(*sgd_state()), r"Adam: state: .*exp_avg"),
        (lambda: meta.from_torch(torch.optim.LBFGS([torch.ones(1)])), r"from_torch: optimizer: .*LBFGS"),
        (lambda: meta.from_torch(torch.optim.SGD([torch.ones(1)]), {"a": torch.ones(1)}), r"from_torch: params\['a'\]"),
        (
            lambda: meta.from_torch(
                torch.optim.Adam([{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "amsgrad": True}])
            ),
            r"from_torch: optimizer: .*amsgrad",
        ),
    ],
)
def test_rejects_bad_arguments(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make()
