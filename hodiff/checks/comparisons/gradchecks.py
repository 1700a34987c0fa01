"""Comparison by `torch.autograd.gradcheck` and `gradgradcheck`, one switch at a time, with forward mode on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from hodiff.checks.attempts import attempt, first_line
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.report.data import Entry
from hodiff.common.randomness import seeded
from hodiff.torch_internals.wording import Wording, says

_BATCH = 3
_TOLERANCE = 1e-8

LeavesFunction = Callable[..., tuple[Tensor, ...]]


def batches_well(function: LeavesFunction, point: tuple[Tensor, ...], order: int) -> bool:
    """Whether gradients (or at order 2, their gradients) in a batch equal single gradients."""

    def agree() -> bool:
        differentiated, at = function, point
        for _ in range(order):
            incoming = tuple(torch.ones_like(y) for y in differentiated(*at))
            differentiated, constants, at = _pullback(differentiated, len(at)), at, (*at, *incoming)
        batch = [torch.stack([(1.0 + i) * u + i for i in range(_BATCH)]) for u in incoming]
        dims = (*(None for _ in constants), *(0 for _ in batch))
        together = torch.func.vmap(differentiated, in_dims=dims, randomness="same")(*constants, *batch)
        single = [differentiated(*constants, *(b[i] for b in batch)) for i in range(_BATCH)]
        pairs = zip(together, (torch.stack(each) for each in zip(*single, strict=True)), strict=True)
        return all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in pairs)

    return attempt(agree) is True


def _pullback(function: LeavesFunction, count: int) -> LeavesFunction:
    """Return the gradient as a function of the first `count` arguments and the incoming gradients."""

    def pulled(*given: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.func.vjp(function, *given[:count])[1](given[count:])
        return gradients

    return pulled


# Forward-mode checks are off by default in torch, and a wrong rule fails only its own switch.
_OFF = {
    gradcheck: {"check_backward_ad": True, "check_forward_ad": False},
    gradgradcheck: {"check_rev_over_rev": True, "check_fwd_over_rev": False},
}
_ALL = {
    gradcheck: {"check_backward_ad": True, "check_forward_ad": True},
    gradgradcheck: {"check_rev_over_rev": True, "check_fwd_over_rev": True},
}
# Undefined gradients can only be checked together with reverse-over-reverse.
_FORWARD_OVER_REVERSE = {"check_rev_over_rev": False, "check_fwd_over_rev": True, "check_undefined_grad": False}
# check_batched_forward_grad is omitted: it fails for torch.dot, though torch.func.vmap of its jvp is right.
# check, order, quantity, switches, whether the switch is about vmap
_SWITCHES: tuple[tuple[Callable[..., bool], int, str, dict[str, bool], bool], ...] = (
    (gradcheck, 1, "reverse", {}, False),
    (gradcheck, 1, "forward", {"check_backward_ad": False, "check_forward_ad": True}, False),
    (gradcheck, 1, "batched reverse", {"check_batched_grad": True}, True),
    (gradgradcheck, 2, "reverse-over-reverse", {}, False),
    (gradgradcheck, 2, "forward-over-reverse", _FORWARD_OVER_REVERSE, False),
    (gradgradcheck, 2, "batched reverse", {"check_batched_grad": True}, True),
)
# gradcheck builds the whole Jacobian, inputs by outputs; beyond this many elements it projects it instead.
_DENSE = 400
# gradcheck's absolute step is too large for numbers below the first bound, and lost to rounding above the second.
_SMALL, _LARGE = 1e-3, 1e3


def gradchecks(problem: ScalarProblem, order: int, vmap: bool, seed: int, unit: float | None = None) -> Iterator[Entry]:
    """Run all switches together; if that fails, run them one by one, so that every failure names its switch."""
    # A function may write into its inputs.
    outputs = problem.function(*(leaf.clone() for leaf in problem.leaves))
    sizes = [float(y.detach().abs().max()) if y.numel() else 0.0 for y in outputs]
    size = max((s for s in sizes if 0 < s < float("inf")), default=1.0)
    inputs = sum(leaf.numel() for leaf in problem.leaves)
    fast = inputs * sum(u.numel() for u in problem.cotangents) > _DENSE

    def scaled(*leaves: Tensor) -> tuple[Tensor, ...]:
        """Scale the outputs to size one, as gradcheck's tolerances are absolute."""
        return tuple(y / size for y in problem.function(*leaves))

    units = tuple(_unit(leaf) if unit is None else torch.full_like(leaf, unit) for leaf in problem.leaves)

    def resized(*leaves: Tensor) -> tuple[Tensor, ...]:
        """Scale the inputs to size one, as gradcheck's step is absolute."""
        return scaled(*(leaf * unit for leaf, unit in zip(leaves, units, strict=True)))

    small = tuple(leaf / unit for leaf, unit in zip(problem.leaves, units, strict=True))

    def run(check: Callable[..., Any], switches: dict[str, bool]) -> str:
        detail = _run(check, scaled, problem.leaves, switches, seed)
        if detail.startswith("GradcheckError") and any(bool((unit != 1).any()) for unit in units):
            return _run(check, resized, small, switches, seed)
        return detail

    for check, k in ((gradcheck, 1), (gradgradcheck, 2)):
        rows = [row for row in _SWITCHES if row[0] is check and k <= order and (vmap or not row[-1])]
        together = {**_ALL[check], "check_batched_grad": vmap, "fast_mode": fast}
        # Passing with all switches on implies passing every switch, at a third of the cost.
        passes = bool(rows) and not run(check, together)
        for _, _, quantity, switches, _ in rows:
            switches = {**_OFF[check], **switches, "fast_mode": fast}
            detail = "" if passes else run(check, switches)
            status = "fails" if detail else "ok"
            old = quantity.startswith("batched") and says(detail, Wording.BATCHING)
            if old and batches_well(problem.function, problem.leaves, k):
                status, detail = "skipped", f"torch.func.vmap is right where gradcheck says: {detail}"
            elif says(detail, Wording.NESTED_DUAL_LEVELS) and _pushes_forward_itself(problem, seed):
                status, detail = "skipped", f"torch.func goes where torch.autograd.forward_ad says: {detail}"
            yield Entry(check.__name__, k, quantity, None, None, status, detail)


def _pushes_forward_itself(problem: ScalarProblem, seed: int) -> bool:
    """Whether the function, or the jvp of a Function in it, uses forward mode, which fails within a dual level."""
    leaves = [leaf.detach().clone() for leaf in problem.leaves]
    with seeded(seed, leaves), torch.no_grad(), forward_ad.dual_level():
        try:
            problem.function(*(forward_ad.make_dual(leaf, torch.ones_like(leaf)) for leaf in leaves))
        except RuntimeError as error:
            return says(error, Wording.NESTED_DUAL_LEVELS)
    return False


def _unit(leaf: Tensor) -> Tensor:
    """Return powers of two near the sizes of very small and very large elements; 1 for other elements."""
    sizes = leaf.detach().abs()
    extreme = ((sizes > 0) & (sizes < _SMALL)) | (sizes > _LARGE)
    return torch.where(extreme, sizes, 1.0).log2().floor().exp2()


def _run(
    check: Callable[..., Any],
    f: Callable[..., Any],
    point: tuple[Tensor, ...],
    switches: dict[str, bool],
    seed: int,
) -> str:
    """Return the first line of the check's error, empty if it passed; restore random states."""
    leaves = tuple(leaf.clone().requires_grad_() for leaf in point)
    with seeded(seed, leaves):
        try:
            check(f, leaves, **switches)
        except Exception as error:
            return first_line(error)
    return ""
