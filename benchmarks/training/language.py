"""Text of half a million letters that comes with Python, and a small transformer that predicts the next letter."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.language_model import LanguageModel, by_primitives

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


def language_model(vocabulary: int, width: int, layers: int, heads: int = 2) -> LanguageModel:
    """Return a transformer that computes scores of the next letter at every position, with small embeddings."""
    model = LanguageModel(vocabulary, LENGTH, width, heads, layers, bias=True, attend=by_primitives)
    for embedding in (model.embedding, model.position):
        nn.init.normal_(embedding.weight, std=0.02)
    return model


def loss_on(model: nn.Module, stretches: Tensor) -> float:
    """Compute the mean cross-entropy on stretches (count, LENGTH + 1)."""
    with torch.no_grad():
        return F.cross_entropy(model(stretches[:, :-1]), stretches[:, 1:].flatten()).item()
