"""The slope of a Function: the gradients that its backward returns for a cotangent, at the tensors that it keeps.

A backward is a function of its cotangent and of what the Function keeps, so that it can be evaluated at other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hodiff.common.complex_numbers import as_real
from hodiff.common.randomness import RandomState
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.forward_mode import in_dual_level
from hodiff.torch_internals.autograd.graph_nodes import backward_rules
from hodiff.torch_internals.autograd.recording import in_fx_trace
from hodiff.torch_internals.autograd.transforms import outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

Kept = Mapping[Any, Tensor]

# Where slopes are compared besides the point itself, at which an even one is flat.
OFFSETS = (0.0, 0.03)
# How often a Function was met.
_MET: WeakKeyDictionary[type, int] = WeakKeyDictionary()


def kept_tensors(node: Any) -> dict[int | str, Tensor]:
    """The tensors that a Function saved, by place, and those on its context, by attribute."""
    try:
        saved = getattr(node, "saved_tensors", None) or ()
    except RuntimeError:  # a checkpoint recomputes them once
        return {}
    kept: dict[Any, Any] = {**dict(enumerate(saved)), **getattr(node, "__dict__", {})}
    return {key: each for key, each in kept.items() if isinstance(each, Tensor)}


def kept_constants(node: Any) -> dict[int | str, Tensor]:
    """The real tensors without a graph that a Function keeps."""
    return {
        key: each
        for key, each in kept_tensors(node).items()
        if not each.is_complex() and not each.requires_grad and each.numel()
    }


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
    return _flattened(getattr(node, "apply", node)(*cotangents))


def slope_elsewhere(function: Any, ctx: Any, kept: Kept, cotangents: Sequence[Any]) -> Tensor:
    """Run a backward with other tensors in the place of some that the Function keeps, and flatten the gradients."""
    return _flattened(next(backward_rules(function))(_Elsewhere(ctx, kept), *cotangents))


def _flattened(pulled: Any) -> Tensor:
    return flat(pulled if isinstance(pulled, tuple) else (pulled,))


def flat(tensors: Iterable[Any]) -> Tensor:
    """Real numbers of all tensors among some values, as one vector."""
    numbers = [as_real(each).double().flatten() for each in _tensors(tensors)]
    return torch.cat(numbers) if numbers else torch.zeros(1)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def varies_smoothly(before: Tensor, here: Tensor, again: Tensor, after: Tensor) -> bool:
    """Whether numbers change as much to one side as to the other: rounding, jumps and random numbers do not."""
    if not before.shape == here.shape == again.shape == after.shape:
        return False
    change, bend, noise = after - before, after + before - 2 * here, again - here
    small = 0.1 * change.norm()
    return bool(bend.norm() < small) and bool(noise.norm() < small) and bool(change.norm() > 1e-12 * here.norm())


def has_difference(
    before: Tensor, after: Tensor, slope: Tensor, points: Sequence[Tensor], steps: Sequence[Tensor]
) -> bool:
    """Whether the graph of a slope has its difference between two points, on both sides of `points`."""
    difference = (after - before) / 2
    along = torch.randn(difference.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(difference)
    pulled: Sequence[Tensor | None] = [None] * len(points)
    if slope.requires_grad:
        pulled = torch.autograd.grad((slope * along).sum(), points, allow_unused=True, retain_graph=True)
    recorded = sum(float((g.conj() * h).real.sum()) for g, h in zip(pulled, steps, strict=True) if g is not None)
    return abs(recorded - float(difference @ along)) <= 0.01 * float((difference * along).abs().sum())


def steps_at(points: Sequence[Tensor], seed: torch.Generator) -> list[Tensor]:
    """Random steps by which differences of slopes are taken."""
    return [torch.finfo(x.dtype).eps ** 0.5 * (1 + x.detach().abs()) * normal_like(x, seed) for x in points]


def normal_like(tensor: Any, seed: torch.Generator) -> Any:
    """Random numbers in the form of a tensor; what has no derivatives stays as it is."""
    if not has_derivatives(tensor):
        return tensor
    return torch.randn(tensor.shape, generator=seed, dtype=tensor.dtype, device="cpu").to(tensor.device)


def has_derivatives(value: Any) -> bool:
    """Whether a value is a tensor of a dtype that has derivatives."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def loses_recorded(function: Any, ctx: Any, cotangents: Sequence[Any], *, always: bool = False) -> bool:
    """Whether backward takes for a constant its cotangent, or what a Function keeps with a graph, such as an argument.

    It is looked at the 1st, 2nd, 4th, 8th time that a Function is met and so on, also inside of transforms.

    Args:
        function: The Function.
        ctx: Its context, or its node.
        cotangents: What its backward was given.
        always: Look each time.

    Returns:
        Whether the graph of the slope lacks what differences of it have; False where that is not known.
    """
    if function is None:
        return False
    if not always:
        _MET[function] = met = _MET.get(function, 0) + 1
        if met & (met - 1):
            return False
    if in_fx_trace() or torch.compiler.is_compiling() or in_dual_level():
        return False
    rule = next(backward_rules(function), None)
    # Programs look themselves, as do rules inside of transforms, which torch wraps; and a rule that calls `backward`
    # adds to gradients of others.
    own = function.__module__.startswith(("hodiff.recompute.", "torch."))
    if own or rule is None or "backward" in getattr(getattr(rule, "__code__", None), "co_names", ()):
        return False
    with torch.enable_grad():
        moving = {key: each for key, each in kept_tensors(ctx).items() if carry_derivatives([each])}
    kept = {key: below_transforms(each).detach() for key, each in moving.items() if each.numel()}
    # Differences of 16-bit numbers have no digits.
    if not kept or any(each.dtype.itemsize < 4 for each in (*kept.values(), *filter(has_derivatives, cotangents))):
        return False
    with outside_transforms():
        if not _loses(function, ctx, kept, [each if each is None else below_transforms(each) for each in cotangents]):
            return False
    _MET.pop(function, None)
    return True


