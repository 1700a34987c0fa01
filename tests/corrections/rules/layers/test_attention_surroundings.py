"""Attention in training, against primitives: in 16 bits, checkpointed, and with a tangent in the loss."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw
from plain_attention import plain_attention
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.functions import attention

HEADS, SIZE, LENGTH = 2, 4, 6
WIDTH = HEADS * SIZE


def heads_of(x, weights):
    return (F.linear(x, w).reshape(*x.shape[:-1], HEADS, SIZE).transpose(-3, -2) for w in weights)


def block(attend, x, weights):
    """Self-attention with a residual connection."""
    return x + attend(*heads_of(x, weights), is_causal=True).transpose(-3, -2).flatten(-2)


X = draw(2, LENGTH, WIDTH)
WEIGHTS, DIRECTION = draw(3, WIDTH, WIDTH, seed=1) / WIDTH**0.5, draw(3, WIDTH, WIDTH, seed=2)


def slope_and_product(loss, weights=WEIGHTS, direction=DIRECTION):
    leaf = weights.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad((slope * direction).sum(), leaf)
    return slope.detach(), product


EXPECTED = slope_and_product(lambda w: block(plain_attention, X, w).sin().sum())


@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention], ids=["hodiff", "torch"])
def test_autocast_errors_are_a_few_roundings(attend):
    """Errors are a few roundings to 8 bits, and less than twice those of primitives under autocast."""
    x, weights, direction = X.float(), WEIGHTS.float(), DIRECTION.float()

    def errors(f):
        with hodiff.corrected(), torch.autocast("cpu", torch.bfloat16):
            found = slope_and_product(lambda w: block(f, x, w).float().sin().sum(), weights, direction)
        assert all(each.dtype == torch.float32 for each in found)
        pairs = zip(found, EXPECTED, strict=True)
        return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]

    ours = errors(attend)
    assert max(ours) < 5e-2
    assert all(mine < 2 * theirs for mine, theirs in zip(ours, errors(plain_attention), strict=True))


@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention], ids=["hodiff", "torch"])
def test_autocast_hvp_matches_by_each_route(attend):
    x, weights, direction = X.float(), WEIGHTS.float(), DIRECTION.float()
    with torch.autocast("cpu", torch.bfloat16):
        for route in hodiff.ROUTES:
            found = hodiff.hvp(lambda w: block(attend, x, w).float().sin().sum(), weights, direction, route=route)
            assert float((found - EXPECTED[1]).norm() / EXPECTED[1].norm()) < 5e-2, route


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention], ids=["hodiff", "torch"])
def test_derivatives_of_checkpointed_attention_match_primitives(attend, reentrant):
    """The checkpoint contains the whole layer, and lies within the corrections."""

    def loss(w):
        return checkpoint(lambda x, w: block(attend, x, w), X, w, use_reentrant=reentrant).sin().sum()

    with hodiff.corrected():
        found = slope_and_product(loss)
    for ours, theirs in zip(found, EXPECTED, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_hvp_through_checkpoints_matches_primitives(reentrant):
    def loss(w):
        attend = F.scaled_dot_product_attention
        return checkpoint(lambda x, w: block(attend, x, w), X, w, use_reentrant=reentrant).sin().sum()

    torch.testing.assert_close(hodiff.hvp(loss, WEIGHTS, DIRECTION), EXPECTED[1], rtol=1e-12, atol=1e-12)
    A = hodiff.HessianOperator(loss, WEIGHTS)
    torch.testing.assert_close(A @ DIRECTION, EXPECTED[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_corrections_entered_inside_a_checkpoint_are_entered_again(reentrant):
    """Corrections that the checkpointed function enters are entered again when it is recomputed."""
    inside = hodiff.corrected()(lambda x, w: block(F.scaled_dot_product_attention, x, w))

    def loss(w):
        return checkpoint(inside, X, w, use_reentrant=reentrant).sin().sum()

    leaf = WEIGHTS.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad, EXPECTED[0], rtol=1e-12, atol=1e-12)
    if not reentrant:  # torch differentiates reentrant checkpoints only once outside of corrections
        for ours, theirs in zip(slope_and_product(loss), EXPECTED, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def gradient_by_primitives(loss):
    """Gradient by torch.autograd of a loss with attention in primitives."""
    leaf = WEIGHTS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(plain_attention, leaf), leaf)
    return gradient


# State, noise and times for the training of a consistency model
STATE, NOISE, TIMES = draw(2, LENGTH, WIDTH, seed=4), draw(2, LENGTH, WIDTH, seed=5), draw(2, 1, 1, seed=6).sigmoid()


def continuous_consistency(attend, weights):
    r"""The loss of continuous-time consistency training with stopped gradients, as in sCM.

    With a state $x_t = \cos(t) x + \sin(t) z$, its velocity, and $f = \cos(t) x_t - \sin(t) F(x_t, t)$, the loss is
    $\| F_\theta - F_{\theta^-} - g / (\|g\| + c) \|^2$ for $g = -\cos(t)\, df_{\theta^-} / dt$.
    """
    state = TIMES.cos() * STATE + TIMES.sin() * NOISE
    velocity = TIMES.cos() * NOISE - TIMES.sin() * STATE
    kept = weights.detach()

    def field(x, t, w):
        return block(attend, x + t.sin(), w)

    def consistent(x, t):
        return t.cos() * x - t.sin() * field(x, t, kept)

    _, change = torch.func.jvp(consistent, (state, TIMES), (velocity, torch.ones_like(TIMES)))
    towards = -TIMES.cos() * change.detach()
    towards = towards / (towards.norm() + 0.1)
    online = field(state, TIMES, weights)
    return (online - online.detach() - towards).square().sum()


def through_the_tangent(attend, weights):
    """The loss of MeanFlow without its stopped gradient: backward goes through the tangent."""

    def field(x, t):
        return block(attend, x + t.sin(), weights)

    value, change = torch.func.jvp(field, (STATE, TIMES), (NOISE, torch.ones_like(TIMES)))
    return (value + TIMES * change - NOISE).square().sum()


@pytest.mark.parametrize("loss", [continuous_consistency, through_the_tangent])
@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention], ids=["hodiff", "torch"])
def test_training_loss_with_a_tangent_matches_primitives(attend, loss):
    leaf = WEIGHTS.clone().requires_grad_()
    with hodiff.corrected():
        loss(attend, leaf).backward()
    torch.testing.assert_close(leaf.grad, gradient_by_primitives(loss), rtol=1e-12, atol=1e-12)
    # The gradient is zero unless the tangent contributes to the loss.
    assert float(leaf.grad.abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("loss", [continuous_consistency, through_the_tangent])
@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention], ids=["hodiff", "torch"])
def test_compiled_training_loss_with_a_tangent_matches_primitives(attend, loss):
    torch.compiler.reset()
    leaf = WEIGHTS.clone().requires_grad_()
    with hodiff.corrected():
        torch.compile(lambda w: loss(attend, w), backend="aot_eager", fullgraph=True)(leaf).backward()
    torch.testing.assert_close(leaf.grad, gradient_by_primitives(loss), rtol=1e-11, atol=1e-12)
