r"""Operators of the form $J^\top M J$, with the Jacobian of a model and a matrix on its outputs."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import functional_call
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.operators.data.batches import REDUCTIONS
from hodiff.operators.linear.conversion import Conversion
from hodiff.operators.linear.restriction import restrict
from hodiff.operators.linearized.curvature import CurvatureOperator
from hodiff.operators.linearized.curvature_options import CurvatureOptions
from hodiff.operators.linearized.kept_linearizations import Leaves, Linearization
from hodiff.operators.linearized.likelihoods import divisor
from hodiff.operators.linearized.recorded_model import RecordedModel
from hodiff.torch_internals.compilers.dynamo import module_of
from hodiff.torch_internals.threads import one_thread_at_a_time


class OutputMatrix(Protocol):
    """A symmetric matrix on a model's outputs."""

    def product(self, vectors: Leaves) -> Leaves:
        """Multiply one vector by the matrix."""

    def products(self, vectors: Leaves) -> Leaves:
        """Multiply k vectors, leaves (k, *shape), by the matrix."""


class ModelLossOperator(CurvatureOperator):
    """Base class of operators of a model and a loss.

    Args:
        model: Function `model(x, inputs)`, or a module whose parameters are x.
        loss: Function `loss(outputs, targets)`.
        x: The point.
        *args: `inputs, targets`, or one batch that is passed to both functions; empty with `data`.
        data: Batches to sum over, instead of `args`; `hodiff.HessianOperator` explains the other options, too.

    Raises:
        InputError: If the arguments do not fit.
    """

    functions = ("model", "loss")

    def __init__(
        self,
        model: Callable[..., Any],
        loss: Callable[..., Tensor],
        x: PyTree,
        *args: Any,
        data: Iterable[PyTree] | None = None,
        reduction: str = "mean",
        batch_size: Callable[[PyTree], int] | None = None,
        compile: bool | str = False,
        process_group: Any = None,
        cache: bool | str = "auto",
        memory_budget: int = 2**30,
        chunk_size: int | str | None = "auto",
        check_deterministic: bool = True,
        randomness: str = "error",
        progress: bool = False,
        correct: bool = True,
    ):
        options = CurvatureOptions(
            type(self).__name__,
            data=data,
            reduction=reduction,
            batch_size=batch_size,
            compile=compile,
            process_group=process_group,
            cache=cache,
            memory_budget=memory_budget,
            chunk_size=chunk_size,
            check_deterministic=check_deterministic,
            randomness=randomness,
            progress=progress,
            correct=correct,
        )
        caller = options.caller
        batched = data is not None
        if batched == bool(args) or len(args) > 2:
            raise InputError(
                f"{caller}: expected either data=, or the arguments (inputs, targets) or one batch after x, got "
                f"{len(args)} of them{' and data=' if batched else ''}; pass {caller}(model, loss, x, inputs, targets)."
            )
        require_declared_reduction(caller, loss, reduction)
        if isinstance(model, nn.Module):
            model = module_with(caller, model, x)
        self.model = module_call(model) if isinstance(model, nn.Module) else model
        self.loss = loss
        # Without data the arguments are the only batch.
        batch = (args if len(args) == 2 else args[0],) if args else ()
        super().__init__((model, loss), x, batch, options)
        self.batches.known_size = partial(known_size, loss)

    def block(self, names: str | Sequence[str]) -> ModelLossOperator:
        """Restrict the operator as in `LinearOperator.block`; products are cheaper, as other leaves are constants."""
        self.domain.require_whole("block", "an operator whose x has only these parameters")
        restricted: ModelLossOperator = restrict(self, names, ("model",))
        return restricted

    def converted(self, conversion: Conversion) -> Any:
        """See `LinearOperator.to`."""
        other = super().converted(conversion)
        model, loss = (conversion.module(f) if isinstance(f, nn.Module) else f for f in self._functions)
        if isinstance(model, nn.Module):
            other.model = module_call(model)
        other.loss = loss
        other.batches.known_size = partial(known_size, loss)
        other.adopt(model, loss)
        return other

    @abstractmethod
    def _matrix(self, outputs: PyTree, targets: Any) -> OutputMatrix:
        """Build the matrix on the outputs."""

    def _value(self, args: tuple[Any, ...]) -> Tensor:
        inputs, targets = pair(args[0])
        outputs = self._evaluate(self._bound(self.leaves, inputs))
        return self._scalar_loss(outputs, targets)

    def _scalar_loss(self, outputs: PyTree, targets: Any) -> Tensor:
        return self._bound_loss(outputs, targets).scalar(pytree.tree_leaves(outputs))[0]

    def _linearize(self, args: tuple[Any, ...]) -> Linearization:
        with refused(type(self).__name__):
            model, matrix = self._halves(self.leaves, args)
            return _RecordedModelLoss(model, matrix, model.weight)

    def _functional(self, leaves: Leaves, tangents: Leaves, args: tuple[Any, ...]) -> Leaves:
        model, matrix = self._halves(leaves, args)
        return model.pull(matrix.product(model.push(tangents)))

    def _halves(self, leaves: Leaves, args: tuple[Any, ...]) -> tuple[RecordedModel, OutputMatrix]:
        inputs, targets = pair(args[0])
        model = RecordedModel(self._bound(leaves, inputs))
        return model, self._matrix(pytree.tree_unflatten(list(model.outputs), model.spec), targets)

    def _bound(self, leaves: Leaves, inputs: Any) -> BoundFunction:
        caller, args = type(self).__name__, (self._tree(leaves), inputs)
        return bind(
            caller,
            self.model,
            args,
            name="x",
            correct=self.correct,
            complex_too=True,
            sharded_too=True,
            weight=self._weight,
        )

    def _bound_loss(self, outputs: PyTree, targets: Any) -> BoundFunction:
        caller = f"{type(self).__name__}: loss"
        return bind(caller, self.loss, (outputs, targets), name="outputs", correct=self.correct)


