"""Comparison of the graph of a Function's gradient with finite differences of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.distributed.exchanges import IgnoringErrors
from hodiff.recompute.reachable import draw_of, named_modules
from hodiff.recompute.slopes import (
    can_run_again,
    has_derivatives,
    kept_tensors,
    precisions,
    slope_at,
    slope_elsewhere,
    tensors_among,
)
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.transforms import outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, first_row

# Precisions coarser than this belong to 16 bits or fewer.
_FEW_DIGITS = 1e-4
# Factors of the longer steps at which a graph may have the difference after all.
_LONGER = (64, 4096)
# Number of random directions of a comparison.
_DIRECTIONS = 3
# Distances from the point at which gradients are compared; an even function is flat at the point itself.
OFFSETS = (0.0, 0.03)


def loses_recorded(
    function: Any, ctx: Any, cotangents: Sequence[Any], among: Callable[[Tensor], bool] = lambda _: True
) -> bool:
    """Whether backward treats its cotangent, or a tensor that it keeps with a graph, as a constant."""
    if not can_run_again(function):
        return False
    with torch.enable_grad():
        moving = {key: each for key, each in kept_tensors(ctx).items() if each.numel() and _moves(each) and among(each)}

    def slope(points: Sequence[Tensor], given: Sequence[Any]) -> Tensor:
        return slope_elsewhere(function, ctx, dict(zip(moving, points, strict=True)), given)

    with outside_transforms():
        given = [each if each is None else below_transforms(each) for each in cotangents]
        return _loses(slope, [below_transforms(each).detach() for each in moving.values()], given)


def loses_operands(function: Any, ctx: Any, operands: Sequence[Any], cotangents: Sequence[Any]) -> bool:
    """Whether backward treats values that depend on the operands, such as a number, as constants."""
    if not can_run_again(function):
        return False
    with torch.enable_grad():
        moving = [i for i, each in enumerate(operands) if _moves(each)]

    # A Function may modify modules and generators among its operands.
    modules = [module for each in operands for module in named_modules(each)]
    draw = draw_of((), *operands)

    def slope(points: Sequence[Tensor], given: Sequence[Any]) -> Tensor:
        exchanged = dict(zip(moving, points, strict=True))
        given_to = (exchanged.get(i, each) for i, each in enumerate(rows))
        with untouched(modules), draw.replayed():
            outputs = function.apply(*(each.clone() if isinstance(each, Tensor) else each for each in given_to))
        made = tensors_among(outputs if isinstance(outputs, tuple) else (outputs,))
        return slope_at(next(each.grad_fn for each in made if each.requires_grad), given, ctx)

    with outside_transforms(), _attributes_kept(function):
        rows = [first_row(each).detach() if isinstance(each, Tensor) else each for each in operands]
        given = [each if each is None else first_row(each) for each in cotangents]
        return _loses(slope, [rows[i] for i in moving], given, max(precisions(ctx), default=0.0))


@contextmanager
def _attributes_kept(function: Any) -> Iterator[None]:
    """Restore the attributes of a Function's class, so that a pending backward finds its own."""
    before = dict(vars(function))
    try:
        yield
    finally:
        for name, each in before.items():
            if vars(function).get(name) is not each:
                setattr(function, name, each)


def _moves(value: Any) -> bool:
    """Whether a value may be differentiated by; 16-bit numbers are too coarse for differences."""
    return has_derivatives(value) and value.dtype.itemsize >= 4 and carry_derivatives([value])


def is_linear(function: Any, ctx: Any, cotangents: Sequence[Any]) -> bool:
    """Whether backward returns zeros for zeros, and twice the gradients for twice a random cotangent."""
    given = list(filter(has_derivatives, cotangents))
    if not can_run_again(function) or any(each.dtype.itemsize < 4 for each in given):
        return True
    seed = torch.Generator().manual_seed(0)
    draw = RandomState(given, foreign=True)
    # A backward may not accept other cotangents.
    with IgnoringErrors():
        with outside_transforms():
            probe = [normal_like(each, seed) for each in cotangents]
            twice, zeros = ([n * each if has_derivatives(each) else each for each in probe] for n in (2, 0))
        with torch.no_grad():
            found = [_replayed(draw, slope_elsewhere, function, ctx, {}, each) for each in (probe, twice, zeros)]
        with outside_transforms():
            once, again, nothing = map(below_transforms, found)
            # A gradient that backward adds may be small beside the other gradients.
            added = bool((nothing.isfinite() & (nothing != 0)).any())
            return not added and not (again - 2 * once).norm() > 1e-3 * again.norm()
    return True


