"""Equal numbers in another memory layout, as inputs and as incoming gradients: HD309."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, Explains, by_reverse, every_entry
from hodiff.checks.probes.function_calls import FunctionCall
from hodiff.checks.probes.numbers import gap_of, rounding_of
from hodiff.checks.source_lines import rule_location

# Takes a tensor; returns equal numbers in another layout, or None where that is no other.
Layout = Callable[[Tensor], Tensor | None]

# Equal memory in another layout gives equal numbers, up to the order of sums.
_LEAST = 1e-9
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _as_it_is(a: Tensor) -> Tensor | None:
    """The tensor itself."""
    return a


def _strided(a: Tensor) -> Tensor | None:
    """Columns next to each other, or every second element of a longer vector."""
    if a.dim() == 1:
        longer = torch.full((2 * len(a),), 3, dtype=a.dtype, device=a.device)
        longer[::2] = a
        return longer[::2]
    return a.transpose(0, -1).contiguous().transpose(0, -1)


def _channels_last(a: Tensor) -> Tensor | None:
    """As convolutions like it."""
    return a.contiguous(memory_format=_LAST[a.dim()]) if a.dim() in _LAST else None


def _every_second(a: Tensor) -> Tensor | None:
    """A part of a larger tensor, that begins further on."""
    if a.dim() < 2:
        return None
    larger = torch.full((*a.shape[:-1], 2 * a.shape[-1]), 3, dtype=a.dtype, device=a.device)
    larger[..., 1::2] = a
    return larger[..., 1::2]


def _one_number(a: Tensor) -> Tensor | None:
    """The first number in place of all, in memory of its own."""
    return torch.full_like(a, a.reshape(-1)[0].item()) if a.numel() > 1 else None


def _one_number_expanded(a: Tensor) -> Tensor | None:
    """The same number, that stands in memory once, as the gradient of a sum does."""
    return _before_others(a, a.reshape(-1)[:1]).reshape((1,) * a.dim()).expand(a.shape) if a.numel() > 1 else None


def _one_row(a: Tensor) -> Tensor | None:
    """The first row in place of all, in memory of its own."""
    return a[:1].repeat(len(a), *(1,) * (a.dim() - 1)) if a.dim() > 1 and len(a) > 1 else None


def _one_row_expanded(a: Tensor) -> Tensor | None:
    """As the gradient of a sum over rows."""
    return _before_others(a, a[:1]).expand(a.shape) if a.dim() > 1 and len(a) > 1 else None


def _before_others(a: Tensor, part: Tensor) -> Tensor:
    """A part with as many numbers behind it as there were: kernels that read them read no foreign memory."""
    memory = torch.full((a.numel(),), 3, dtype=a.dtype, device=a.device)
    memory[: part.numel()] = part.reshape(-1)
    return memory[: part.numel()].reshape(part.shape)


# Pairs of layouts of equal numbers.
_STRIDES: tuple[tuple[Layout, Layout], ...] = tuple(
    (_as_it_is, each) for each in (_strided, _channels_last, _every_second)
)
_EXPANSIONS = ((_one_number, _one_number_expanded), (_one_row, _one_row_expanded))

# What is laid out, the rule that reads it, and what follows.
_READ: tuple[tuple[str, str, Explains, tuple[tuple[Layout, Layout], ...]], ...] = (
    ("inputs", "forward", every_entry, _STRIDES),
    ("incoming gradients", "backward", by_reverse, _STRIDES + _EXPANSIONS),
)


def memory_layouts(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Give the same numbers in another memory layout: first as inputs, then as incoming gradients."""
    known: dict[Layout, Any] = {_as_it_is: _results(call, _as_it_is, _as_it_is)}
    for what, rule, explains, pairs in _READ:
        for plain, other in pairs:
            if not _applies(call, what, other):
                continue
            if plain not in known:
                known[plain] = attempt(_results, call, _as_it_is, plain)
            layouts = (other, _as_it_is) if what == "inputs" else (_as_it_is, other)
            seen = _difference(call, known[plain], attempt(_results, call, *layouts))
            if seen:
                kind = "expanded" if plain is not _as_it_is else "equal"
                evidence = (f"{call.name} {seen} for {kind} {what} in another memory layout",)
                return [Cause("HD309", evidence, explains, rule_location(call.function, rule))]
    return []


def _applies(call: FunctionCall, what: str, layout: Layout) -> bool:
    given = call.args if what == "inputs" else call.fresh().run().outputs
    return any(_laid_out(a, layout) is not a for a in given)


def _difference(call: FunctionCall, plain: Any, moved: Any) -> str:
    if isinstance(plain, Failure):
        return ""
    if isinstance(moved, Failure):
        # Writing into memory that is read twice is refused by torch, and has a finding of its own.
        return "" if "single memory location" in moved.message else f"raises ({moved.message})"
    allowed = max(_LEAST, rounding_of(call.eps))
    return "gives other numbers" if any(gap_of(a, b) > allowed for a, b in zip(plain, moved, strict=True)) else ""


def _results(call: FunctionCall, inputs: Layout, incoming: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Outputs and gradients."""
    fresh = call.fresh()
    ran = fresh.at({i: _laid_out(a, inputs) for i, a in enumerate(fresh.args) if isinstance(a, Tensor)}).run()
    given = tuple(_laid_out(g, incoming) for g in ran.cotangents(torch.Generator().manual_seed(0)))
    with torch.no_grad():
        outputs = tuple(y.clone() if isinstance(y, Tensor) else y for y in ran.outputs)
        return outputs, ran.pull(given)


def _laid_out(a: Any, layout: Layout) -> Any:
    """The same where a layout says nothing of it."""
    if not isinstance(a, Tensor) or a.layout != torch.strided or not a.numel() or not a.dim():
        return a
    found = layout(a)
    return a if found is None else found
