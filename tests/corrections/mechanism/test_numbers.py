"""Tensors in place of numbers: an error where torch's forward mode would drop their tangents."""

import pytest
import torch
import torch.nn.functional as F

import hodiff

D = torch.float64
X = torch.tensor([[0.5, -1.0, 2.0], [0.3, 0.2, -0.7]], dtype=D)
ROW = X[:1]
A = torch.tensor(0.23, dtype=D)
LABELS = torch.tensor([0, 1])

# The name in the error, and the call
LOST = {
    "a function": ("negative_slope", lambda a: F.leaky_relu(X, a)),
    "by keyword": ("negative_slope", lambda a: F.leaky_relu(X, negative_slope=a)),
    "by keyword alone": ("alpha", lambda a: torch.add(X, X, alpha=a)),
    "a method": ("alpha", lambda a: X.sub(X, alpha=a)),
    "in place": ("alpha", lambda a: X.clone().add_(X, alpha=a)),
    "a function written in Python": ("delta", lambda a: F.huber_loss(X, 0 * X, delta=a)),
    "an optional number": ("scale", lambda a: F.scaled_dot_product_attention(X[None], X[None], X[None], scale=a)),
    "a compiled function of torch.nn": ("beta", lambda a: F.softplus(X, beta=a)),
    "with a rule": ("eps", lambda a: F.layer_norm(X, (3,), eps=a)),
    "with a rule for compiled ones": ("eps", lambda a: torch.layer_norm(X, (3,), None, None, a)),
    "with a rule, of a loss": ("label_smoothing", lambda a: F.cross_entropy(X, LABELS, label_smoothing=a)),
    "what makes a tensor": ("fill_value", lambda a: torch.full((3,), a)),
    "what makes one like another": ("fill_value", lambda a: X.new_full((3,), a)),
    "of linalg": ("ord", lambda a: torch.linalg.vector_norm(X, 4 * a)),
    "spacing": ("spacing", lambda a: torch.gradient(X, spacing=a, dim=1)[0]),
    "correction": ("correction", lambda a: X.std(correction=a)),
}
# Torch also accepts a tensor here, and keeps its tangent.
KEPT = {
    "mul": lambda a: X * a,
    "pow": lambda a: X.abs().pow(a),
    "clamp": lambda a: X.clamp(-a, a),
    "masked_fill": lambda a: X.masked_fill(X > 0, a),
    "fill_": lambda a: X.clone().fill_(a),
    "where": lambda a: torch.where(X > 0, a, X),
    "lerp": lambda a: torch.lerp(X, X + 1, a),
    "linspace": lambda a: torch.linspace(0, a, 3, dtype=D),
    "lp_pool": lambda a: F.lp_pool1d(X.abs(), 4 * a, 2),
    "local_response_norm": lambda a: F.local_response_norm(X[None], 2, alpha=a),
    "scatter": lambda a: X.index_fill(0, torch.tensor([0]), a),
}


def squares(f):
    return lambda a: (f(a).to(D) ** 2).sum()


@pytest.mark.parametrize("name", LOST)
def test_differentiated_tensor_in_place_of_a_number_is_rejected(name):
    place, f = LOST[name]
    one = torch.ones_like(A)
    with pytest.raises(hodiff.RouteError, match=f"{place}: expected a number, got a 0-d tensor"):
        hodiff.directional_derivatives(squares(f), A, one, order=1)
    with pytest.raises(hodiff.RouteError, match=place), hodiff.corrected():
        torch.func.grad(lambda a: torch.func.jvp(squares(f), (a,), (one,))[1])(A)
    with pytest.raises(hodiff.RouteError, match=place), hodiff.corrected(), torch.autograd.forward_ad.dual_level():
        f(torch.autograd.forward_ad.make_dual(A, one))


@pytest.mark.parametrize("name", LOST)
def test_torch_alone_drops_the_tangent(name):
    """If torch kept the tangent, hodiff would not need to raise."""
    f = squares(LOST[name][1])
    assert torch.func.jvp(f, (A,), (torch.ones_like(A),))[1] == 0
    assert (f(A + 1e-3) - f(A)).abs() > 1e-6


@pytest.mark.parametrize("name", LOST)
def test_constant_tensor_is_accepted_in_place_of_a_number(name):
    """Buffers and detached tensors are accepted."""
    f = LOST[name][1]
    expected = f(A).to(D) * 2

    def of_others(x):
        return x * f(A) + x * f(x.detach() * 0 + A)

    torch.testing.assert_close(
        hodiff.directional_derivatives(lambda x: of_others(x).to(D), A, torch.ones_like(A), order=1)[1], expected
    )


@pytest.mark.parametrize("name", KEPT)
def test_tensor_arguments_keep_their_tangent(name):
    f, h = squares(KEPT[name]), 1e-5
    got = hodiff.directional_derivatives(f, A, torch.ones_like(A), order=1)[1]
    torch.testing.assert_close(got, (f(A + h) - f(A - h)) / (2 * h), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(got, torch.autograd.functional.jacobian(hodiff.corrected()(f), A))
