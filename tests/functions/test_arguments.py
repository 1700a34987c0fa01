"""Tests of the errors for wrong shapes."""

import itertools

import torch

from hodiff.rules.arguments import broadcast, broadcasts_to

SHAPES = [shape for rank in range(4) for shape in itertools.product((0, 1, 3, 4), repeat=rank)]


def torch_broadcasts(*shapes: tuple[int, ...]) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def test_broadcast_of_two_shapes_matches_torch() -> None:
    for a, b in itertools.product(SHAPES, repeat=2):
        found = torch_broadcasts(a, b)
        assert broadcast(a, b) == (found is not None), (a, b)
        assert broadcasts_to(a, b) == (found == torch.Size(b)), (a, b)


def test_broadcast_of_three_shapes_matches_torch() -> None:
    for shapes in itertools.product([(), (1,), (3,), (4,), (3, 1), (1, 3), (4, 3)], repeat=3):
        assert broadcast(*shapes) == (torch_broadcasts(*shapes) is not None), shapes