class _RecordedModelLoss:
    def __init__(self, model: RecordedModel, matrix: OutputMatrix, weight: float):
        self._model = model
        self._matrix = matrix if weight == 1.0 else _Weighted(matrix, weight)
        self.bytes_each = model.bytes_each
        self.nbytes = self.bytes_each
        self.value = model.outputs

    def products(self, tangents: Leaves) -> Leaves:
        """See `Linearization`."""
        if tangents[0].shape[0] == 1:
            pushed = self._model.push([v[0] for v in tangents])
            return tuple(p[None] for p in self._model.pull(self._matrix.product(pushed)))
        return self._model.pull_many(self._matrix.products(self._model.push_many(tangents)))


class _Weighted:
    """A matrix times the weight of this rank's outputs among those of all ranks."""

    def __init__(self, matrix: OutputMatrix, weight: float):
        self._matrix, self._weight = matrix, weight

    def product(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        return tuple(self._weight * each for each in self._matrix.product(vectors))

    def products(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        return tuple(self._weight * each for each in self._matrix.products(vectors))


def module_with(caller: str, module: nn.Module, x: PyTree) -> nn.Module:
    """Return the module, or the one inside of a compiled module, that has the names of a point; raise if none has."""
    unknown: list[str] = []
    for each in (module, module_of(module)):
        known = {name for name, _ in (*each.named_parameters(remove_duplicate=False), *each.named_buffers())}
        unknown = sorted(map(str, x.keys() - known)) if isinstance(x, Mapping) else [type(x).__name__]
        if not unknown:
            return each
    got = f"unknown {', '.join(unknown[:5])}" if isinstance(x, Mapping) else unknown[0]
    raise InputError(
        f"{caller}: x: expected a dict with names of the module's parameters, got {got}; "
        "pass dict(module.named_parameters()), or a part of it."
    )


def module_call(module: nn.Module) -> Callable[[PyTree, Any], Any]:
    """Return a module as a function of its parameters, a dict by name, and its input."""
    return partial(_call, module)


def _call(module: nn.Module, parameters: PyTree, inputs: Any) -> Any:
    # The call temporarily replaces the module's tensors.
    with one_thread_at_a_time():
        return functional_call(module, parameters, (inputs,))


def declared_reduction(loss: Any) -> str | None:
    """Return the reduction that a loss of torch declares: a module's, a partial's, or a function's default."""
    if isinstance(loss, nn.Module):
        return getattr(loss, "reduction", None)
    try:
        parameter = inspect.signature(loss).parameters.get("reduction")
    except (TypeError, ValueError):  # built-in functions have no signature
        return None
    return None if parameter is None else parameter.default


def require_declared_reduction(caller: str, loss: Any, reduction: str) -> None:
    """Raise if a loss declares another reduction than the operator's."""
    declared = declared_reduction(loss)
    if declared in REDUCTIONS and reduction in REDUCTIONS and declared != reduction:
        raise InputError(
            f"{caller}: reduction: expected {declared!r}, which is the reduction of the loss over a batch, got "
            f"{reduction!r}; "
            f"pass reduction={declared!r}, or another loss."
        )


def pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; a batch that is not a pair is used as both."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, batch


def known_size(loss: Any, batch: Any) -> float | None:
    """Return the divisor of a loss's mean over a batch."""
    return divisor(loss, pair(batch)[1])


class OuterProducts:
    r"""The matrix $c \sum_s \operatorname{blockdiag}_i(g_{s,i} g_{s,i}^\top)$, with a block for each row of outputs.

    Args:
        gradients: Leaves (S, N, ...) with the gradients of S draws.
        factor: The number c.
    """

    def __init__(self, gradients: Leaves, factor: float | Tensor):
        self.gradients = gradients
        self.factor = factor

    def product(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        # Examples are independent of each other, leaves of one example are not.
        dots = sum((g * u)[..., None].flatten(2).sum(2) for g, u in zip(self.gradients, vectors, strict=True))
        assert isinstance(dots, Tensor)
        dots = self.factor * dots
        return tuple((dots.reshape(*dots.shape, *(1,) * (g.dim() - 2)) * g).sum(0) for g in self.gradients)

    def products(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        return torch.func.vmap(lambda *one: self.product(one))(*vectors)


def gradients_of_loss(loss: BoundFunction) -> tuple[Tensor | None, ...]:
    """Compute gradients of the loss with respect to the outputs of all examples."""
    with torch.enable_grad():
        outputs = [leaf.detach().requires_grad_() for leaf in loss.leaves]
        value, _ = loss.scalar(outputs)
        if not value.requires_grad:
            raise loss.independent()
        return torch.autograd.grad(value, outputs, allow_unused=True)
