r"""The vectors that are pulled back to the layers: columns $s$ with $\sum s s^\top$ the matrix on the outputs.

A column is one vector for all examples at once, (*outputs), because examples do not depend on each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.products_by_route import gradient, guard_reverse
from hodiff.derivatives.recorded_gradient import RecordedGradient, pull_batch
from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import symmetric_eigen
from hodiff.operators.kfac.kfac_options import EMPIRICAL, EXACT, MONTE_CARLO
from hodiff.operators.linearized.likelihoods import (
    Likelihood,
    counted_factors,
    has_classes,
    known_likelihood,
    likelihood_of,
    require_normalized,
    require_rows,
    share_of_factors,
)
from hodiff.operators.linearized.model_loss import gradients_of_loss


class Columns(Protocol):
    """A sequence of vectors, computed on demand."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def chunk(self, start: int, stop: int) -> Tensor:
        """Return the columns from `start` to `stop`, (stop - start, *outputs)."""

    @abstractmethod
    def of_example(self, n: int) -> Columns:
        """Return the columns of one example, which are vectors of a batch of one."""


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss, with the options for its Fisher matrix.

    Attributes:
        caller: The operator, for error messages.
        function: The loss.
        mean: Whether the loss is a mean over the batch.
        correct: Whether hodiff's rules are used in the loss.
        fisher: Which columns are used: exact, sampled or of the given targets.
        samples: Number of drawn targets.
        likelihood: The distribution of the drawn targets.
        seed: Seed of the draws; batch `i` adds i.
    """

    caller: str
    function: Callable[..., Tensor]
    mean: bool
    correct: bool
    fisher: str
    samples: int
    likelihood: Likelihood | None
    seed: int

    def columns(self, outputs: Tensor, targets: Any, index: int) -> Columns:
        """Return the columns of batch `index`."""
        require_rows(self.caller, self.function, outputs, self.likelihood)
        return COLUMNS[self.fisher](self, outputs, targets, index)

    def factors(self, outputs: Tensor, targets: Any, *, told: bool) -> float | None:
        """Number of factors of a batch; None if it equals the divisor of the batch's mean."""
        # For losses other than torch's, the two differ only if the user gave the divisor.
        known = told or known_likelihood(self.function) is not None
        return counted_factors(self.function, outputs, targets) if self.fisher == EMPIRICAL and known else None

    def bound(self, outputs: Tensor, targets: Any) -> BoundFunction:
        """Bind the loss at its outputs."""
        return bind(f"{self.caller}: loss", self.function, (outputs, targets), name="outputs", correct=self.correct)


class Given:
    """Columns that are computed already."""

    def __init__(self, vectors: Tensor):
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def chunk(self, start: int, stop: int) -> Tensor:
        """See `Columns`."""
        return self._vectors[start:stop]

    def of_example(self, n: int) -> Given:
        """See `Columns`."""
        return Given(self._vectors[:, n : n + 1])


class Root:
    """Columns of a root of a block-diagonal matrix, (N, places, size, columns): one for each place and column."""

    def __init__(self, roots: Tensor, view: View):
        self._roots, self._view = roots, view

    def __len__(self) -> int:
        return self._roots.shape[1] * self._roots.shape[3]

    def chunk(self, start: int, stop: int) -> Tensor:
        """See `Columns`."""
        n, places, size, width = self._roots.shape
        vectors = self._roots.new_zeros(stop - start, n, places, size)
        for row, number in enumerate(range(start, stop)):
            place, column = divmod(number, width)
            vectors[row, :, place] = self._roots[:, place, :, column]
        return self._view.outputs(vectors)

    def of_example(self, n: int) -> Root:
        """See `Columns`."""
        shape = torch.Size((1, *self._view.shape[1:]))
        return Root(self._roots[n : n + 1], replace(self._view, shape=shape))


@dataclass(frozen=True)
class View:
    """A view of outputs (N, ...) as (N, places, size), such that places do not depend on each other."""

    shape: torch.Size
    classes: bool
    apart: bool

    @property
    def size(self) -> int:
        """Number of outputs that depend on each other."""
        return self.shape[1] if self.classes else 1 if self.apart else self.shape[1:].numel()

    def rows(self, outputs: Tensor) -> Tensor:
        """Reshape (k, *outputs) to (k, N, places, size)."""
        moved = outputs.movedim(2, -1) if self.classes else outputs
        return moved.reshape(len(outputs), self.shape[0], -1, self.size)

    def outputs(self, rows: Tensor) -> Tensor:
        """Reshape (k, N, places, size) to (k, *outputs)."""
        if not self.classes:
            return rows.reshape(len(rows), *self.shape)
        return rows.reshape(len(rows), self.shape[0], *self.shape[2:], self.shape[1]).movedim(-1, 2)


