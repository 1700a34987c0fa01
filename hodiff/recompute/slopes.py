"""The slope of a Function: the gradients that its backward returns for a cotangent, at the tensors that it keeps.

A backward is a function of its cotangent and of what the Function keeps, so that it can be evaluated at other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dis import get_instructions
from itertools import pairwise
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hodiff.common.complex_numbers import as_real
from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.recompute.reachable import cells_of, draw_of, named_modules
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.forward_mode import in_dual_level
from hodiff.torch_internals.autograd.graph_nodes import backward_rules, operator_of, results_of
from hodiff.torch_internals.autograd.recording import in_fx_trace
from hodiff.torch_internals.autograd.transforms import outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, first_row

Kept = Mapping[Any, Tensor]

# The precision of what has 16 bits or fewer.
_FEW_DIGITS = 1e-4
# Along how many random directions.
_DIRECTIONS = 3
# Where slopes are compared besides the point itself, at which an even one is flat.
OFFSETS = (0.0, 0.03)


class Schedule:
    """The times at which something is looked at: the 1st, 2nd, 4th, 8th time that it is met and so on."""

    def __init__(self) -> None:
        self._met: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()

    def is_due(self, owner: Any, *keys: Any) -> bool:
        """Count keys of an owner, and say whether one of them is due; without an owner they always are."""
        if owner is None:
            return True
        met = self._met.get(owner)
        if met is None:
            met = self._met[owner] = {}
        due = False
        for key in keys:
            met[key] = count = met.get(key, 0) + 1
            due |= not count & (count - 1)
        return due

    def begin_again(self, owner: Any, key: Any) -> None:
        """Make what was found to be wrong due the next time, too."""
        if owner is not None:
            self._met[owner].pop(key, None)


# Counts the calls of each Function, separately for graphs and for transforms.
SCHEDULE = Schedule()


def form_of(node: Any) -> tuple[Any, ...]:
    """Return what a Function was called for: which gradients, in which dtypes, with which flags on its context."""
    flags = [(name, each) for name, each in getattr(node, "__dict__", {}).items() if type(each) is bool]
    dtypes = [result.dtype for result in results_of(node)]
    return tuple(getattr(node, "needs_input_grad", ())), tuple(dtypes), tuple(sorted(flags))


def kept_tensors(node: Any) -> dict[int | str, Tensor]:
    """The tensors that a Function saved, by place, and those on its context, by attribute."""
    try:
        saved = getattr(node, "saved_tensors", None) or ()
    except RuntimeError:  # a checkpoint recomputes them once
        return {}
    kept: dict[Any, Any] = {**dict(enumerate(saved)), **getattr(node, "__dict__", {})}
    return {key: each for key, each in kept.items() if isinstance(each, Tensor)}


def keeps_numbers(node: Any) -> bool:
    """Whether a Function keeps numbers without a graph: tensors, arrays, Python's numbers and collections of them."""
    return any(True for _ in _precisions(node))


def _precisions(node: Any) -> Iterator[float]:
    """The relative precision of each number, or collection of numbers, that a Function keeps without a graph."""
    stack = [*kept_tensors(node).values(), *getattr(node, "__dict__", {}).values()]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            if has_derivatives(value) and not value.requires_grad and value.numel() > 0:
                yield torch.finfo(value.dtype).eps
        elif isinstance(value, (np.ndarray, float, complex)):
            if (kind := np.asarray(value).dtype).kind in "fc":
                yield float(np.finfo(kind).eps)
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(value.values() if isinstance(value, dict) else value)


class _Elsewhere:
    """The context of a Function, with other tensors in the place of some that it keeps."""

    def __init__(self, node: Any, kept: Kept):
        self.__dict__.update(_node=node, _kept=kept, **{k: each for k, each in kept.items() if isinstance(k, str)})

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(self._kept.get(i, each) for i, each in enumerate(self._node.saved_tensors))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def slope_at(node: Any, cotangents: Sequence[Any]) -> Tensor:
    """Run the backward of a node, and flatten the gradients."""
    return _flattened(getattr(node, "apply", node)(*materialized(node, cotangents)))


