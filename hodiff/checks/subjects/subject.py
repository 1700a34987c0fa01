"""Problems of a few numbers, from a call of a module or torch function, whose routes can be compared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.order_by_order import Level, Loss, against_differences, any_raises, between_routes, climb
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import draw_normal, scalarize
from hodiff.checks.report.data import Entry
from hodiff.checks.subjects.module_calls import ModuleCall
from hodiff.checks.subjects.setting import Setting
from hodiff.common.complex_numbers import as_real
from hodiff.common.randomness import RandomState
from hodiff.common.trees import has_strides, tensors_in
from hodiff.errors import InputError

_PLAIN = Setting()
# Two directions suffice, as every direction moves all numbers; a search, which checks many parts, takes one.
_DIRECTIONS = 2


@dataclass(frozen=True)
class Subject:
    """Function of tensors, and the tensors that it is differentiated by.

    Attributes:
        function: Takes ``inputs`` and returns a list of tensors.
        inputs: Pytrees of floating tensors.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]

    def of_leaves(self) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        """Return the function of the leaves of its inputs, and the leaves."""
        leaves, structure = tree_flatten(self.inputs)
        return lambda *moving: self.function(*tree_unflatten(list(moving), structure)), tuple(leaves)


def subject_of_call(
    call: ModuleCall, loss: Callable[[Any], Tensor] | None = None, wrt: str = "both", fixed: Collection[int] = ()
) -> Subject:
    """Return a call as a function of its free parameters and of the floating inputs that are not fixed."""
    own = dict(call.module.named_parameters())
    moving = own if wrt != "inputs" else {}
    free = {name: each.detach() for name, each in moving.items() if each.requires_grad and is_free(each)}
    frozen = {name: each.detach() for name, each in own.items() if name not in free}
    padding = {name: row for name, row in padding_rows(call.module).items() if name in free}

    def run(reals: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        parameters = {name: _like(real, free[name]) for name, real in reals.items()}
        held = {name: _with_row(parameters[name], row, free[name]) for name, row in padding.items()}
        output = call.run(args, kwargs, {**frozen, **parameters, **held})
        return tensors_in(output) if loss is None else loss(output)

    still = range(len(call.args)) if wrt == "parameters" else fixed
    return _split(
        run, {name: as_real(each) for name, each in free.items()}, (call.args, call.kwargs), still, call.setting
    )


def padding_rows(module: nn.Module) -> dict[str, int]:
    """Return the padding rows of embeddings, which are constants, by the names of the parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(each.weight)]: each.padding_idx
        for each in module.modules()
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag))
        and each.padding_idx is not None
        and id(each.weight) in names
    }


def _with_row(weight: Tensor, row: int, constant: Tensor) -> Tensor:
    here = torch.arange(len(constant), device=constant.device)[:, None] == row % len(constant)
    return torch.where(here, constant, weight)


def subject_of_loss(loss: Callable[[Any], Tensor], call: ModuleCall) -> Subject:
    """Return a loss as a function of the floating tensors in a call's output."""
    return _split(lambda _, outputs, kwargs: loss(*outputs), {}, ((call.output,), {}))


# Arguments of normalizations that are buffers, which torch does not differentiate by.
_BUFFERS = frozenset({"running_mean", "running_var"})


def subject_of_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Subject:
    """Return a torch function as a function of its floating arguments, except buffers."""
    setting = Setting(random=RandomState((), foreign=True))
    buffers = {name: kwargs[name] for name in _BUFFERS & kwargs.keys()}
    signature = attempt(inspect.signature, function)
    names = () if isinstance(signature, Failure) else tuple(signature.parameters)

    def run(_: Any, args: Any, kwargs: Any) -> Any:
        with setting.entered():
            return tensors_in(function(*args, **kwargs, **setting.copied(buffers)))

    fixed = [i for i, name in enumerate(names[: len(args)]) if name in _BUFFERS]
    others = {name: each for name, each in kwargs.items() if name not in buffers}
    return _split(run, {}, (args, others), fixed)


@dataclass(frozen=True)
class Comparison:
    """Result of comparing all routes.

    Attributes:
        problem: The function at its point.
        loss: The loss that was differentiated.
        levels: Its derivatives, order by order.
        entries: The comparisons.
    """

    problem: ScalarProblem
    loss: Loss
    levels: Sequence[Level]
    entries: tuple[Entry, ...] = ()


def problem_of(subject: Subject, generator: torch.Generator, directions: int = _DIRECTIONS) -> ScalarProblem:
    """Restrict the subject to random directions that move each tensor in proportion to its size."""
    if not tensors_in(subject.inputs):
        raise InputError(
            "check: inputs: expected a parameter that requires grad, or a floating-point input, got neither. Call "
            "module.requires_grad_(), or change wrt and fixed."
        )
    return _in_proportion(scalarize(subject.function, subject.inputs, generator), generator, directions)


def compare_routes(
    subject: Subject, order: int, seed: int, *, curved: bool, directions: int = _DIRECTIONS
) -> Comparison:
    """Compare all routes along random directions with differences and with each other."""
    generator = torch.Generator().manual_seed(seed)
    problem = problem_of(subject, generator, directions)
    rounding = attempt(problem.rounding)
    if not isinstance(rounding, Failure):
        problem = replace(problem, eps=max(problem.eps, rounding))
    loss = problem.curved_loss if curved else problem.loss
    levels = climb(problem, loss, order, generator, by_differences=False)
    entries = (*against_differences(levels, order), *between_routes(levels))
    return Comparison(problem, loss, levels, entries)


def failures(subject: Subject, order: int, seed: int) -> tuple[Entry, ...]:
    """Return the failed comparisons; none if the subject has no floating numbers or does not run alone."""
    comparison = attempt(lambda: compare_routes(subject, order, seed, curved=True, directions=1))
    return () if isinstance(comparison, Failure) else tuple(each for each in comparison.entries if each.failed)


def raises(subject: Subject, order: int, seed: int) -> bool:
    """Whether a route raises, which takes a tenth of the time of comparing all routes with differences."""
    generator = torch.Generator().manual_seed(seed)

    def by_any_route() -> bool:
        problem = problem_of(subject, generator)
        return any_raises(problem, problem.curved_loss, order, generator)

    return attempt(by_any_route) is True


def is_coarse(subject: Subject) -> bool:
    """Whether the subject computes in a lower precision inside than float64."""
    generator = torch.Generator().manual_seed(0)
    rounding = attempt(lambda: problem_of(subject, generator).rounding())
    return not isinstance(rounding, Failure) and rounding > torch.finfo(torch.float64).eps


def is_free(leaf: Any) -> bool:
    """Whether the leaf can be differentiated by: a floating or complex tensor with some finite elements."""
    if not isinstance(leaf, Tensor) or not has_strides(leaf) or not (leaf.is_floating_point() or leaf.is_complex()):
        return False
    return leaf.numel() > 0 and bool(leaf.isfinite().any())


def _like(real: Tensor, tensor: Tensor) -> Tensor:
    """Invert `as_real`."""
    return torch.view_as_complex(real) if tensor.is_complex() else real


def _split(
    run: Callable[[Any, Any, Any], Any],
    parameters: dict[str, Tensor],
    inputs: tuple[Any, Any],
    fixed: Collection[int] = (),
    setting: Setting = _PLAIN,
) -> Subject:
    leaves, structure = tree_flatten(inputs)
    args, kwargs = inputs
    # Leaves of positional arguments come first, as in `leaves`.
    moves = [is_free(leaf) and i not in fixed for i, each in enumerate(args) for leaf in tree_leaves(each)]
    moves += map(is_free, tree_leaves(kwargs))
    places = [i for i, one in enumerate(moves) if one]

    def function(parameters: dict[str, Tensor], *moving: Tensor) -> Any:
        # Writes in place must not be seen by the next call.
        filled = setting.copied(leaves)
        for place, leaf in zip(places, moving, strict=True):
            filled[place] = _like(leaf, leaves[place])
        return run(parameters, *tree_unflatten(filled, structure))

    return Subject(function, (parameters, *(as_real(leaves[i]) for i in places)))


def _in_proportion(problem: ScalarProblem, generator: torch.Generator, directions: int) -> ScalarProblem:
    """Move every leaf in proportion to its size: a step for inputs of size one is too large for weights."""
    everything = max(1.0, problem.step / 0.1)

    def moved(leaf: Tensor) -> Tensor:
        size = float(leaf.double().square().mean().sqrt())
        size = (size if 0 < size < math.inf else 1.0) / everything
        # Scale by a power of two, so that every dtype sees the same directions.
        return draw_normal((leaf.numel(), directions), generator).to(leaf.device) * 2.0 ** round(math.log2(size))

    return replace(problem, directions=tuple(map(moved, problem.leaves)))
