"""Warnings of hvp and operators if the gradient is not the function's derivative, or if the dtype has low precision."""

import warnings

import pytest
import torch
from torch import nn

import hodiff
from hodiff.derivatives import own_gradient

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


class Sine(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @classmethod
    def _pull(cls, ctx, g):
        return cls.factor * g * ctx.saved_tensors[0].cos()

    @staticmethod
    def backward(ctx, g):
        return Sine._pull(ctx, g)


class LouderSine(Sine):
    factor = 1.5

    @staticmethod
    def backward(ctx, g):
        return LouderSine._pull(ctx, g)


class SineOfAutograd(torch.autograd.Function):
    """Sine with a gradient that is `factor` times too large, without setup_context."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g * ctx.saved_tensors[0].cos(), None


def without_recording(x):
    with torch.no_grad():
        weights = x * x
    return (weights * x.sin()).sum()


def shifted(x):
    powers = (x - x.max().detach()).exp()
    return (powers / powers.sum()).square().sum()


class Table(nn.Module):
    """Reads a frozen table under no_grad, as Pegasus reads its positions."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            table = self.table.exp()
        return (self.linear(x).tanh() * table).square().sum()


def hooked(x):
    y = x.sin()
    y.register_hook(lambda g: 2 * g)
    return y.square().sum()


def with_listening_hook(x):
    y = x.sin()
    y.register_hook(lambda g: None)
    return y.square().sum()


DOUBLING, LISTENING = nn.Tanh(), nn.Tanh()
DOUBLING.register_full_backward_hook(lambda module, given, found: (2 * given[0],))
LISTENING.register_full_backward_hook(lambda module, given, found: None)


def with_gradient_inside(x, used=True, **options):
    value = x.pow(3).sum()
    (gradient,) = torch.autograd.grad(value, x, retain_graph=True, **options)
    return (gradient * x).sum() if used else value


# The function, and the name of the call that detaches from the graph; empty if the gradient is correct
CASES = {
    "detach": (lambda x: (x.detach() * x.sin()).sum(), "x.detach()"),
    "data": (lambda x: (x.data * x.sin()).sum(), "x.data"),
    "no_grad": (without_recording, "in without_recording"),
    "inference_mode": (
        lambda x: (torch.inference_mode()(lambda y: y * y)(x) + x.sin()).sum(),
        "torch.inference_mode()",
    ),
    "bits": (lambda x: (x.view(torch.float64) * x.sin()).sum(), "x.view(torch.float64)"),
    "bits by keyword": (lambda x: (x.view(dtype=x.dtype) * x.sin()).sum(), "x.view(dtype=x.dtype)"),
    "complex bits": (
        lambda x: (torch.stack([x, x]).mT.contiguous().view(torch.complex128).real[:, 0] * x.sin()).sum(),
        "view(torch.complex128)",
    ),
    "an operator": (lambda x: (torch.ops.aten.detach(x) * x.sin()).sum(), "aten.detach(x)"),
    "an operator's bits": (lambda x: (torch.ops.aten.view.dtype(x, x.dtype) * x.sin()).sum(), "aten.view.dtype"),
    "a storage": (lambda x: (x.new_empty(0).set_(x.untyped_storage(), 0, (3,)) * x.sin()).sum(), "untyped_storage"),
    "a view": (lambda x: (x.view(3, 1) * x.view(size=(3,)).sin()).sum(), ""),
    "a number": (lambda x: x.sum().item() * x.sin().sum(), "item()"),
    "a new tensor": (lambda x: x.sin().sum() * torch.tensor([x[0], x[1]]).sum(), "torch.tensor("),
    "a list": (lambda x: x.sin().sum() * torch.as_tensor([x[0], x[1]]).sum(), "torch.as_tensor("),
    "as_tensor": (lambda x: x.sin().sum() * torch.as_tensor(x).sum(), ""),
    "a hook": (hooked, "register_hook"),
    "a hook that listens": (with_listening_hook, ""),
    "a hook of a module": (lambda x: DOUBLING(x).square().sum(), "a backward hook of a module"),
    "a hook of a module that listens": (lambda x: LISTENING(x).square().sum(), ""),
    "a Function": (lambda x: LouderSine.apply(x).square().sum(), "LouderSine, a custom Function"),
    "a Function that is right": (lambda x: Sine.apply(x).square().sum(), ""),
    "a gradient inside": (with_gradient_inside, "torch.autograd.grad(value, x"),
    "a gradient inside with a graph": (lambda x: with_gradient_inside(x, create_graph=True), ""),
    "a gradient inside that is not used": (lambda x: with_gradient_inside(x, used=False), ""),
    "a shift without effect": (shifted, ""),
    "a branch": (lambda x: x.sin().sum() if x.detach().sum() > 0 else x.sum(), ""),
    "a kink": (lambda x: ((x.round() - x).detach() + x).square().sum(), ""),
    "nothing": (lambda x: x.sin().sum(), ""),
    "a Function of hodiff": (lambda x: hodiff.functions.swish(x, 1.0).sum(), ""),
}


@pytest.fixture(autouse=True)
def _no_function_is_checked_yet():
    own_gradient._asked.clear()
    yield
    own_gradient._asked.clear()


def warnings_of(call, times=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [str(each.message) for each in caught if issubclass(each.category, hodiff.errors.HodiffWarning)]


@pytest.mark.parametrize("name", CASES)
def test_wrong_gradient_warns_once(name):
    f, words = CASES[name]
    found = warnings_of(lambda: hodiff.hvp(f, X, X), times=3)
    assert len(found) == bool(words), found
    assert words in "".join(found)


def test_functions_with_the_same_code_are_told_apart_by_what_they_call():
    def of(op):
        return lambda x: op(x).square().sum()

    def lost(x):
        return x.sin().detach() * x

    assert warnings_of(lambda: hodiff.hvp(of(torch.sin), X, X)) == []
    assert len(warnings_of(lambda: hodiff.hvp(of(lost), X, X), times=2)) == 1
    assert len(warnings_of(lambda: hodiff.hvp(of(lambda x: lost(x)), X, X))) == 1


def test_every_derivative_warns_of_a_wrong_gradient():
    f = CASES["detach"][0]

    def model(x):
        return x.detach() * x.sin()

    calls = {
        "hvp": lambda: hodiff.hvp(f, X, X),
        "HessianOperator": lambda: hodiff.HessianOperator(f, X) @ X,
        "hessian": lambda: hodiff.hessian(f)(X),
        "JacobianOperator": lambda: hodiff.JacobianOperator(model, X) @ X,
    }
    for name, call in calls.items():
        own_gradient._asked.clear()
        (message,) = warnings_of(call)
        assert message.startswith(f"{name}: the gradient by autograd is not the derivative of the function")
        # The message has the gradient and the derivative along one direction.
        assert "differences of values give" in message


def test_jacobians_of_functions_without_setup_context_warn():
    def right(x):
        return SineOfAutograd.apply(x, 1.0)

    def wrong(x):
        return SineOfAutograd.apply(x, 1.5)

    assert warnings_of(lambda: hodiff.jacobian(right)(X)) == []
    (message,) = warnings_of(lambda: hodiff.jacobian(wrong)(X), times=2)
    assert "SineOfAutograd, a custom Function" in message


def test_frozen_table_under_no_grad_warns():
    torch.manual_seed(0)
    model, x = Table(), torch.ones(2, 3)

    def loss(p):
        return torch.func.functional_call(model, p, x)

    everything = dict(model.named_parameters())
    (message,) = warnings_of(lambda: hodiff.hvp(loss, everything, everything))
    assert "differentiate only with respect to parameters that require a gradient" in message
    own_gradient._asked.clear()
    free = {name: each for name, each in everything.items() if each.requires_grad}
    assert warnings_of(lambda: hodiff.hvp(loss, free, free)) == []


def test_random_state_and_grad_are_left_unchanged():
    p = X.clone().requires_grad_()
    state = torch.get_rng_state()
    warnings_of(lambda: hodiff.hvp(CASES["detach"][0], p, X))
    assert p.grad is None
    torch.testing.assert_close(torch.get_rng_state(), state)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2), (torch.float16, 3)])