def materialized(node: Any, cotangents: Sequence[Any]) -> list[Any]:
    """Zeros for the outputs of a node that nobody uses, as torch itself gives to backward."""
    results = results_of(node)
    if len(results) != len(cotangents):
        return list(cotangents)
    return [
        torch.zeros(result.shape, dtype=result.dtype, device=result.device) if each is None else each
        for each, result in zip(cotangents, results, strict=True)
    ]


def slope_elsewhere(function: Any, ctx: Any, kept: Kept, cotangents: Sequence[Any]) -> Tensor:
    """Run a backward with other tensors in the place of some that the Function keeps, and flatten the gradients."""
    return _flattened(next(backward_rules(function))(_Elsewhere(ctx, kept), *materialized(ctx, cotangents)))


def _flattened(pulled: Any) -> Tensor:
    return flat(pulled if isinstance(pulled, tuple) else (pulled,))


def flat(tensors: Iterable[Any]) -> Tensor:
    """Real numbers of all tensors among some values, as one vector."""
    numbers = [as_real(each).double().flatten() for each in _tensors(tensors)]
    return torch.cat(numbers) if numbers else torch.zeros(1)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def varies_smoothly(before: Tensor, here: Tensor, again: Tensor, after: Tensor, share: float = 0.1) -> bool:
    """Whether numbers change, but for a share, as much to one side as to the other, as rounding and jumps do not."""
    if not before.shape == here.shape == again.shape == after.shape:
        return False
    change, bend, noise = after - before, after + before - 2 * here, again - here
    small = share * change.norm()
    return bool(bend.norm() < small) and bool(noise.norm() < small) and bool(change.norm() > 1e-12 * here.norm())


def _has_difference(
    difference: Tensor, coarser: Tensor, slope: Tensor, points: Sequence[Tensor], steps: Sequence[Tensor]
) -> bool:
    """Whether the graph of a slope has its difference, within an error estimated by a coarser difference."""
    tolerance = float(1e-3 * difference.norm() + 10 * (difference - coarser).norm())
    generator = torch.Generator().manual_seed(0)
    # A random direction sees what is lost as large as it is.
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
    """Whether the derivative is large enough for full precision; a smaller one is rounded, rightly, to 0."""
    tiny = max(torch.finfo(each.dtype).tiny for each in steps)
    longest = max(float(each.abs().max()) for each in steps)
    return float(difference.abs().max()) > tiny * longest / torch.finfo(torch.float64).eps


def steps_at(points: Sequence[Tensor], seed: torch.Generator, eps: float = 0.0) -> list[Tensor]:
    """Random steps by which differences of slopes are taken, for a relative precision that is at least `eps`."""
    directions = [normal_like(x, seed) for x in points]
    if eps > _FEW_DIGITS:  # a short step would be lost in rounding
        directions = [each.sgn() for each in directions]
    lengths = [max(torch.finfo(x.dtype).eps, eps) ** 0.5 * size_of(x) for x in points]
    return [length * each for length, each in zip(lengths, directions, strict=True)]


def size_of(tensor: Tensor) -> Tensor:
    """The size of each number, at least 1; 0 for those that are not finite, which stay where they are."""
    size = 1 + tensor.detach().abs()
    return torch.where(size.isfinite(), size, 0)


def normal_like(tensor: Any, seed: torch.Generator) -> Any:
    """Random numbers in the form of a tensor; what has no derivatives stays as it is."""
    if not has_derivatives(tensor):
        return tensor
    return torch.randn(tensor.shape, generator=seed, dtype=tensor.dtype, device="cpu").to(tensor.device)


