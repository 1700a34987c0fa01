"""Probe that compares rules with differences of forward, in blocks: HD101, HD102, HD105, HD109, HD110."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, by_forward, by_reverse, of_derivatives
from hodiff.checks.probes.function_calls import ForwardRun, FunctionCall, as_tuple, cloned
from hodiff.checks.probes.repeated_calls import beside
from hodiff.checks.source_lines import rule_location

# Relative gap of two steps' differences that suggests a kink between the steps; then smaller steps are tried.
_APART = 1e-5
_SMALLER = (1 / 16, 1 / 256)
# Slopes below this part of the value are rounding.
_NOISE = 1e-6


def differences(
    call: FunctionCall, output: int, argument: int, cotangent: Tensor, basis: Tensor | None
) -> Tensor | None:
    """Return differences of one contracted output along a basis; None if forward or its float64 twin cannot run."""
    value = call.args[argument]
    if (value.dtype != torch.float64 and call.truth is None) or not value.numel():
        return None
    steps = torch.eye(value.numel(), dtype=torch.float64, device="cpu") if basis is None else basis
    size = float(value.abs().max()) if bool(value.isfinite().all()) else 1.0
    largest = 1e-3 * (size if 0 < size < 1e-3 else max(1e-3, size))

    def at(move: Tensor) -> Tensor:
        y = _outputs(call, argument, move)[output]
        y = y.double() if y.is_floating_point() else y
        return (y * cotangent.conj()).real.sum() if y.is_complex() else (y * cotangent).sum()

    centre = attempt(at, torch.zeros_like(steps[0]))
    for h in (largest, *(largest * shrink for shrink in _SMALLER)):
        found = attempt(_central, at, centre, steps, h)
        if isinstance(found, Failure):
            return None
        result, settles = found
        if settles:
            return result if bool(result.isfinite().all()) else None
    return None


def _central(at: Callable[[Tensor], Tensor], centre: Tensor, steps: Tensor, h: float) -> tuple[Tensor, bool]:
    """Return differences extrapolated from two steps, and whether the steps agree; NaN at a kink."""
    (right, left), (near_right, near_left) = (
        (torch.stack([at(s * step) for step in steps]), torch.stack([at(-s * step) for step in steps]))
        for s in (h, h / 2)
    )
    gaps = ((right + left - 2 * centre) / h, (near_right + near_left - 2 * centre) / (h / 2))
    if any(_is_kink(float(a), float(b)) for a, b in zip(*gaps, strict=True)):
        return torch.full_like(right, float("nan")), True
    coarse, fine = (right - left) / (2 * h), (near_right - near_left) / h
    size = max(float(fine.abs().max()), _NOISE * float(centre.abs()))
    return ((4 * fine - coarse) / 3).double(), not float((fine - coarse).abs().max()) > _APART * size


def _outputs(call: FunctionCall, argument: int, move: Tensor) -> tuple[Any, ...]:
    moved = call.args[argument].double() + move.reshape(call.args[argument].shape)
    if call.truth is None:
        return call.fresh().at({argument: moved}).run().outputs
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.args]
    with torch.no_grad():
        return as_tuple(call.truth(*wide[:argument], moved, *wide[argument + 1 :]))


def _is_kink(coarse: float, fine: float) -> bool:
    """Whether the gap between one-sided slopes stays as the step is halved; for smooth functions, it is halved."""
    return abs(fine) > 0.8 * abs(coarse) and abs(fine) > 1e-6


# Relative error of a wrong rule; extrapolated differences of two steps have some ten correct digits.
WRONG = 1e-5
# Beyond this many elements of an argument, differences are taken along random directions.
ELEMENTS = 64
DIRECTIONS = 3


@dataclass(frozen=True)
class Block:
    """Derivative of one output by one argument, contracted with one cotangent.

    Attributes:
        output: Index of the output.
        argument: Index of the argument.
        truth: The derivative by differences, along elements of the argument or directions in it.
        claimed: The derivative by backward, likewise; zero if backward returns None; None if it cannot be compared.
        incoming: The cotangent.
        gradient: The value that backward returned for the argument.
        size: The largest derivative of the output.
        tolerance: The error, relative to the size, above which the block is wrong.
    """

    output: int
    argument: int
    truth: Tensor
    claimed: Tensor | None
    incoming: Tensor
    gradient: Any
    size: float
    tolerance: float = WRONG

    @property
    def error(self) -> float:
        """Error of backward, relative to the largest derivative of the output."""
        if self.claimed is None:
            return 0.0
        error = float((self.claimed - self.truth).abs().max()) / max(self.size, 1e-300)
        return error if error == error else 0.0

    @property
    def wrong(self) -> bool:
        """Whether backward and differences disagree."""
        return self.claimed is not None and self.error > self.tolerance


def first_order(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Compare backward and jvp with differences of forward."""
    ran = call.fresh().run()
    blocks = blocks_of(call, generator)
    bad = [block for block in blocks if block.wrong]
    tolerance = tolerance_of(call)
    pushed: Any = attempt(partial(_tangent_errors, call, generator)) if call.has_jvp else Failure("")
    forward_wrong = not isinstance(pushed, Failure) and pushed[0] > tolerance
    consistent = forward_wrong and not isinstance(pushed, Failure) and pushed[1] <= tolerance
    causes = list(_backward_causes(call, ran, blocks, bad, consistent)) if bad else []
    if forward_wrong and not (bad and consistent):
        location = rule_location(call.function, "jvp")
        evidence = (f"jvp of {call.name} differs from differences of forward by {pushed[0]:.1e}, relative",)
        causes.append(Cause("HD102", evidence, by_forward, location, needs_symptom=True))
    return causes