def test_warning_names_the_digits_of_16_bits(dtype, digits):
    (message,) = warnings_of(lambda: hodiff.hvp(CASES["nothing"][0], X.to(dtype), X.to(dtype)), times=2)
    assert message.startswith(f"hvp: {dtype} has about {digits} digits")


def pairs(x):
    with torch.no_grad():
        distances = (x[:, None] - x).abs()
        return torch.nonzero((distances < 2.0).triu(1), as_tuple=True)


def pair_energy(x):
    i, j = pairs(x)
    return (x[i] - x[j]).sin().sum()


def written(x):
    weights = torch.zeros_like(x)
    weights[:] = x.detach()
    return (weights * x.sin()).sum()


def transposed(x):
    with torch.no_grad():
        weights = x[:, None].mT.exp()
    return (weights * x.sin()).sum()


def logged(x):
    """Read the value, as a log does, before the cut."""
    assert x.square().sum().item() > 0
    return (x.detach() * x).sum()


# The function, which also has a neighbour list, and the cut of which the numbers are used
AFTER_A_NEIGHBOUR_LIST = {
    "detach": (lambda x: (x.detach() * x).sum(), "x.detach()"),
    "detach after a log": (logged, "x.detach()"),
    "a number": (lambda x: x.sum().item() * x.sin().sum(), "x.sum().item()"),
    "NumPy": (lambda x: (torch.from_numpy(x.detach().numpy() ** 2) * x).sum(), "x.detach().numpy()"),
    "written": (written, "in written"),
    "no_grad": (without_recording, "in without_recording"),
    "a view under no_grad": (transposed, "in transposed"),
    "a hook": (hooked, "in hooked"),
}


@pytest.mark.parametrize("name", AFTER_A_NEIGHBOUR_LIST)
def test_cuts_whose_numbers_are_used_are_named_before_neighbour_lists(name):
    f, words = AFTER_A_NEIGHBOUR_LIST[name]
    (message,) = warnings_of(lambda: hodiff.hvp(lambda x: pair_energy(x) + f(x), X, X))
    assert words in message
    assert "in pairs" not in message