def _replayed(draw: RandomState, function: Callable[..., Any], *args: Any) -> Any:
    with draw.replayed():
        return function(*args)


def _loses(
    slope_of: Callable[[Sequence[Tensor], Sequence[Any]], Tensor],
    points: Sequence[Tensor],
    cotangents: Sequence[Any],
    precision: float = 0.0,
) -> bool:
    """Whether the graph of a gradient lacks its differences along the points, or along the cotangents."""
    given = list(filter(has_derivatives, cotangents))
    # 16-bit numbers are too coarse for differences.
    if not points or any(each.dtype.itemsize < 4 for each in given):
        return False
    seed = torch.Generator().manual_seed(0)
    probe = [normal_like(each, seed) for each in cotangents]
    draw = RandomState(points, foreign=True)
    own = max(torch.finfo(each.dtype).eps for each in (*points, *given))

    def slope_at_place(numbers: Sequence[Tensor]) -> Tensor:
        rest = iter(numbers[len(points) :])
        with draw.replayed():
            return slope_of(numbers[: len(points)], [next(rest) if has_derivatives(each) else each for each in probe])

    def loses_at(moved: Sequence[Tensor], *, by_points: bool) -> bool | None:
        """Whether the gradient differs from its graph; None if backward or the Function raises at other points."""
        centre = [each.detach().requires_grad_() for each in (*moved, *filter(has_derivatives, probe))]
        # Kept values may have another precision than the operands.
        for eps in sorted({own, max(own, precision)}):
            steps = [
                step if (i < len(points)) is by_points else torch.zeros_like(step)
                for i, step in enumerate(steps_at(centre, seed, eps))
            ]
            with IgnoringErrors():
                if _differs(slope_at_place, centre, steps, eps) and not _agrees_farther(
                    slope_at_place, centre, steps, eps
                ):
                    return True
                continue
            return None
        return False

    aside = [[x.detach() + offset * size_of(x) * normal_like(x, seed) for x in points] for offset in OFFSETS]
    verdicts = [loses_at(moved, by_points=True) for moved in aside]
    if None in verdicts and True not in verdicts:
        # The point may lie on the edge of the domain.
        verdicts.append(loses_at([0.75 * x.detach() for x in points], by_points=True))
    # A gradient is linear in its cotangents, so one point is enough.
    return True in verdicts or loses_at(aside[0], by_points=False) is True


def _agrees_farther(
    slope_at_place: Callable[[Sequence[Tensor]], Tensor], centre: Sequence[Tensor], steps: Sequence[Tensor], eps: float
) -> bool:
    """Whether the graph of a gradient has its differences along longer steps, which digits that cancel disturb less."""
    for factor in _LONGER:
        with IgnoringErrors():  # the domain may end before
            # A difference that bends more would be compared too coarsely to find a lost part.
            if _differs(slope_at_place, centre, [factor * step for step in steps], eps, share=1e-3) is False:
                return True
            continue
        return False
    return False