def _exact(loss: Loss, outputs: Tensor, targets: Any, index: int) -> Columns:
    likelihood = known_likelihood(loss.function)
    view = View(outputs.shape, has_classes(loss.function), likelihood is not None)
    if likelihood is not None and likelihood.information is not None:
        # A loss with class weights is not a likelihood.
        likelihood = likelihood_of(loss.caller, loss.function)
        require_normalized(loss.caller, likelihood, outputs)
        share, information = share_of_factors(likelihood, outputs, targets, loss.mean), likelihood.information
        assert information is not None

        def products(vectors: Tensor) -> Tensor:
            return torch.stack([share * information(outputs, each) for each in vectors.unbind(0)])

    else:
        recorded = RecordedGradient(loss.bound(outputs, targets))

        def products(vectors: Tensor) -> Tensor:
            return recorded.products((vectors,))[0]

    if likelihood is None and not is_separate(products, outputs):
        raise InputError(
            f"{loss.caller}: loss: expected a mean or sum over independent examples, got a loss whose Hessian couples "
            "examples; use GaussNewtonOperator."
        )
    matrices = blocks_of(products, outputs, view)
    values, vectors = eigen_of(matrices)
    if lowest := negative_part(values, matrices):
        raise InputError(
            f"{loss.caller}: loss: expected a loss that is convex in the outputs, got a Hessian with the eigenvalue "
            f"{lowest:.3g}; pass fisher='empirical', or fisher='monte-carlo' with likelihood=."
        )
    return Root(root_of(values, vectors, matrices), view)


Products = Callable[[Tensor], Tensor]


def blocks_of(products: Products, outputs: Tensor, view: View) -> Tensor:
    """Compute the blocks (N, places, size, size) of a matrix from its products (k, *outputs)."""
    n, places = view.rows(outputs[None]).shape[1:3]
    units = torch.eye(view.size, dtype=outputs.dtype, device=outputs.device)
    found = view.rows(products(view.outputs(units[:, None, None].expand(-1, n, places, -1))))
    return found.permute(1, 2, 3, 0)


def eigen_of(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and eigenvectors of symmetric blocks, in float32 or more."""
    precise = matrices.float() if matrices.dtype.itemsize < 4 else matrices
    if precise.shape[-1] == 1:
        return precise[..., 0], torch.ones_like(precise)
    return symmetric_eigen((precise + precise.mT) / 2)


def negative_part(values: Tensor, matrices: Tensor) -> float:
    """Return the lowest eigenvalue of blocks if it is negative beyond rounding, else 0."""
    low = values < -10 * torch.finfo(matrices.dtype).eps * _scale(values)
    return float(values.min()) if bool(low.any()) else 0.0


def root_of(values: Tensor, vectors: Tensor, matrices: Tensor) -> Tensor:
    """Compute S with S S^T equal to positive semi-definite blocks (N, places, size, size)."""
    # Drop null directions: with cross-entropy, for example, a shift of all logits changes nothing.
    kept = (values > torch.finfo(values.dtype).eps * _scale(values)).flatten(0, -2).any(0)
    kept[-1:] = True
    return (vectors * values.clamp(min=0).sqrt()[..., None, :])[..., kept].to(matrices.dtype)


def _scale(values: Tensor) -> Tensor:
    return values.shape[-1] * values.abs().max() if values.numel() else torch.tensor(0.0, device="cpu")


def is_separate(products: Products, outputs: Tensor) -> bool:
    """Whether a matrix does not couple examples: factors of examples' vectors then carry over to their products."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)
    factors = example_factors(outputs)
    plain, scaled = products(torch.stack([vectors, factors * vectors])).unbind(0)
    return bool((factors * plain - scaled).norm() <= torch.finfo(outputs.dtype).eps ** 0.5 * plain.norm())


def example_factors(outputs: Tensor) -> Tensor:
    """Return factors of both signs for the examples, (N, 1, ...), all different: equal ones would hide coupling."""
    generator, count = torch.Generator().manual_seed(1), len(outputs)
    signs = torch.rand(count, generator=generator, device=generator.device).sub(0.5).sign()
    sizes = 1 + torch.randperm(count, generator=generator, device=generator.device) / max(1, count)
    return (signs * sizes).reshape(-1, *[1] * (outputs.dim() - 1)).to(outputs)


def _drawn(loss: Loss, outputs: Tensor, targets: Any, index: int) -> Columns:
    likelihood = loss.likelihood
    assert likelihood is not None
    # Each batch has its own seed, so that sampling errors are independent and passes repeat the draws.
    generator = torch.Generator(outputs.device).manual_seed(loss.seed + index)
    drawn = likelihood.like(likelihood.sample(outputs, loss.samples, generator), targets)

    def gradient_for(draw: Tensor) -> tuple[Tensor, ...]:
        return gradient(guard_reverse(loss.bound(outputs, draw)))((outputs,))[0]

    (gradients,) = pull_batch(gradient_for, [drawn])
    assert gradients is not None
    factors = likelihood.counted(outputs, drawn[0]) if loss.mean else 1
    # Use Python numbers: the root of an integer tensor would be in float32.
    return Given(gradients * (float(factors) / loss.samples) ** 0.5)


def _given(loss: Loss, outputs: Tensor, targets: Any, index: int) -> Columns:
    (found,) = gradients_of_loss(loss.bound(outputs, targets))
    vectors = torch.zeros_like(outputs) if found is None else found
    factors = counted_factors(loss.function, outputs, targets) if loss.mean else 1.0
    return Given(vectors[None] * factors**0.5)


COLUMNS: dict[str, Callable[[Loss, Tensor, Any, int], Columns]] = {
    EXACT: _exact,
    MONTE_CARLO: _drawn,
    EMPIRICAL: _given,
}
