"""Inner loop of meta-learning: some steps of an optimizer as a differentiable function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from hodiff.common.options import require_bools, require_callable, require_choice, require_generator, require_int
from hodiff.common.randomness import drawn_seed, seeded
from hodiff.common.trees import PyTree, flatten_primals, recordable
from hodiff.derivatives.bound_function import at_the_boundary
from hodiff.errors import InputError
from hodiff.meta.inner_gradients import (
    Gradient,
    InnerLoss,
    Loss,
    clipped,
    constant_gradient,
    detached,
    mixed_gradient,
    require_norm,
    reverse_gradient,
)
from hodiff.meta.nonfinite import all_finite, explain
from hodiff.meta.optimizer import Optimizer, OptimizerState, require_optimizer
from hodiff.recompute.checkpoint import checkpoint as recomputed
from hodiff.recompute.surroundings import Surroundings
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode

# Parameters, the optimizer's state, and buffers.
Point = tuple[PyTree, OptimizerState, PyTree]


@dataclass(eq=False)
class Loop:
    """Operations of each step; `clip` is a norm, a function of gradients, or None."""

    loss: Loss
    gradient: Callable[..., Gradient]
    optimizer: Optimizer
    clip: Any

    def step(self, point: Point, batch: PyTree) -> tuple[Point, Tensor, PyTree]:
        """Return the next point, the loss, and the gradients that the optimizer gets."""
        params, state, buffers = point
        leaves, spec = pytree.tree_flatten(params)
        value, gradients, buffers = self.gradient(self.loss, leaves, batch, buffers)
        if self.clip is not None and not callable(self.clip):
            gradients = clipped(gradients, self.clip)
        tree = pytree.tree_unflatten(gradients, spec)
        if callable(self.clip):
            tree = self.clip(tree)
        params, state = self.optimizer.update(tree, state, params)
        return (params, state, buffers), value.detach(), tree

    def run(self, point: Point, batches: Sequence[PyTree]) -> tuple[Point, list[Tensor]]:
        """Take some steps; return the last point and the losses."""
        losses = []
        for batch in batches:
            point, value, _ = self.step(point, batch)
            losses.append(value)
        return point, losses

    def run_recomputed(self, point: Point, batches: Sequence[PyTree]) -> tuple[Point, list[Tensor]]:
        """Take some steps, storing only the ends."""
        return recomputed(self.run, point, batches)

    def run_constant(self, point: Point, batches: Sequence[PyTree]) -> tuple[Point, list[Tensor]]:
        """Take some steps without a graph; the parameters count as their start plus a constant."""
        start, _, _ = point
        constant = Loop(self.loss, constant_gradient, self.optimizer, self.clip)
        with torch.no_grad():
            point, losses = constant.run(detached(point), batches)
        params, state, buffers = detached(point)
        # The added difference has value zero and derivative one.
        params = pytree.tree_map(lambda end, begin: end + (begin - begin.detach()), params, start)
        return (params, state, buffers), losses


def segments(steps: int, constant: int, checkpoint: int | None) -> Iterator[tuple[int, int, str]]:
    """Iterate over start, stop and `Loop` method of each segment; `constant` steps come first."""
    if constant:
        yield 0, constant, "run_constant"
    length = checkpoint or 1
    for start in range(constant, steps, length):
        yield start, min(start + length, steps), "run_recomputed" if checkpoint else "run"


def batch_source(task: Any, steps: int) -> Callable[[int], Any]:
    """Return a function from the step, counted from 0, to its batch; it raises if the task has no more batches."""
    if callable(task):
        return task
    if isinstance(task, (Tensor, tuple, list, dict, str)) or not isinstance(task, Iterable):
        return lambda _: task
    iterator = iter(task)

    def following(step: int) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            raise InputError(
                f"adapt: task: expected {steps} batches, one for each step, got {step}; pass fewer steps, or "
                "itertools.cycle(task)."
            ) from None

    return following


GRADIENTS: dict[str, Callable[..., Gradient]] = {
    "auto": reverse_gradient,
    "reverse-over-reverse": reverse_gradient,
    "forward-over-reverse": mixed_gradient,
}


class Adaptation(NamedTuple):
    """Result of an inner loop: `params, state, buffers, losses = adapt(..., history=True)`.

    Attributes:
        params: Adapted parameters.
        state: State of the optimizer.
        buffers: Buffers after the last step, without a graph; `()` if there were none.
        losses: Loss before each step (steps,), without a graph.
    """

    params: PyTree
    state: OptimizerState
    buffers: PyTree
    losses: Tensor


@at_the_boundary
def adapt(
    loss: Callable[..., Any],
    params: PyTree,
    task: Any,
    optimizer: Optimizer,
    steps: int,
    *,
    state: OptimizerState | None = None,
    buffers: PyTree = None,
    first_order: bool = False,
    checkpoint: int | None = None,
    truncate: int | None = None,
    clip: float | Tensor | Callable[[PyTree], PyTree] | None = None,
    route: str = "auto",
    generator: torch.Generator | None = None,
    check_finite: bool = True,
    correct: bool = True,
    history: bool = False,
    progress: bool = False,
) -> Any:
    r"""Take steps of an optimizer on an inner loss; the result is differentiable to any order.

    $$ \theta_{t+1} = U_t(\theta_t, \nabla_\theta L(\theta_t, B_t)), \qquad t = 0, \dots, T - 1; \qquad
       \theta_T = \theta_T(\theta_0, \phi) $$

    in $\theta_0$ and in everything else $\phi$ that requires a gradient: tensors that the loss closes over, batches,
    settings of the optimizer. It supports `.backward()`, `torch.func` transforms and compiled code. A parameter that
    the loss does not use has gradient zero. Under `torch.no_grad()` no graph is kept.

    Args:
        loss: `loss(params, batch)` that returns a tensor of shape `()`; with `buffers`, `loss(params, batch, buffers)`
            that returns `(value, buffers)`.
        params: Start: a tensor or pytree of real floating-point tensors.
        task: Batch of every step (a tensor, tuple, list, dict or None); or a callable of the step, counted from 0; or
            an iterable with a batch for each step.
        optimizer: A functional optimizer of `hodiff.meta`.
        steps: Number of steps $T$.
        state: State with which the optimizer continues; by default `optimizer.init(params)`.
        buffers: Pytree that the loss carries from step to step without derivatives, such as running statistics. The
            loss gets a copy that it may change in place.
        first_order: Whether gradients count as constants. $\partial \theta_{t+1} / \partial \theta_t$ is then that of
            $U_t$ in its first argument, which is the identity for `SGD` without weight decay.
        checkpoint: Keep only every k-th state and recompute the steps between, for derivatives of any order; about
            $\sqrt T$ needs least memory. Random numbers are replayed.
        truncate: Differentiate the last k steps only. Earlier steps are constants, except that $\theta_{T-k}$ counts as
            $\theta_0$ plus a constant.
        clip: Largest norm of all gradients of a step together, clipped like `torch.nn.utils.clip_grad_norm_`, but
            differentiably; or a function from gradients to gradients.
        route: Differentiation of the gradient: "reverse-over-reverse"; "forward-over-reverse", which stores the
            parameters of each step and nothing of the gradient's computation; or "auto", which is
            "reverse-over-reverse". It was as fast or faster on all networks that we measured (docs/guides/meta.md).
        generator: Seeds the random numbers that the loss draws; the global state is then unchanged.
        check_finite: Whether to raise on numbers that are not finite. This keeps the batches until the end.
        correct: Whether hodiff's rules replace torch's wrong and missing derivatives in the loss.
        history: Whether to return an `Adaptation` instead of the parameters.
        progress: Whether to show a progress bar.

    Returns:
        The adapted parameters with the structure of `params`, or an `Adaptation`.

    Raises:
        InputError: If an argument is invalid, the loss is no real number or does not depend on the parameters, or the
            task ends early.
        NonFiniteError: If a loss, gradient or parameter is not finite; the message names it and the step.
        RouteError: If the derivative of the gradient does not exist.

    Example:
        >>> import torch
        >>> from hodiff.meta import SGD, adapt
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> adapted = adapt(lambda w, batch: (w - batch) ** 2, w, torch.tensor(1.0), SGD(0.25), steps=3)
        >>> adapted
        tensor(1.1250, grad_fn=...)
        >>> torch.autograd.grad(adapted, w)[0]
        tensor(0.1250)

    Source: C. Finn, P. Abbeel, S. Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", 2017,
    eq. 1; truncation: A. Shaban et al., "Truncated back-propagation for bilevel optimization", 2019, section 3; the
    mixed route: I. Kemaev et al., "Scalable meta-learning via mixed-mode differentiation", 2025, section 3.
    """
    switches = {"first_order": first_order, "check_finite": check_finite, "correct": correct}
    require_bools("adapt", **switches, history=history, progress=progress)
    require_generator("adapt", "generator", generator)
    leaves, spec = _validate(loss, params, optimizer, steps, checkpoint, truncate, clip, route)
    gradient = constant_gradient if first_order else GRADIENTS[route]
    again = not first_order and (torch.is_grad_enabled() or not only_reverse_mode())
    bound = InnerLoss(loss, spec, buffers is not None, correct, again)
    loop = Loop(bound, gradient, optimizer, clip)
    source = batch_source(task, steps)
    params = pytree.tree_map(recordable, params)
    start: Point = (params, optimizer.init(params) if state is None else state, () if buffers is None else buffers)
    point, losses, batches = start, [], []
    constant = 0 if truncate is None else max(0, steps - truncate)
    # torch.compile does not trace progress bars.
    bar = tqdm(total=steps, unit=" steps") if progress else None
    with nullcontext() if generator is None else seeded(drawn_seed(generator), leaves):
        replay = Surroundings(leaves) if check_finite and not torch.compiler.is_compiling() else None
        for first, stop, method in segments(steps, constant, checkpoint):
            segment = [pytree.tree_map_only(Tensor, recordable, source(step)) for step in range(first, stop)]
            point, values = getattr(loop, method)(point, segment)
            losses += values
            batches += segment if replay else []
            if bar is not None:
                bar.update(stop - first)
        if replay and not all_finite((point[0], losses)):
            with replay.restored(), torch.no_grad():
                explain(replace(loop, gradient=constant_gradient).step, detached(start), batches)
    if bar is not None:
        bar.close()
    if not history:
        return point[0]
    return Adaptation(*point, torch.stack(losses) if losses else leaves[0].new_zeros(0))


def _validate(
    loss: Any, params: Any, optimizer: Any, steps: Any, checkpoint: Any, truncate: Any, clip: Any, route: Any
) -> tuple[tuple[Tensor, ...], pytree.TreeSpec]:
    require_callable("adapt", loss=loss)
    require_optimizer("adapt", optimizer)
    require_int("adapt", "steps", steps, 0)
    require_int("adapt", "checkpoint", checkpoint, 1, optional=True)
    require_int("adapt", "truncate", truncate, 0, optional=True)
    if not callable(clip):
        require_norm("adapt", "clip", clip, wanted="a positive norm, a function or None")
    require_choice("adapt", "route", route, GRADIENTS)
    return flatten_primals(params, "adapt", "params")
