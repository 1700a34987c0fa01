"""Tests of fused and clipped linear layers: closed forms, memory, clamping, modules, and refused arguments."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw

import hodiff
from hodiff.functions.linear.fused_linear import FusedLinear, clipped_gradient_linear, fused_linear
from hodiff.nn import linear as convolutions
from hodiff.nn.linear import FusedLinear as FusedLinearModule

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "silu": F.silu, "gelu": F.gelu}


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def kept_bytes(function, *leaves):
    """Return the bytes kept for backward without the leaves, each storage counted once."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*leaves)
    assert output.requires_grad
    return sum(size for at, size in held.items() if at not in {leaf.untyped_storage().data_ptr() for leaf in leaves})


@pytest.mark.parametrize(("name", "outputs_kept"), [("relu", 1 / 8), ("tanh", 1), ("silu", 0), ("gelu", 0)])
def test_saved_bytes_beyond_the_arguments(name, outputs_kept):
    x, w, b = (draw(*shape).requires_grad_() for shape in ((16, 8), (32, 8), (32,)))
    output = 16 * 32 * 8
    assert kept_bytes(lambda *a: fused_linear(*a, activation=name), x, w, b) == outputs_kept * output
    assert kept_bytes(lambda *a: ACTIVATIONS[name](F.linear(*a)), x, w, b) == output


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_three_layers_save_half_the_bytes_of_torch(name):
    """Three layers save half of torch's bytes: their inputs but not their pre-activations."""
    x = draw(16, 32)
    weights = [draw(32, 32, seed=k).requires_grad_() for k in range(3)]

    def network(layer):
        def f(*weights):
            y = x
            for w in weights:
                y = layer(y, w)
            return y

        return f

    ours = kept_bytes(network(lambda y, w: fused_linear(y, w, activation=name)), *weights)
    theirs = kept_bytes(network(lambda y, w: ACTIVATIONS[name](F.linear(y, w))), *weights)
    assert ours == 3 * x.nbytes
    assert theirs == 6 * x.nbytes


def test_backward_returns_none_for_a_constant_input(monkeypatch):
    returned = []
    original = FusedLinear.backward
    monkeypatch.setattr(FusedLinear, "backward", staticmethod(lambda *a: returned.append(original(*a)) or returned[-1]))
    w = draw(3, 2).requires_grad_()
    FusedLinear.call(draw(4, 2), w, draw(3), "relu").sum().backward()
    assert [each is None for each in returned[0]] == [True, False, True, True]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (1, 2, 1), (0, 0, None)])
def test_vmapped_gradients_match_a_loop(name, in_dims):
    """Gradients over nested batches, of inputs and of weights, match a loop over torch's own layer."""
    shapes = [(4, 2), (3, 2), (3,)]
    tensors = [
        draw(*shape, seed=k) if dim is None else draw(5, *shape, seed=k).movedim(0, dim)
        for k, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True))
    ]

    def gradients(layer):
        f = lambda *a: layer(*a).sin().sum()  # noqa: E731
        return lambda *a: (layer(*a), *torch.func.grad(f, (0, 1, 2))(*a))

    ours, theirs = gradients(lambda *a: fused_linear(*a, name)), gradients(lambda *a: ACTIVATIONS[name](F.linear(*a)))
    got = torch.func.vmap(ours, in_dims=in_dims)(*tensors)
    nested = torch.func.vmap(torch.func.vmap(ours, in_dims=in_dims), in_dims=(None, 0, None))(
        tensors[0], torch.stack([tensors[1], 2 * tensors[1]]), tensors[2]
    )
    thrice = torch.func.vmap(torch.func.vmap(ours, in_dims=(None, 0, None)), in_dims=(0, None, None))(
        draw(2, *shapes[0], seed=7), draw(3, *shapes[1], seed=8), draw(*shapes[2], seed=9)
    )
    for k in range(5):
        one = [t if dim is None else t.select(dim, k) for t, dim in zip(tensors, in_dims, strict=True)]
        for a, b, c in zip(got, theirs(*one), nested, strict=True):
            close(a[k], b)
            close(c[0, k], b)
        for c, b in zip(nested, theirs(one[0], 2 * one[1], one[2]), strict=True):
            close(c[1, k], b)
    expected = theirs(draw(2, *shapes[0], seed=7)[1], draw(3, *shapes[1], seed=8)[2], draw(*shapes[2], seed=9))
    for a, b in zip(thrice, expected, strict=True):
        close(a[1, 2], b)


def test_relu_derivative_at_zero_is_zero():
    x, w = torch.zeros(1), torch.ones(1, 1)
    assert torch.func.grad(lambda x: fused_linear(x, w).sum())(x) == 0
    assert torch.func.jvp(lambda x: fused_linear(x, w), (x,), (torch.ones(1),))[1] == 0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_at_large_inputs_are_finite(name):
    """Naive formulas give 0 times infinity up to third order."""
    f = lambda x: fused_linear(x, torch.ones(1, 1, dtype=torch.float64), activation=name).sum()  # noqa: E731
    for z in (-1e4, -50.0, 50.0, 1e4):
        g, x = f, torch.tensor([z], dtype=torch.float64)
        for order in range(1, 4):
            g = torch.func.grad(lambda x, g=g: g(x).sum())
            expected = float(order == 1 and z > 0 and name != "tanh")
            assert abs(float(g(x)) - expected) < 1e-15


BOUND = 0.7


def clipped_reference(x, w, cotangent):
    """Compute the clamped gradients by their formulas."""
    return (cotangent @ w).clamp(-BOUND, BOUND), (cotangent.mT @ x).clamp(-BOUND, BOUND)


