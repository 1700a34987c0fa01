"""The gradients of the examples of a data set, batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.operators.data.determinism import read_unchanged
from hodiff.operators.kfac.layers import require_apart
from hodiff.operators.linearized.kept_linearizations import Leaves
from hodiff.operators.linearized.likelihoods import divisor, known_likelihood, require_rows
from hodiff.operators.linearized.model_loss import ModelLossOperator, OutputMatrix, gradients_of_loss, pair
from hodiff.operators.per_example.example_gradients import ExampleGradients, module_of
from hodiff.torch_internals.threads import one_thread_at_a_time

CALLER = "per_sample"


@dataclass
class GradientsOfBatch:
    """The gradients of the examples of one batch, in place of a linearization.

    Attributes:
        gradients: The examples' gradients, as a function of the cotangent.
        cotangent: The gradient of the batch's loss with respect to the outputs.
        divisor: The divisor of the batch's mean; 1 for a sum.
        value: The model's outputs.
    """

    gradients: ExampleGradients
    cotangent: Tensor
    divisor: float
    value: Leaves
    bytes_each: int = 0
    nbytes: int = 0

    def products(self, tangents: Leaves) -> Leaves:
        """See `Linearization`."""
        raise AssertionError("gradients have no products")

    def __len__(self) -> int:
        return len(self.cotangent)


class PerSample(ModelLossOperator):
    """A model and a loss, with the gradients of each example; the arguments are those of the operators."""

    evaluates_once = True

    @leave_inference_mode
    @read_unchanged
    def collect(self, visit: Callable[[GradientsOfBatch], None], *, keep_rows: bool = False) -> None:
        """Evaluate each batch once, and visit it; `keep_rows` is as in `ExampleGradients`."""
        self.domain.require_whole(CALLER, "the local gradients of each rank")
        # Examples that the loss ignores have gradients of 0, and count as examples.
        self.batches.known_size = None
        for module in self._held_modules:
            require_apart(CALLER, module)
        found = None
        # Hooks of the model record its layers for one thread at a time.
        with one_thread_at_a_time(), torch.no_grad(), refused(CALLER):
            linearize = partial(self._gradients_at, keep_rows=keep_rows)
            for found, _ in self._kept.again(partial(self._at, linearize=linearize)):
                assert isinstance(found, GradientsOfBatch)
                visit(found)
        if found is None:
            raise self.batches.empty()

    def _gradients_at(self, args: tuple[Any, ...], *, keep_rows: bool) -> GradientsOfBatch:
        inputs, targets = pair(args[0])
        labels, fixed = self.domain.labels, self._draw_seed is not None
        module = None if any(self.domain.joined) else module_of(self._functions[0], labels)
        mean, counted = self.batches.reduction == "mean", divisor(self.loss, targets)
        # The mean of a batch whose targets are all ignored is 0/0.
        empty, found = counted == 0 and mean, list[Tensor]()

        def cotangent_of(outputs: Tensor) -> Tensor:
            require_rows(CALLER, self.loss, outputs)
            found.append(torch.zeros_like(outputs) if empty else self._cotangent(outputs, targets))
            return found[0]

        gradients = ExampleGradients(
            partial(self._bound, self.leaves),
            inputs,
            module,
            labels,
            self.dtype,
            cotangent_of=cotangent_of,
            repeatable=not fixed,
            mixing=False,
            keep_rows=keep_rows,
        )
        outputs = gradients.outputs
        cotangent = found[0] if found else cotangent_of(outputs)
        if not mean:
            size = 1.0
        elif self.batches.told:
            size = float(self.batches.divisor(args[0]))
        else:
            size = float(len(outputs)) if counted is None else counted
        if known_likelihood(self.loss) is None:
            self._require_sum_over_examples(outputs, targets)
        return GradientsOfBatch(gradients, cotangent, size, (outputs,))

    def _cotangent(self, outputs: Tensor, targets: Any) -> Tensor:
        (found,) = gradients_of_loss(self._bound_loss(outputs, targets))
        return torch.zeros_like(outputs) if found is None else found

    def _require_sum_over_examples(self, outputs: Tensor, targets: Any) -> None:
        """Raise if the loss of one example depends on the outputs of other examples."""
        plain, eps = self._cotangent(outputs, targets), torch.finfo(outputs.dtype).eps
        turned, count = outputs.roll(1, 0), len(outputs)
        index = torch.arange(count, device=outputs.device).reshape(-1, *[1] * (outputs.dim() - 1))
        # Multiples of outputs, and their means, stay in the domain of a loss of probabilities or rates.
        moves = 0.99 * turned, 0.49 * (outputs + turned)
        # Of every two examples, one is moved without the other for some bit.
        for bit in range(max(1, (count - 1).bit_length())):
            chosen = (index >> bit) & 1 == 1
            for some, moved in itertools.product((chosen, ~chosen), moves if bit == 0 else moves[:1]):
                other = self._cotangent(torch.where(some, moved, outputs), targets)
                gap = torch.where(some, 0, other - plain)
                if not bool(gap.norm() <= eps**0.5 * plain.norm()):
                    raise InputError(
                        f"{CALLER}: loss: expected a mean or sum over independent examples, got a loss in which the "
                        "gradient of one example depends on the outputs of others; use the gradient of the batch."
                    )

    def _matrix(self, outputs: PyTree, targets: Any) -> OutputMatrix:
        raise AssertionError("gradients have no products")


# Messages of the operators name the class.
PerSample.__name__ = CALLER


def factor_of(operator: PerSample, count: int, divisor: float) -> float:
    """Return the factor between gradients of all examples, weighted by their batch's divisor, and the defined ones."""
    if operator.batches.reduction != "mean":
        return 1.0
    return count / divisor if divisor else 0.0  # without examples, or if the loss ignores all of them
