"""Attention."""

import math

import torch
from functions.case import FunctionCase, drawn, total_bytes

from hodiff.functions.attention.attention import attention
from hodiff.functions.attention.attention_function import Attention
from hodiff.functions.attention.packed import packed_attention


def by_primitives(q, k, v, mask=None, visible=None):
    """Compute attention from its definition with whole matrices."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, -1) @ v


VISIBLE = torch.tensor([[True, False, True], [False, True, True]])


SEQUENCES = torch.tensor([[True, True, False], [False, False, True], [False, False, True]])


def capped_within_one(q, k, v):
    """Compute attention with scores 0.8 tanh(x / 0.8), where a query sees its own and the neighbouring positions."""
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    scores = 0.8 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 0.8)
    return torch.softmax(scores.masked_fill(distance.abs() > 1, -math.inf), -1) @ v


def with_dropout(q, k, v):
    return attention(q, k, v, dropout_p=0.4, generator=torch.Generator().manual_seed(5))


CASES = [
    FunctionCase(
        name="attention",
        function=attention,
        Function=Attention,
        inputs=drawn((2, 2), (3, 2), (3, 1)),
        formula=r"\operatorname{softmax}(s\, Q K^\top + M)\, V",
        reference=by_primitives,
        saved_bytes=total_bytes,
        saved="q, k, v, mask",
        empty=lambda dtype: (torch.ones(0, 2, 3, dtype=dtype),) * 3,
    ),
    FunctionCase(
        name="attention-additive-mask",
        function=attention,
        Function=Attention,
        inputs=drawn((2, 2), (3, 2), (3, 1), (2, 3)),
        reference=by_primitives,
        saved_bytes=total_bytes,
    ),
    FunctionCase(
        name="attention-boolean-mask-batch",
        function=lambda q, k, v: attention(q, k, v, VISIBLE),
        Function=Attention,
        inputs=drawn((2, 2, 1), (3, 1), (2, 3, 1)),
        reference=lambda q, k, v: by_primitives(q, k, v, visible=VISIBLE),
        saved_bytes=lambda q, k, v: total_bytes(q, k, v, VISIBLE),
        compile=False,  # torch cannot compile reverse over forward of any batched product: a zero tangent is on "meta"
    ),
    FunctionCase(
        name="attention-causal",
        function=lambda q, k, v: attention(q, k, v, is_causal=True),
        Function=Attention,
        inputs=drawn((3, 2), (3, 2), (3, 1)),
        reference=lambda q, k, v: by_primitives(q, k, v, visible=torch.ones(3, 3).tril().bool()),
        saved_bytes=total_bytes,
    ),
    FunctionCase(
        name="attention-window-capped",
        function=lambda q, k, v: attention(q, k, v, window=(1, 1), softcap=0.8),
        Function=Attention,
        inputs=drawn((3, 2), (4, 2), (4, 1)),
        reference=capped_within_one,
        saved_bytes=total_bytes,
    ),
    FunctionCase(
        name="packed_attention",
        function=lambda q, k, v: packed_attention(q, k, v, [1, 2], [2, 1]),
        Function=Attention,
        inputs=drawn((3, 2), (3, 2), (3, 1)),
        formula=r"\operatorname{softmax}(s\, Q_n K_n^\top)\, V_n",
        reference=lambda q, k, v: by_primitives(q, k, v, visible=SEQUENCES),
        saved_bytes=total_bytes,
        saved="q, k, v of each sequence",
    ),
    FunctionCase(
        name="attention-dropout",
        function=with_dropout,
        Function=Attention,
        inputs=drawn((3, 2), (3, 2), (3, 1)),
        vmap=False,  # vmap refuses to draw for a whole batch, like torch
        compile=False,  # torch.compile does not support generators
    ),
]
