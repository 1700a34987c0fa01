"""Checks of a custom rule: it is linear, computes the function's value, and writes into no tensor that it receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.authoring.rule_trees import differentiable
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_wrapped
from hodiff.torch_internals.tensors import version_of

Linear = Callable[[list[Tensor | None]], Sequence[Tensor | None]]


class ChangedInPlaceError(InputError):
    """A backward rule writes into its cotangent or residuals (`written`), which other code reads, too."""

    def __init__(self, name: str, written: str):
        super().__init__(
            f"{name}: backward: expected a rule that leaves its {written} unchanged, got one that writes into the "
            f"{written} in place; compute a new tensor, such as `c * x` instead of `c.mul_(x)`."
        )
        self.written = written


def require_same_value(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise if a rule's value differs from the function's value by more than rounding."""
    for a, b in zip(found, expected, strict=True):
        if not _close(a, b):
            raise InputError(
                f"{what}: expected the value of the function, got a value that differs by {_gap(a, b):.1e}; call the "
                "function in the rule."
            )


def require_linear(what: str, rule: Linear, like: Sequence[Tensor], seed: int) -> None:
    """Raise if a rule is not linear in tangents or cotangents, for two random inputs shaped like `like`."""
    generator = torch.Generator().manual_seed(seed)
    u, v = ([_random(each, generator) for each in like] for _ in range(2))
    both = [None if a is None or b is None else 2 * a - 3 * b for a, b in zip(u, v, strict=True)]
    for a, b, c in zip(rule(u), rule(v), rule(both), strict=True):
        if a is not None and b is not None and c is not None and not _close(2 * a - 3 * b, c):
            raise InputError(
                f"{what}: expected a rule L that is linear, got L(2u - 3v) other than 2 L(u) - 3 L(v) by "
                f"{_gap(2 * a - 3 * b, c):.1e}; no tangent or cotangent may enter but by linear operators."
            )


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return how often the memory of each tensor was written in place; inference tensors have no such count."""
    # A write into a batched tensor counts only in the tensor that it wraps.
    inner = [below_transforms(each) if each is not None and is_wrapped(each) else each for each in tensors]
    return [0 if each is None or each.is_inference() else version_of(each) for each in inner]


def require_unchanged(name: str, cotangents: Sequence[Tensor | None], others: Sequence[Tensor], before: Any) -> None:
    """Raise if a backward rule changed its cotangents or other tensors in place since their versions were read."""
    if versions_of([*cotangents, *others]) == before:
        return
    written = "cotangent" if versions_of(cotangents) != before[: len(cotangents)] else "residuals"
    raise ChangedInPlaceError(name, written)


def _random(like: Tensor, generator: torch.Generator) -> Tensor | None:
    if not differentiable(like):
        return None
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device=generator.device).to(like)


def _close(a: Tensor, b: Tensor) -> bool:
    if not differentiable(b):
        return torch.equal(a, b)
    scale = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=max(scale, 1e-30) * torch.finfo(b.dtype).eps ** 0.5, equal_nan=True)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