def first_order_beside(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Compare backward with differences at a nearby point, where a rule that caches its first slope is wrong."""
    bad = [block for block in blocks_of(beside(call), generator, elements=0) if block.wrong]
    evidence = (*(f"beside the inputs {_ratio(call, block)}" for block in bad),)
    location = rule_location(call.function, "backward", "vjp")
    # A rule that depends on earlier calls may spoil every derivative.
    return [Cause("HD101", evidence[:1], of_derivatives, location, needs_symptom=True)] if bad else []


def blocks_of(call: FunctionCall, generator: torch.Generator, elements: int = ELEMENTS) -> list[Block]:
    """Return a block for every pair of output and argument; large arguments are moved in random directions."""
    ran = call.fresh().run()
    found = []
    for k in range(len(ran.outputs)):
        if not ran.differentiable(k) or not ran.outputs[k].numel():
            continue
        cotangents = ran.cotangents(generator, only=k)
        with torch.no_grad():
            gradients = call.fresh().run().pull(cloned(cotangents))
        group = []
        for i in call.moves():
            basis = _basis(call.args[i], generator, elements)
            truth = differences(call, k, i, cotangents[k], basis)
            if truth is None:
                continue
            # A missing gradient has its own finding.
            gradient = gradients[i] if i < len(gradients) else None
            claimed = _projected(gradient, call.args[i], basis) if i < len(gradients) else None
            group.append((i, truth, claimed, gradient))
        size = max((float(truth.abs().max()) for _, truth, _, _ in group), default=0.0)
        size = max([size] + [float(c.abs().max()) for _, _, c, _ in group if c is not None])
        found += [
            Block(k, i, truth, claimed, cotangents[k], g, size, tolerance_of(call)) for i, truth, claimed, g in group
        ]
    return found


def tolerance_of(call: FunctionCall) -> float:
    """Return the tolerated error of a rule: half of the digits in low precision."""
    return max(WRONG, call.eps**0.5)


def _basis(value: Tensor, generator: torch.Generator, elements: int) -> Tensor | None:
    if value.numel() <= elements:
        return None
    return torch.randn(DIRECTIONS, value.numel(), generator=generator, dtype=torch.float64, device=generator.device)


def _projected(gradient: Any, value: Tensor, basis: Tensor | None) -> Tensor | None:
    if gradient is None:
        flat = torch.zeros(value.numel(), dtype=torch.float64, device="cpu")
    elif not isinstance(gradient, Tensor):
        return None
    elif gradient.shape != value.shape:
        # Torch reduces a broadcast gradient itself; the shape has its own finding.
        reduced = attempt(lambda: gradient.sum_to_size(value.shape))
        if isinstance(reduced, Failure):
            return None
        flat = reduced.double().reshape(-1)
    else:
        flat = gradient.detach().double().reshape(-1)
    return flat if basis is None else basis @ flat


def _tangent_errors(call: FunctionCall, generator: torch.Generator) -> tuple[float, float]:
    """Return the relative errors of jvp from differences, and from the transpose of backward."""
    ran = call.fresh().run()
    tangents = ran.tangents(generator)
    with torch.no_grad():
        pushed = call.fresh().run().push(cloned(tangents))
    worst, transposed, size = 0.0, 0.0, 0.0
    for k in range(len(ran.outputs)):
        if not ran.differentiable(k) or not ran.outputs[k].numel():
            continue
        cotangent = ran.cotangents(generator, only=k)
        truths, pulls = 0.0, 0.0
        with torch.no_grad():
            gradients = call.fresh().run().pull(cloned(cotangent))
        for i in call.moves():
            along = tangents[i].double().reshape(1, -1)
            truth = differences(call, k, i, cotangent[k], along)
            if truth is None:
                return 0.0, 0.0
            truths += float(truth)
            claimed = _projected(gradients[i] if i < len(gradients) else None, call.args[i], along)
            pulls += float(claimed) if claimed is not None else float("nan")
        dy = pushed[k] if k < len(pushed) and isinstance(pushed[k], Tensor) else torch.zeros_like(ran.outputs[k])
        claimed_dy = float((dy * cotangent[k].conj()).sum().real)
        size = max(size, abs(truths), abs(claimed_dy))
        worst, transposed = max(worst, abs(claimed_dy - truths)), max(transposed, abs(claimed_dy - pulls))
    return worst / max(size, 1e-300), transposed / max(size, 1e-300)


Test = Callable[[FunctionCall, ForwardRun, list[Block], Block], str]


def _goes_through(call: FunctionCall, ran: ForwardRun, blocks: list[Block], block: Block) -> str:
    if not isinstance(block.gradient, Tensor) or block.gradient.shape != block.incoming.shape:
        return ""
    if not torch.equal(block.gradient, block.incoming):
        return ""
    return f"backward returns the incoming gradient itself for {call.argument(block.argument)}"


def _ignores_mask(call: FunctionCall, ran: ForwardRun, blocks: list[Block], block: Block) -> str:
    """Return evidence if the gradient is right where forward depends on the element, but not zero elsewhere."""
    if block.claimed is None or block.truth.numel() != call.args[block.argument].numel():
        return ""
    dead = block.truth.abs() <= 1e-9 * block.size
    alive = ~dead
    if not bool(dead.any()) or not bool(alive.any()):
        return ""
    agree = float((block.claimed - block.truth)[alive].abs().max()) <= block.tolerance * block.size
    passes = int((block.claimed[dead].abs() > block.tolerance * block.size).sum())
    if not agree or not passes:
        return ""
    where = int((dead & (block.claimed.abs() > block.tolerance * block.size)).nonzero()[0])
    return (
        f"the gradient of {call.argument(block.argument)} is {float(block.claimed[where]):.2g} at element {where}, "
        f"where forward does not depend on it ({passes} such elements)"
    )


def _ignores_output(call: FunctionCall, ran: ForwardRun, blocks: list[Block], block: Block) -> str:
    """Return evidence if backward uses the gradient of another output, but not of this output."""
    mine = [b for b in blocks if b.output == block.output]
    others = [b for b in blocks if b.output != block.output]
    unserved = all(b.claimed is not None and not bool(b.claimed.any()) for b in mine)
    served = any(b.claimed is not None and bool(b.claimed.any()) for b in others)
    if not unserved or not served:
        return ""
    return (
        f"output {block.output} depends on {call.argument(block.argument)}, and its incoming gradient changes nothing"
    )


# The first test that holds names the defect.
_SPECIAL: tuple[tuple[str, Test], ...] = (
    ("HD105", _ignores_output),
    ("HD110", _ignores_mask),
    ("HD109", _goes_through),
)


def _backward_causes(
    call: FunctionCall, ran: ForwardRun, blocks: list[Block], bad: list[Block], consistent: bool
) -> list[Cause]:
    named: dict[str, list[str]] = {}
    for block in bad:
        for code, test in _SPECIAL:
            if evidence := test(call, ran, blocks, block):
                named.setdefault(code, []).append(evidence)
                break
        else:
            named.setdefault("HD101", []).append(_ratio(call, block))
    location = rule_location(call.function, "backward", "vjp")

    def explains(entry: Any) -> bool:
        return by_reverse(entry) or (consistent and by_forward(entry))

    return [
        Cause(code, tuple(dict.fromkeys(evidence)), explains, location, needs_symptom=True)
        for code, evidence in named.items()
    ]


def _ratio(call: FunctionCall, block: Block) -> str:
    assert block.claimed is not None
    name = f"the gradient of {call.argument(block.argument)} in {call.name}"
    if not bool(block.claimed.any()):
        return f"{name} is zero"
    seen = block.truth.abs() > 1e-6 * block.size
    ratios = (block.claimed / block.truth)[seen]
    if ratios.numel() and float((ratios - ratios[0]).abs().max()) <= block.tolerance * float(ratios[0].abs()):
        factor = float(ratios[0])
        kind = "has the wrong sign" if abs(factor + 1) < block.tolerance else f"is {factor:.6g} times the derivative"
        return f"{name} {kind}"
    return f"{name} is off by {block.error:.1e}, relative"