def _loses(function: Any, ctx: Any, kept: Kept, cotangents: Sequence[Any]) -> bool:
    """Compare the graph of a slope with its differences, by what the Function keeps and by the cotangents."""
    seed = torch.Generator().manual_seed(0)
    probe = [normal_like(each, seed) for each in cotangents]
    draw = RandomState([*kept.values()], foreign=True)

    def at(points: Sequence[Tensor]) -> Tensor:
        rest = iter(points)
        others = {key: next(rest) for key in kept}
        with draw.replayed():
            given = [next(rest) if has_derivatives(each) else each for each in probe]
            return slope_elsewhere(function, ctx, others, given)

    for offset in OFFSETS:
        moved = [x.detach() + offset * (1 + x.detach().abs()) * normal_like(x, seed) for x in kept.values()]
        centre = [each.detach().requires_grad_() for each in (*moved, *filter(has_derivatives, probe))]
        steps = steps_at(centre, seed)
        aside = [
            [(x.detach() + s * h).requires_grad_() for x, h in zip(centre, steps, strict=True)]
            for s in (-1, 0, 1, -0.5, 0.5)
        ]
        with torch.enable_grad():
            try:
                slope, before, again, after, *near = map(at, (centre, *aside))
            except Exception:
                # A backward need not take other points, and its own errors at them are of no interest.
                return False
            change, half = (after - before).detach(), (near[1] - near[0]).detach()
            smooth = varies_smoothly(before.detach(), slope.detach(), again.detach(), after.detach())
            # A jump at the very point, such as that of a sign at 0, does not become smaller.
            smooth = smooth and bool((2 * half - change).norm() < 0.1 * change.norm())
            if smooth and not has_difference(before.detach(), after.detach(), slope, centre, steps):
                return True
    return False