def _differs(
    slope_at_place: Callable[[Sequence[Tensor]], Tensor],
    centre: Sequence[Tensor],
    steps: Sequence[Tensor],
    eps: float,
    share: float = 0.1,
) -> bool | None:
    """Whether the graph of a gradient lacks its difference along steps; None if it varies too roughly to tell."""
    aside = [
        [(x.detach() + s * h).requires_grad_() for x, h in zip(centre, steps, strict=True)]
        for s in (-1, 0, 1, -0.5, 0.5)
    ]
    with torch.enable_grad():
        slopes = [slope_at_place(each) for each in (centre, *aside)]
        if any(each.shape != slopes[0].shape for each in slopes):
            return None
        # Some numbers may be infinite, as in a mask.
        finite = torch.stack([each.detach() for each in slopes]).isfinite().all(0)
        slope, before, again, after, *near = slopes if bool(finite.all()) else [each[finite] for each in slopes]
        before, again, after, near = before.detach(), again.detach(), after.detach(), [each.detach() for each in near]
        change, half = after - before, near[1] - near[0]
        # Kept 16-bit values have few digits.
        rounding, share = (0.5 * eps**0.5, 2.5 * share) if eps > _FEW_DIGITS else (64 * eps, share)
        smooth = varies_smoothly(before, slope.detach(), again, after, share)
        # A jump at the very point, such as of a sign at 0, does not shrink with the step.
        smooth = smooth and bool((2 * half - change).norm() < share * change.norm())
        # A change of a few units in the last place is rounding.
        smooth = smooth and bool(change.norm() > rounding * before.norm()) and _is_normal(half, steps)
        return not _has_difference(half, change / 2, slope, centre, steps) if smooth else None


def varies_smoothly(before: Tensor, here: Tensor, again: Tensor, after: Tensor, share: float = 0.1) -> bool:
    """Whether numbers change about as much to one side as to the other, unlike rounding and jumps."""
    if not before.shape == here.shape == again.shape == after.shape:
        return False
    change, bend, noise = after - before, after + before - 2 * here, again - here
    small = share * change.norm()
    return bool(bend.norm() < small) and bool(noise.norm() < small) and bool(change.norm() > 1e-12 * here.norm())


def _has_difference(
    difference: Tensor, coarser: Tensor, slope: Tensor, points: Sequence[Tensor], steps: Sequence[Tensor]
) -> bool:
    """Whether the graph of a gradient has its difference, within an error estimated by a coarser difference."""
    tolerance = float(1e-3 * difference.norm() + 10 * (difference - coarser).norm())
    generator = torch.Generator().manual_seed(0)
    # A random direction shows a lost part at its full size.
    for _ in range(_DIRECTIONS):
        along = torch.randn(difference.shape, generator=generator, device="cpu").to(difference)
        pulled: Sequence[Tensor | None] = [None] * len(points)
        if slope.requires_grad:
            pulled = torch.autograd.grad((slope * along).sum(), points, allow_unused=True, retain_graph=True)
        recorded = sum(float((g.conj() * h).real.sum()) for g, h in zip(pulled, steps, strict=True) if g is not None)
        if abs(recorded - float(difference @ along)) > tolerance:
            return False
    return True


def _is_normal(difference: Tensor, steps: Sequence[Tensor]) -> bool:
    """Whether the derivative is large enough for full precision; a smaller one is rightly rounded to 0."""
    tiny = max(torch.finfo(each.dtype).tiny for each in steps)
    longest = max(float(each.abs().max()) for each in steps)
    return float(difference.abs().max()) > tiny * longest / torch.finfo(torch.float64).eps


def steps_at(points: Sequence[Tensor], seed: torch.Generator, eps: float = 0.0) -> list[Tensor]:
    """Return random steps for differences of gradients, for a relative precision of at least `eps`."""
    directions = [normal_like(x, seed) for x in points]
    if eps > _FEW_DIGITS:  # a short step would be lost in rounding
        directions = [each.sgn() for each in directions]
    lengths = [max(torch.finfo(x.dtype).eps, eps) ** 0.5 * size_of(x) for x in points]
    return [length * each for length, each in zip(lengths, directions, strict=True)]


def size_of(tensor: Tensor) -> Tensor:
    """Return the size of each number, at least 1; 0 for numbers that are not finite, which then do not move."""
    size = 1 + tensor.detach().abs()
    return torch.where(size.isfinite(), size, 0)


def normal_like(tensor: Any, seed: torch.Generator) -> Any:
    """Return random numbers in the form of a tensor; values without derivatives are returned unchanged."""
    if not has_derivatives(tensor):
        return tensor
    return torch.randn(tensor.shape, generator=seed, dtype=tensor.dtype, device="cpu").to(tensor.device)