def test_clipped_gradients_are_clamped():
    x, w, g = draw(4, 3), draw(2, 3, seed=1), draw(4, 2, seed=2)
    y, pullback = torch.func.vjp(lambda x, w: clipped_gradient_linear(x, w, BOUND), x, w)
    close(y, x @ w.mT)
    by_x, by_w = pullback(g)
    for got, expected, exact in zip((by_x, by_w), clipped_reference(x, w, g), (g @ w, g.mT @ x), strict=True):
        close(got, expected)
        assert bool((exact.abs() > BOUND).any())
        assert bool((exact.abs() < BOUND).any())


def test_derivative_of_a_clipped_gradient_is_that_of_the_clamp():
    x, w = draw(4, 3), draw(2, 3, seed=1)
    v = draw(2, 3, seed=2)

    def gradient(layer):
        return torch.func.grad(lambda w: layer(x, w).square().sum() / 8)

    ours = gradient(lambda x, w: clipped_gradient_linear(x, w, BOUND))
    exact = gradient(lambda x, w: x @ w.mT)
    inside = (exact(w).abs() <= BOUND).double()
    assert 0 < inside.sum() < inside.numel()
    close(ours(w), exact(w).clamp(-BOUND, BOUND))
    close(torch.func.jvp(ours, (w,), (v,))[1], inside * torch.func.jvp(exact, (w,), (v,))[1])
    # Reverse over reverse applies the transpose, since no function has these gradients, and clamps the outer pass.
    transposed = torch.func.jvp(exact, (w,), (inside * v,))[1]
    assert bool((transposed.abs() > BOUND / 2).any())
    close(torch.func.vjp(ours, w)[1](2 * v)[0], (2 * transposed).clamp(-BOUND, BOUND))


def test_forward_mode_of_the_clipped_layer_is_not_clipped():
    x, w, v = draw(4, 3), draw(2, 3, seed=1), draw(4, 3, seed=2)
    f = lambda x: clipped_gradient_linear(x, w, 1e-9)  # noqa: E731
    close(torch.func.jvp(f, (x,), (v,))[1], v @ w.mT)


def test_vmapped_clipped_layer_clamps_each_example():
    x, w = draw(5, 4, 3), draw(2, 3, seed=1)
    f = lambda x, w: clipped_gradient_linear(x, w, BOUND).sin().sum()  # noqa: E731
    total = torch.func.grad(lambda w: torch.func.vmap(f, in_dims=(0, None))(x, w).sum())(w)
    close(total, sum(torch.func.grad(f, 1)(each, w) for each in x))
    each = torch.func.vmap(torch.func.grad(f, (0, 1)), in_dims=(0, None))(x, w)
    for k in range(5):
        for a, b in zip(each, torch.func.grad(f, (0, 1))(x[k], w), strict=True):
            close(a[k], b)


def test_gradients_around_vmap_match():
    """Gradients recorded around vmap are correct for a stack of weights with a stack of biases."""
    x, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3), (5, 2, 3), (5, 2)))

    def total(layer):
        return lambda w, b: torch.func.vmap(layer, in_dims=(None, 0, 0))(x, w, b).sin().sum()

    ours = torch.func.grad(total(lambda *each: fused_linear(*each, activation="tanh")), (0, 1))(w, b)
    theirs = torch.func.grad(total(lambda x, w, b: torch.tanh(x @ w.T + b)), (0, 1))(w, b)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_module_matches_linear_and_activation(name):
    module = FusedLinearModule(3, 2, activation=name, dtype=torch.float64)
    plain = torch.nn.Linear(3, 2, dtype=torch.float64)
    plain.load_state_dict(module.state_dict())
    x = draw(4, 3)
    close(module(x), ACTIVATIONS[name](plain(x)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Conv1d", {"stride": 2}),
        ("Conv2d", {"padding": "same", "padding_mode": "reflect"}),
        ("Conv2d", {"groups": 2, "dilation": 2, "bias": False}),
        ("Conv3d", {"padding": (0, 1, 0)}),
    ],
)
def test_convolution_modules_match_torch(kind, options):
    ours = getattr(convolutions, kind)(2, 4, 3, dtype=torch.float64, **options)
    theirs = getattr(torch.nn, kind)(2, 4, 3, dtype=torch.float64, **options)
    theirs.load_state_dict(ours.state_dict())
    x = draw(1, 2, *[6] * int(kind[4]))
    close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fused_linear(torch.ones(2), torch.ones(3)),
            "fused_linear: weight: expected shape (out, in), got (3,)",
        ),
        (lambda: fused_linear(torch.ones(3), torch.ones(3, 2)), "fused_linear: x: expected 2 features"),
        (lambda: fused_linear(torch.ones(2), torch.ones(3, 2), torch.ones(2)), "bias: expected shape (3,), got (2,)"),
        (lambda: fused_linear(torch.ones(2), torch.ones(3, 2), activation="elu"), "activation: expected one of 'relu'"),
        (lambda: fused_linear(torch.ones(2).double(), torch.ones(3, 2)), "one dtype, got x float64, weight float32"),
        (lambda: fused_linear(torch.ones(2).long(), torch.ones(3, 2)), "x: expected a floating-point tensor"),
        (
            lambda: clipped_gradient_linear(torch.ones(2), torch.ones(3, 2), -1),
            "bound: expected a nonnegative number",
        ),
        (lambda: clipped_gradient_linear(torch.ones(2), torch.ones(3, 2), True), "expected a nonnegative number"),
        (lambda: FusedLinearModule(2, 3, activation="elu"), "FusedLinear: activation"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(hodiff.errors.InputError) as refusal:
        call()
    assert message in str(refusal.value)
