"""Text of half a million letters that comes with Python, and a small transformer that predicts the next letter."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 32  # letters of context


@cache
def letters() -> tuple[Tensor, int]:
    """Return the text of Python's `help` topics as numbers of letters, and the size of the alphabet."""
    text = "\n".join(topics[topic].lower() for topic in sorted(topics))
    alphabet = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    return torch.tensor([numbers[letter] for letter in text]), len(alphabet)


class Text:
    """Batches of the text; every eighth stretch is kept for validation."""

    def __init__(self) -> None:
        text, self.vocabulary = letters()
        stretches = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        held_out = torch.arange(len(stretches)) % 8 == 0
        self.training, self.validation = stretches[~held_out], stretches[held_out]

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return letters (count, LENGTH) and the letters that follow, (count * LENGTH,)."""
        chosen = self.training[torch.randint(len(self.training), (count,), generator=generator)]
        return chosen[:, :-1], chosen[:, 1:].flatten()


class Layer(nn.Module):
    """Causal attention and a two-layer network, with layer norms before both and residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Transform letters (batch, length, width)."""
        batch, length, width = x.shape
        split = self.project(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + self.output((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Transformer that computes scores of the next letter at every position."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, numbers: Tensor) -> Tensor:
        """Map letters (batch, length) to scores (batch * length, vocabulary)."""
        places = torch.arange(numbers.shape[1]).expand_as(numbers)
        return self.output(self.norm(self.layers(self.embedding(numbers) + self.position(places)))).flatten(0, 1)


def loss_on(model: nn.Module, stretches: Tensor) -> float:
    """Compute the mean cross-entropy on stretches (count, LENGTH + 1)."""
    with torch.no_grad():
        return F.cross_entropy(model(stretches[:, :-1]), stretches[:, 1:].flatten()).item()
