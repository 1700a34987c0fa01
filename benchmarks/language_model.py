"""A language model of the form of GPT-2 with untied embeddings, for several benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
fused: Attend = partial(scaled_dot_product_attention, is_causal=True)


def by_primitives(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention by operators that torch alone differentiates twice."""
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    return weights @ value


class Block(nn.Module):
    """Causal attention and a two-layer network, with layer norms before both and residual connections."""

    def __init__(self, width: int, heads: int, attend: Attend = fused) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens (batch, length, width)."""
        split = self.project(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        attended = self.attend(*split.permute(2, 0, 3, 1, 4))
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Blocks over tokens with learned positions; computes the scores of the next token at every position."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        heads: int,
        layers: int,
        *,
        bias: bool = False,
        attend: Attend = fused,
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=bias)
        with torch.no_grad():
            self.position.weight.mul_(0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to scores (batch * length, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.embedding(tokens) + self.position(places)
        scores: Tensor = self.output(self.norm(self.blocks(x)))
        return scores.flatten(0, 1)
