"""Probe with equal numbers in other memory layouts, as inputs and as incoming gradients: HD309."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, Explains, by_reverse, every_entry
from hodiff.checks.probes.function_calls import FunctionCall, cloned
from hodiff.checks.probes.rule_distances import gap_of, rounding_of
from hodiff.checks.source_lines import rule_location

# Returns a tensor's numbers in another layout, or None if the layout does not apply.
Layout = Callable[[Tensor], Tensor | None]

# Tolerance for results of equal numbers in another layout: sums may differ in order.
_LEAST = 1e-9
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _as_it_is(a: Tensor) -> Tensor | None:
    return a


def _strided(a: Tensor) -> Tensor | None:
    """Lay the tensor out by columns, or take every second element of a longer vector."""
    if a.dim() == 1:
        longer = torch.full((2 * len(a),), 3, dtype=a.dtype, device=a.device)
        longer[::2] = a
        return longer[::2]
    return a.transpose(0, -1).contiguous().transpose(0, -1)


def _channels_last(a: Tensor) -> Tensor | None:
    """Lay the tensor out with channels last."""
    return a.contiguous(memory_format=_LAST[a.dim()]) if a.dim() in _LAST else None


def _every_second(a: Tensor) -> Tensor | None:
    """Take a part of a larger tensor, with a storage offset."""
    if a.dim() < 2:
        return None
    larger = torch.full((*a.shape[:-1], 2 * a.shape[-1]), 3, dtype=a.dtype, device=a.device)
    larger[..., 1::2] = a
    return larger[..., 1::2]


def _one_number(a: Tensor) -> Tensor | None:
    """Repeat the first number, in contiguous memory."""
    return torch.full_like(a, a.reshape(-1)[0].item()) if a.numel() > 1 else None


def _one_number_expanded(a: Tensor) -> Tensor | None:
    """Expand the first number without a copy, as the gradient of a sum does."""
    return _before_others(a, a.reshape(-1)[:1]).reshape((1,) * a.dim()).expand(a.shape) if a.numel() > 1 else None


def _one_row(a: Tensor) -> Tensor | None:
    """Repeat the first row, in contiguous memory."""
    return a[:1].repeat(len(a), *(1,) * (a.dim() - 1)) if a.dim() > 1 and len(a) > 1 else None


def _one_row_expanded(a: Tensor) -> Tensor | None:
    """Expand the first row without a copy, as the gradient of a sum over rows does."""
    return _before_others(a, a[:1]).expand(a.shape) if a.dim() > 1 and len(a) > 1 else None


def _before_others(a: Tensor, part: Tensor) -> Tensor:
    """Return a part with the full memory behind it, so that kernels that read too far stay in bounds."""
    memory = torch.full((a.numel(),), 3, dtype=a.dtype, device=a.device)
    memory[: part.numel()] = part.reshape(-1)
    return memory[: part.numel()].reshape(part.shape)


# Pairs of layouts of equal numbers.
_STRIDES: tuple[tuple[Layout, Layout], ...] = tuple(
    (_as_it_is, each) for each in (_strided, _channels_last, _every_second)
)
_EXPANSIONS = ((_one_number, _one_number_expanded), (_one_row, _one_row_expanded))

# The tensors that are laid out, the rule that reads them, the entries that follow, and the pairs of layouts.
_READ: tuple[tuple[str, str, Explains, tuple[tuple[Layout, Layout], ...]], ...] = (
    ("inputs", "forward", every_entry, _STRIDES),
    ("incoming gradients", "backward", by_reverse, _STRIDES + _EXPANSIONS),
)


def memory_layouts(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Compare results for equal numbers in another memory layout: of inputs, then of incoming gradients."""
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
        # Torch refuses to write into expanded memory, which has its own finding.
        return "" if "single memory location" in moved.message else f"raises ({moved.message})"
    allowed = max(_LEAST, rounding_of(call.eps))
    return "gives other numbers" if any(gap_of(a, b) > allowed for a, b in zip(plain, moved, strict=True)) else ""


def _results(call: FunctionCall, inputs: Layout, incoming: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return outputs and gradients."""
    fresh = call.fresh()
    ran = fresh.at({i: _laid_out(a, inputs) for i, a in enumerate(fresh.args) if isinstance(a, Tensor)}).run()
    given = tuple(_laid_out(g, incoming) for g in ran.cotangents(torch.Generator().manual_seed(0)))
    with torch.no_grad():
        outputs = cloned(ran.outputs)
        return outputs, ran.pull(given)


def _laid_out(a: Any, layout: Layout) -> Any:
    """Lay a tensor out; return arguments to which the layout does not apply as they are."""
    if not isinstance(a, Tensor) or a.layout != torch.strided or not a.numel() or not a.dim():
        return a
    found = layout(a)
    return a if found is None else found
