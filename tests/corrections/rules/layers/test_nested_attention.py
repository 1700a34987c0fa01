"""Attention of nested tensors within `corrected()`, against the formula for each sequence."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_each
from plain_attention import plain_attention

import hodiff

D = torch.float64
LENGTHS, HEADS, SIZE = (4, 2, 5), 2, 3
# Torch warns that both layouts may change.
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")


SEQUENCES = draw_each(*((length, HEADS * SIZE) for length in LENGTHS))
WEIGHTS, DIRECTION = draw_each(*[(3, HEADS * SIZE, HEADS * SIZE)] * 2, seed=1)


def by_sequences(sequences, weights, **options):
    """Return the sum of the losses of all sequences."""
    projected = ([(x @ w.T).unflatten(-1, (HEADS, SIZE)).transpose(0, 1) for w in weights] for x in sequences)
    return sum(plain_attention(*each, **options).sin().sum() for each in projected)


def jagged_loss(x, weights, **options):
    projected = (F.linear(x, w).unflatten(-1, [HEADS, SIZE]).transpose(1, 2) for w in weights)
    return F.scaled_dot_product_attention(*projected, **options).transpose(1, 2).values().sin().sum()


def jagged(**options):
    return torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_value_gradient_and_hvp_match_the_formula(is_causal):
    options = {"is_causal": is_causal}
    x = jagged()
    found = hodiff.value_grad_hvp(lambda w: jagged_loss(x, w, **options), WEIGHTS, DIRECTION)
    expected = hodiff.value_grad_hvp(lambda w: by_sequences(SEQUENCES, w, **options), WEIGHTS, DIRECTION)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def second(loss, leaves, squares):
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(squares(gradients), leaves)


def test_gradient_penalty_by_a_jagged_tensor_matches():
    leaf = jagged(requires_grad=True)
    with hodiff.corrected():
        (found,) = second(jagged_loss(leaf, WEIGHTS), [leaf], lambda gradients: gradients[0].values().square().sum())
    leaves = [x.clone().requires_grad_() for x in SEQUENCES]
    loss = by_sequences(leaves, WEIGHTS)
    expected = second(loss, leaves, lambda gradients: sum(each.square().sum() for each in gradients))
    for ours, theirs in zip(found.unbind(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_different_query_and_key_lengths_with_shared_heads_match():
    queries = draw_each(*((length, 4, SIZE) for length in LENGTHS))
    keys = draw_each(*((length, 2, SIZE) for length in (1, 3, 2)), seed=1)

    def upright(pieces):
        return torch.nested.nested_tensor(pieces, layout=torch.jagged, requires_grad=True)

    a, b = upright(queries), upright(keys)
    with hodiff.corrected():
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (a, b, b)), enable_gqa=True)
        found = torch.autograd.grad(y.transpose(1, 2).values().sin().sum(), (a, b))
    leaves = [each.clone().requires_grad_() for each in (*queries, *keys)]
    loss = sum(
        plain_attention(x.transpose(0, 1), *[z.transpose(0, 1).repeat_interleave(2, 0)] * 2).sin().sum()
        for x, z in zip(leaves[:3], leaves[3:], strict=True)
    )
    expected = torch.autograd.grad(loss, leaves)
    for ours, theirs in zip((*found[0].unbind(), *found[1].unbind()), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_undifferentiated_jagged_tensors_are_left_to_torch():
    x = jagged()
    with hodiff.corrected():
        found = jagged_loss(x, WEIGHTS)
    torch.testing.assert_close(found, by_sequences(SEQUENCES, WEIGHTS), rtol=1e-12, atol=1e-13)


def strided_loss(sequences, weights, **options):
    def nested(w):
        return torch.nested.as_nested_tensor([
            (x @ w.T).unflatten(-1, (HEADS, SIZE)).transpose(0, 1) for x in sequences
        ])

    y = F.scaled_dot_product_attention(*map(nested, weights), **options)
    return sum(each.sin().sum() for each in y.unbind())


@pytest.mark.parametrize("is_causal", [False, True])
def test_strided_hvp_matches_the_formula(is_causal):
    options = {"is_causal": is_causal}
    found = hodiff.hvp(lambda w: strided_loss(SEQUENCES, w, **options), WEIGHTS, DIRECTION)
    expected = hodiff.hvp(lambda w: by_sequences(SEQUENCES, w, **options), WEIGHTS, DIRECTION)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_forward_mode_is_rejected():
    with pytest.raises(hodiff.RouteError, match="does not implement"):
        hodiff.hvp(lambda w: strided_loss(SEQUENCES, w), WEIGHTS, DIRECTION, route="forward-over-reverse")
