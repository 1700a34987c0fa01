"""Attention with score and mask functions."""

import math

import torch
from functions.case import FunctionCase, drawn, normal
from torch.nn.attention.flex_attention import create_block_mask

from hodiff.functions.attention.flex.flex_attention import flex_attention
from hodiff.recompute.programs import Checkpoint

LENGTH, KEYS = 2, 3
BETWEEN = torch.arange(LENGTH)[:, None] - torch.arange(KEYS) + KEYS - 1
SEEN = torch.tensor([[True, False, True], [False, True, True]])


def scores(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def biased(q, k, v, table):
    """Apply a relative bias, a score function that only adds."""
    return flex_attention(q, k, v, lambda score, b, h, i, j: score + table[h, i - j + KEYS - 1], enable_gqa=True)


def biased_by_primitives(q, k, v, table):
    return torch.softmax(scores(q, k) + table[:, BETWEEN], -1) @ v


def capped(q, k, v, caps):
    """Apply a learned soft-cap, which has derivatives of every order, with a mask."""

    def score_mod(score, b, h, i, j):
        return caps[h] * torch.tanh(score / caps[h])

    return flex_attention(q, k, v, score_mod, lambda b, h, i, j: (i + j) % KEYS != 1, enable_gqa=True)


def capped_by_primitives(q, k, v, caps):
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    caps = caps[:, None, None]
    return torch.softmax((caps * torch.tanh(scores(q, k) / caps)).masked_fill(~SEEN, -math.inf), -1) @ v


def from_below(b, h, i, j):
    return i >= j


BLOCK_MASK = create_block_mask(from_below, None, None, LENGTH, KEYS, device="cpu", BLOCK_SIZE=1)


def with_exponents(q, k, v):
    """Return the output and the log-sum-exp, with a block mask."""
    return flex_attention(q, k, v, block_mask=BLOCK_MASK, return_lse=True)


def with_exponents_by_primitives(q, k, v):
    hidden = torch.arange(LENGTH)[:, None] < torch.arange(KEYS)
    masked = scores(q, k).masked_fill(hidden, -math.inf)
    return torch.softmax(masked, -1) @ v, torch.logsumexp(masked, -1)


CASES = [
    FunctionCase(
        name="flex_attention",
        function=biased,
        Function=Checkpoint,
        inputs=drawn((1, 2, 2, 1), (1, 1, 3, 1), (1, 1, 3, 1), (2, 4)),
        formula=r"\operatorname{softmax}(\phi(s\, Q K^\top))\, V",
        reference=biased_by_primitives,
        saved="q, k, v and closed-over tensors, by reference",
    ),
    FunctionCase(
        name="flex_attention-capped",
        function=capped,
        Function=Checkpoint,
        inputs=lambda dtype, g: (*drawn((1, 2, 2, 1), (1, 1, 3, 1), (1, 1, 3, 1))(dtype, g), *caps(dtype, g)),
        reference=capped_by_primitives,
    ),
    FunctionCase(
        name="flex_attention-exponents",
        function=with_exponents,
        Function=Checkpoint,
        inputs=drawn((1, 1, 2, 1), (1, 1, 3, 1), (1, 1, 3, 1)),
        reference=with_exponents_by_primitives,
    ),
]


def caps(dtype, generator):
    return (normal((2,), dtype, generator).exp(),)
