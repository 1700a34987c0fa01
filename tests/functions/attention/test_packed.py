"""Tests of attention of packed sequences against attention with a block mask."""

import re

import numpy as np
import pytest
import torch
from drawing import draw

import hodiff
from hodiff.errors import InputError
from hodiff.functions import attention, packed_attention

LENGTHS, KEY_LENGTHS = [3, 0, 2, 4], [2, 1, 5, 3]


def masked(q, k, v, is_causal=False):
    """Compute one attention of all tokens, with a mask that separates the sequences."""
    owner, key_owner = (torch.arange(4).repeat_interleave(torch.tensor(each)) for each in (LENGTHS, KEY_LENGTHS))
    place, key_place = (torch.cat([torch.arange(n) for n in each]) for each in (LENGTHS, KEY_LENGTHS))
    seen = owner[:, None] == key_owner
    seen = seen & (key_place <= place[:, None]) if is_causal else seen
    return torch.softmax((q @ k.mT / 3**0.5).masked_fill(~seen, -torch.inf), -1) @ v


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_value_gradient_and_hvp_match_a_block_mask(is_causal, kind):
    inputs = draw(2, 9, 3), draw(2, 11, 3, seed=1), draw(2, 11, 4, seed=2)
    lengths = [kind(each) for each in (LENGTHS, KEY_LENGTHS)]

    def ours(*x):
        return packed_attention(*x, *lengths, is_causal=is_causal)

    torch.testing.assert_close(ours(*inputs), masked(*inputs, is_causal))
    v = tuple(torch.ones_like(x) for x in inputs)
    found, expected = (
        hodiff.value_grad_hvp(lambda x, f=f: f(*x).square().sum(), inputs, v)
        for f in (ours, lambda *x: masked(*x, is_causal))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_derivatives_match_differences():
    inputs = draw(3, 2), draw(3, 2, seed=1), draw(3, 1, seed=2)
    hodiff.assert_differentiable(lambda *x: packed_attention(*x, [2, 1]), inputs, scipy=False)


def test_no_sequences_give_an_empty_output():
    empty = torch.zeros(2, 0, 3)
    assert packed_attention(empty, empty, empty, []).shape == (2, 0, 3)


def test_options_match_attention():
    q, k, v = (draw(5, 3, seed=i) for i in range(3))
    options = {"window": (1, 0), "softcap": 0.5, "scale": 0.3, "causal_corner": "lower-right"}
    torch.testing.assert_close(packed_attention(q, k, v, [5], **options), attention(q, k, v, **options))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (([2, 2],), "lengths: expected lengths whose sum is the size of dimension -2 of q, got 4 and q (5, 3)"),
        (([5, -0.5],), "lengths: expected lengths of 0 or more, got [5, -0.5]"),
        ((3,), "lengths: expected lengths"),
        ((torch.tensor(5),), "lengths: expected lengths"),
        (([2, 3], [5]), "key_lengths: expected one for each of 2 lengths, got 1"),
    ],
    ids=str,
)
def test_rejects_bad_lengths(lengths, message):
    x = draw(5, 3)
    with pytest.raises(InputError, match=re.escape(message)):
        packed_attention(x, x, x, *lengths)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("v", draw(3, 3), "v: expected as many rows in dimension -2 as k (5, 3), got (3, 3)"),
        ("q", [1.0], "q: expected a floating-point tensor"),
        ("k", np.ones((5, 3)), "k: expected a floating-point tensor"),
        ("k", draw(5, 3).to("meta"), "packed_attention: expected tensors of one device, got q on cpu, k on meta"),
        ("v", draw(5, 3).to_sparse(), "packed_attention: v: expected a dense tensor"),
    ],
)
def test_rejects_bad_tensors(name, value, message):
    tensors = {each: draw(5, 3) for each in "qkv"} | {name: value}
    with pytest.raises(InputError, match=re.escape(message)):
        packed_attention(**tensors, lengths=[5])
