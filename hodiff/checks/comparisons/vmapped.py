"""Comparison of `torch.func.vmap` with a Python loop, and of compiled with eager code."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.judgement import exact, judge
from hodiff.checks.comparisons.scalar_problem import ScalarProblem, real_parts
from hodiff.checks.comparisons.scalarize import draw_normal
from hodiff.checks.oracles.compositions import derivative, route_names
from hodiff.checks.report.data import Entry
from hodiff.torch_internals.compilers.dynamo import compiled_code


def compile_checks(
    problem: ScalarProblem, order: int, size: float, backend: str, generator: torch.Generator
) -> Iterator[Entry]:
    """Compile the value and each first and second derivative; ``size`` is as in `vmap_checks`."""
    direction = draw_normal((len(problem.point),), generator).to(problem.point)
    cases = [(0, "value", problem.loss)]
    for k in range(1, min(order, 2) + 1):
        # Nested forward passes never compile, so a failure would be no finding about f.
        routes = [r for r in route_names(k) if r.count("forward") < 2]
        cases += [(k, r, _fixed(derivative(problem.loss, r), (direction,) * (k - 1))) for r in routes]
    for k, quantity, function in cases:
        torch.compiler.reset()
        compiled = torch.compile(function, backend=backend)
        with compiled_code(runs=True):
            outcome = attempt(compiled, problem.point)
        expected = attempt(function, problem.point)
        if isinstance(expected, Failure):
            yield Entry("compile", k, quantity, None, None, "skipped", expected.message)
            continue
        reference = exact(expected)
        yield judge("compile", k, quantity, outcome, reference, lower=size, eps=problem.eps)


def _fixed(function: Callable[..., Any], directions: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda t: function(t, *directions)


BATCH = 3
# Relative spread of the samples: small, so that points stay in the domain, but far above the tolerance.
SPREAD = 0.01
# Functions are deterministic, so random numbers come from a seed and are equal for all samples.
_vmap = partial(torch.func.vmap, randomness="same")
# Samples of further batches: a rule may support the usual sizes only.
_BATCHES = {
    "a batch of 1": torch.tensor([0], device="cpu"),
    "a batch of 40": torch.arange(40, device="cpu") % BATCH,
    "a batch of batches": torch.tensor([[0, 1, 2], [2, 0, 1]], device="cpu"),
}
# Elements above which a batch is skipped, to save memory.
_LARGE = 1 << 20


def vmap_checks(problem: ScalarProblem, order: int, size: float, generator: torch.Generator) -> Iterator[Entry]:
    """Compare values for each way to batch the inputs, then derivatives, of which `size` is the largest."""
    noise = [draw_normal((BATCH, *leaf.shape), generator).to(leaf) for leaf in problem.leaves]
    batches = [
        leaf + SPREAD * e * leaf.abs().where(leaf != 0, 1.0) for leaf, e in zip(problem.leaves, noise, strict=True)
    ]
    compare = partial(_compare, size, problem.eps)
    for quantity, in_dims in _layouts(problem.leaves):
        yield compare("vmap of values", 0, quantity, _flat(problem.function), problem.leaves, batches, in_dims)
    yield from _other_batches(problem, batches, size)

    t, directions = problem.point, draw_normal((BATCH, len(problem.point)), generator).to(problem.point)
    points = SPREAD * problem.step * draw_normal((BATCH, len(t)), generator).to(t)
    for k, name, function in _derivatives(problem, order):
        yield compare(f"vmap of {name}", k, "samples", function, (t, directions[0]), [points, directions], (0, None))
        yield compare(f"vmap of {name}", k, "directions", function, (t, t), [points, directions], (None, 0))


def _other_batches(problem: ScalarProblem, batches: list[Tensor], size: float) -> Iterator[Entry]:
    """Compare batches of one sample, of many samples and of batches with a loop."""
    function = _flat(problem.function)
    looped = attempt(lambda: torch.stack([function(*(b[i].clone() for b in batches)) for i in range(BATCH)]))
    if isinstance(looped, Failure) or not bool(looped.isfinite().all()):
        # The comparisons above report this.
        return
    elements = sum(leaf.numel() for leaf in problem.leaves)
    for quantity, index in _BATCHES.items():
        if index.numel() * elements > _LARGE:
            continue
        nested = _vmap(function) if index.dim() == 2 else function
        given = [b[index] for b in batches]
        outcome = attempt(lambda nested=nested, given=given: _vmap(nested)(*given))
        yield _judged("vmap of values", 0, quantity, outcome, looped[index], size, problem.eps)


def _derivatives(problem: ScalarProblem, order: int) -> Iterator[tuple[int, str, Callable[[Tensor, Tensor], Tensor]]]:
    """Yield derivatives as functions of a point and a direction; batches of either are compared."""
    yield 1, "tangents", lambda t, v: torch.func.jvp(problem.loss, (t,), (v,))[1]
    yield 1, "gradients", lambda t, v: torch.func.grad(problem.loss)(t) * v
    for route in ("reverse-over-reverse", "forward-over-reverse") if order > 1 else ():
        yield 2, route, derivative(problem.loss, route)


def _layouts(leaves: tuple[Tensor, ...]) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Yield in_dims of vmap: all inputs along the first axis, all along the last, and each input alone."""
    count = len(leaves)
    yield "all inputs", (0,) * count
    yield "last axis", (-1,) * count
    for i in range(count if count > 1 else 0):
        yield f"input {i} alone", tuple(0 if i == j else None for j in range(count))


def _compare(
    size: float,
    eps: float,
    route: str,
    order: int,
    quantity: str,
    function: Callable[..., Tensor],
    constants: tuple[Tensor, ...],
    batches: list[Tensor],
    in_dims: tuple[int | None, ...],
) -> Entry:
    """Compare vmap with a loop; batched inputs come from ``batches``, unbatched inputs from ``constants``."""

    def sample(index: int) -> list[Tensor]:
        # A function may write into its inputs.
        return [
            c.clone() if d is None else b[index].clone() for c, b, d in zip(constants, batches, in_dims, strict=True)
        ]

    def looped() -> Tensor:
        return torch.stack([function(*sample(i)) for i in range(BATCH)])

    def batched() -> Tensor:
        stacked = [
            c.clone() if d is None else b.clone().movedim(0, d)
            for c, b, d in zip(constants, batches, in_dims, strict=True)
        ]
        return _vmap(function, in_dims=in_dims)(*stacked)

    expected = attempt(looped)
    if isinstance(expected, Failure) or not bool(expected.isfinite().all()):
        detail = expected.message if isinstance(expected, Failure) else "not finite near the inputs"
        return Entry(route, order, quantity, None, None, "skipped", detail)
    return _judged(route, order, quantity, attempt(batched), expected, size, eps)


def _judged(route: str, order: int, quantity: str, outcome: Any, expected: Tensor, size: float, eps: float) -> Entry:
    if not isinstance(outcome, Failure) and outcome.shape != expected.shape:
        outcome = Failure(f"vmap gives shape {tuple(outcome.shape)}, a loop {tuple(expected.shape)}")
    return judge(route, order, quantity, outcome, exact(expected), lower=size, eps=eps)


def _flat(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *leaves: torch.cat([real_parts(y).reshape(-1) for y in function(*leaves)])