def has_derivatives(value: Any) -> bool:
    """Whether a value is a tensor of a dtype that has derivatives."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def loses_recorded(
    function: Any, ctx: Any, cotangents: Sequence[Any], among: Callable[[Tensor], bool] = lambda _: True
) -> bool:
    """Whether backward takes for a constant its cotangent, or what a Function keeps with a graph, such as an argument.

    Args:
        function: The Function.
        ctx: Its context, or its node.
        cotangents: What its backward was given.
        among: Which of the kept tensors are asked about.

    Returns:
        Whether the graph of the slope lacks what differences of it have; False where that is not known.
    """
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
    """Whether backward takes for a constant what depends on the operands, such as a number that forward computed.

    Args:
        function: The Function, which is called anew.
        ctx: Its context, or its node.
        operands: What it was called with, perhaps inside of transforms.
        cotangents: What its backward was given.

    Returns:
        Whether the graph of the slope lacks what differences of it have; False where that is not known.
    """
    if not can_run_again(function):
        return False
    with torch.enable_grad():
        moving = [i for i, each in enumerate(operands) if _moves(each)]

    # A Function may write into what it is given.
    modules = [module for each in operands for module in named_modules(each)]
    draw = draw_of((), *operands)

    def slope(points: Sequence[Tensor], given: Sequence[Any]) -> Tensor:
        exchanged = dict(zip(moving, points, strict=True))
        given_to = (exchanged.get(i, each) for i, each in enumerate(rows))
        with untouched(modules), draw.replayed():
            outputs = function.apply(*(each.clone() if isinstance(each, Tensor) else each for each in given_to))
        made = _tensors(outputs if isinstance(outputs, tuple) else (outputs,))
        return slope_at(next(each.grad_fn for each in made if each.requires_grad), given)

    with outside_transforms():
        rows = [first_row(each).detach() if isinstance(each, Tensor) else each for each in operands]
        given = [each if each is None else first_row(each) for each in cotangents]
        return _loses(slope, [rows[i] for i in moving], given, max(_precisions(ctx), default=0.0))


def _moves(value: Any) -> bool:
    """Whether a value may be differentiated by; differences of 16-bit numbers have no digits."""
    return has_derivatives(value) and value.dtype.itemsize >= 4 and carry_derivatives([value])


def is_linear(function: Any, ctx: Any, cotangents: Sequence[Any]) -> bool:
    """Whether backward returns zeros for zeros, and twice the gradients for twice a random cotangent."""
    given = list(filter(has_derivatives, cotangents))
    if not can_run_again(function) or any(each.dtype.itemsize < 4 for each in given):
        return True
    seed = torch.Generator().manual_seed(0)
    draw = RandomState(given, foreign=True)
    try:
        with outside_transforms():
            probe = [normal_like(each, seed) for each in cotangents]
            twice, zeros = ([n * each if has_derivatives(each) else each for each in probe] for n in (2, 0))
        with torch.no_grad():
            found = [_replayed(draw, slope_elsewhere, function, ctx, {}, each) for each in (probe, twice, zeros)]
        with outside_transforms():
            once, again, nothing = map(below_transforms, found)
            # A gradient that is added may be small beside the others.
            added = bool((nothing.isfinite() & (nothing != 0)).any())
            return not added and not (again - 2 * once).norm() > 1e-3 * again.norm()
    except Exception:
        # A backward need not take others, and its own errors at them are of no interest.
        return True


def _replayed(draw: RandomState, function: Callable[..., Any], *args: Any) -> Any:
    with draw.replayed():
        return function(*args)


def can_run_again(function: Any) -> bool:
    """Whether a Function and its rules may be called once more, without a trace that would have it."""
    if function is None or in_fx_trace() or torch.compiler.is_compiling() or in_dual_level():
        return False
    # Programs look themselves, as do rules inside of transforms, which torch wraps; and a rule that calls `backward`
    # adds to gradients of others.
    own = function.__module__.startswith(("hodiff.recompute.", "torch.")) and not operator_of(function)
    rule = next(backward_rules(function), None)
    return not own and rule is not None and not _calls_backward(rule)


def _calls_backward(rule: Any) -> bool:
    """Whether a rule calls `backward` of a tensor, and not that of the Function it inherits from."""
    code = getattr(rule, "__code__", None)
    if code is None or "backward" not in code.co_names:
        return False
    held = (
        {**rule.__globals__, **{name: cell.cell_contents for name, cell in cells_of(rule)}}
        if isinstance(rule, FunctionType)
        else {}
    )
    steps = [each for each in get_instructions(code) if each.opname != "CACHE"]
    owners = [held.get(before.argval) for before, each in pairwise(steps) if each.argval == "backward"]
    others = [each for each in owners if not (isinstance(each, type) and issubclass(each, torch.autograd.Function))]
    return len(others) > code.co_names.count("super")


def _loses(
    slope_of: Callable[[Sequence[Tensor], Sequence[Any]], Tensor],
    points: Sequence[Tensor],
    cotangents: Sequence[Any],
    precision: float = 0.0,
) -> bool:
    """Compare the graph of a slope with its differences by the points, and by the cotangents.

    Args:
        slope_of: The slope, of points and cotangents.
        points: The points.
        cotangents: The cotangents.
        precision: The relative precision of what the Function keeps.

    Returns:
        Whether they differ.
    """
    given = list(filter(has_derivatives, cotangents))
    # Differences of 16-bit numbers have no digits.
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
        """None where backward, or the Function, raises: it need not take other points."""
        centre = [each.detach().requires_grad_() for each in (*moved, *filter(has_derivatives, probe))]
        # What is kept may be of another precision than what matters.
        for eps in sorted({own, max(own, precision)}):
            steps = [
                step if (i < len(points)) is by_points else torch.zeros_like(step)
                for i, step in enumerate(steps_at(centre, seed, eps))
            ]
            try:
                if _differs(slope_at_place, centre, steps, eps):
                    return True
            except Exception:
                return None
        return False

    aside = [[x.detach() + offset * size_of(x) * normal_like(x, seed) for x in points] for offset in OFFSETS]
    verdicts = [loses_at(moved, by_points=True) for moved in aside]
    if None in verdicts and True not in verdicts:
        # The point may lie on the edge of the domain.
        verdicts.append(loses_at([0.75 * x.detach() for x in points], by_points=True))
    # By cotangents a slope is linear, so that one place will do.
    return True in verdicts or loses_at(aside[0], by_points=False) is True


def _differs(
    slope_at_place: Callable[[Sequence[Tensor]], Tensor], centre: Sequence[Tensor], steps: Sequence[Tensor], eps: float
) -> bool:
    """Whether a slope varies smoothly along steps, and otherwise than its graph says."""
    aside = [
        [(x.detach() + s * h).requires_grad_() for x, h in zip(centre, steps, strict=True)]
        for s in (-1, 0, 1, -0.5, 0.5)
    ]
    with torch.enable_grad():
        slopes = [slope_at_place(each) for each in (centre, *aside)]
        if any(each.shape != slopes[0].shape for each in slopes):
            return False
        # As where a mask is infinite.
        finite = torch.stack([each.detach() for each in slopes]).isfinite().all(0)
        slope, before, again, after, *near = slopes if bool(finite.all()) else [each[finite] for each in slopes]
        before, again, after, near = before.detach(), again.detach(), after.detach(), [each.detach() for each in near]
        change, half = after - before, near[1] - near[0]
        # What is kept in 16 bits has few digits.
        rounding, share = (0.5 * eps**0.5, 0.25) if eps > _FEW_DIGITS else (64 * eps, 0.1)
        smooth = varies_smoothly(before, slope.detach(), again, after, share)
        # A jump at the very point, such as that of a sign at 0, does not become smaller.
        smooth = smooth and bool((2 * half - change).norm() < share * change.norm())
        # A change of a few units in the last place is rounding.
        smooth = smooth and bool(change.norm() > rounding * before.norm()) and _is_normal(half, steps)
        return smooth and not _has_difference(half, change / 2, slope, centre, steps)
