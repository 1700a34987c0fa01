"""Fisher matrices as operators: exact, by sampled targets, and empirical."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_generator, require_int
from hodiff.common.randomness import drawn_seed
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.products_by_route import gradient, guard_reverse
from hodiff.derivatives.recorded_gradient import pull_batch
from hodiff.errors import InputError
from hodiff.operators.data.batches import Batch, Size
from hodiff.operators.data.distributed import rank_in, size_of
from hodiff.operators.gauss_newton.exact_diagonal import ModelDiagonal
from hodiff.operators.gauss_newton.gauss_newton import GaussNewtonOperator
from hodiff.operators.linearized.kept_linearizations import Leaves
from hodiff.operators.linearized.likelihoods import (
    Likelihood,
    counted_factors,
    divisor,
    likelihood_of,
    require_normalized,
    require_rows,
    share_of_factors,
)
from hodiff.operators.linearized.model_loss import (
    OuterProducts,
    OutputMatrix,
    gradients_of_loss,
    pair,
)


class FisherOperator(GaussNewtonOperator):
    r"""The Fisher information of a model whose loss is a negative log-likelihood, given by its products.

    $$ A = \frac1M \sum_{i=1}^{M} \mathbb E_{y \sim p(\cdot \mid z_i)}
       \left[\nabla_x \ell(z_i, y)\, \nabla_x \ell(z_i, y)^\top\right] $$

    with M factors of the likelihood and reduction "mean" (without the division for "sum"); targets that the loss
    ignores are not factors. If the outputs are natural parameters (logits, means, log-rates), the expectation is the
    Gauss-Newton matrix, and is computed as such; if they are probabilities or their logarithms, it is

    $$ \frac1{p (1 - p)} \;\text{or}\; \operatorname{diag}(p) $$

    between the Jacobians of the outputs. With `label_smoothing`, $\ell$ is the smoothed loss, but y is still drawn from
    the model's own p. With `samples`, the expectation is a mean over drawn targets, which is unbiased, and the same
    matrix for all products of one operator.

    Args:
        model: As in `hodiff.GaussNewtonOperator`; it returns one tensor, with examples along its first dimension.
        loss: The negative log-likelihood: `cross_entropy` or, of log-probabilities, `nll_loss` (categorical),
            `mse_loss` (normal, variance 1/2), `binary_cross_entropy_with_logits` or, of probabilities,
            `binary_cross_entropy` (Bernoulli), `poisson_nll_loss` (Poisson, log-rates) of `torch.nn.functional`, a
            `functools.partial` of one with keywords, or torch's module of it, without weights.
        x: The point.
        *args: As in `hodiff.GaussNewtonOperator`; targets only decide which places the loss ignores.
        samples: None for the exact matrix, or the number of targets to draw for each output.
        likelihood: For `samples`, the distribution of a loss that is not listed.
        generator: Source of the drawn targets; None for a generator seeded with 0.
        data: Batches to sum over, instead of `args`; `hodiff.HessianOperator` explains this and the further options.
        reduction: Reduction of the loss over the examples of a batch, "mean" or "sum".
        batch_size: Function that returns the number of examples in a batch; by default the divisor of torch's loss.
        compile: Whether to compile the products, with "dynamic" for batches of any size.
        process_group: Process group of `torch.distributed` over whose ranks the operator is summed.
        cache: Whether to keep the linearizations of batches: "auto" within `memory_budget`, True or False.
        memory_budget: Memory for kept linearizations in bytes, 1 GiB by default; see `hodiff.HessianOperator`.
        chunk_size: Number of columns of a block that are multiplied together: a positive int, None for all, or "auto".
        check_deterministic: Whether to evaluate the function twice at the first use, and to refuse values that differ.
            Later operators of a module evaluate it twice only if its training mode has changed or it draws random
            numbers.
        randomness: Treatment of random numbers in the function: "error", or "fixed" for the curvature of one draw.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.

    Raises:
        InputError: If an argument is invalid, or the loss is not a supported likelihood.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs @ w
        >>> inputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [1.0]])
        >>> loss = torch.nn.functional.binary_cross_entropy_with_logits
        >>> hodiff.FisherOperator(model, loss, torch.zeros(1, 1), inputs, targets).to_dense()
        tensor([[0.6250]])

    Source: S. Amari, "Natural gradient works efficiently in learning", Neural Computation 10 (1998), section 3;
    J. Martens, "New insights and perspectives on the natural gradient method", JMLR 21 (2020), section 9.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        loss: Callable[..., Tensor],
        x: PyTree,
        *args: Any,
        samples: int | None = None,
        likelihood: Likelihood | None = None,
        generator: torch.Generator | None = None,
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
        require_int("FisherOperator", "samples", samples, 1, optional=True, remedy="None is exact")
        if likelihood is not None and samples is None:
            raise InputError(
                "FisherOperator: samples: expected an int with your own likelihood, because the expectation is only "
                "known for torch's losses, got None; for natural parameters, use GaussNewtonOperator."
            )
        require_generator("FisherOperator", "generator", generator)
        self.samples = samples
        self.likelihood = likelihood or likelihood_of("FisherOperator", loss)
        # Re-linearized batches must draw the same targets, so all passes share one seed.
        generator = generator or torch.Generator().manual_seed(0)
        self._seed = drawn_seed(generator, 2**31)
        super().__init__(
            model,
            loss,
            x,
            *args,
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

    def _prepare(self, args: tuple[Any, ...], index: int) -> tuple[Any, ...]:
        if self.samples is None:
            return args
        (batch,) = args
        inputs, targets = pair(batch)
        outputs = _one_output(self._evaluate(self._bound(self.leaves, inputs)))
        require_rows("FisherOperator", self.loss, outputs, self.likelihood)
        # Each batch of each rank has its own seed, so that sampling errors are independent.
        seed = self._seed + index * size_of(self.process_group) + rank_in(self.process_group)
        drawn = self.likelihood.sample(outputs, self.samples, torch.Generator(outputs.device).manual_seed(seed))
        return ((inputs, self.likelihood.like(drawn, targets)),)

    def _matrix(self, outputs: PyTree, targets: Any) -> OutputMatrix:
        information = self.likelihood.information
        if self.samples is None and information is None:
            return super()._matrix(outputs, targets)
        z = _one_output(outputs)
        if self.samples is None:
            assert information is not None
            mean = self.batches.reduction == "mean"
            return _Information(partial(information, z), share_of_factors(self.likelihood, z, targets, mean))

        def gradient_for(draw: Tensor) -> Leaves:
            return gradient(guard_reverse(self._bound_loss(z, draw)))((z,))[0]

        (gradients,) = pull_batch(gradient_for, [targets])
        assert gradients is not None
        factors = self.likelihood.counted(z, targets[0]) if self.batches.reduction == "mean" else 1
        # The quotient of an integer tensor would be in float32.
        factors = factors.to(z.dtype) if isinstance(factors, Tensor) else factors
        return OuterProducts((gradients,), factors / self.samples)

    def _scalar_loss(self, outputs: PyTree, targets: Any) -> Tensor:
        if self.likelihood.normalized:
            require_normalized("FisherOperator", self.likelihood, _one_output(outputs))
        return super()._scalar_loss(outputs, targets)


class EmpiricalFisherOperator(ModelDiagonal):
    r"""The second moment of the examples' gradients, given by its products.

    $$ A = \frac1M \sum_{i=1}^{N} g_i g_i^\top, \qquad g_i = \nabla_x \sum_{j} \ell_{ij}(x), \qquad
       \frac1M \sum_{i,j} \ell_{ij} = \ell $$

    for reduction "mean", without both divisions for "sum". There is one term for each index along the first dimension
    of the outputs, whose loss must not depend on other examples (no batch norm in training mode). It uses the observed
    targets, and in general does not approximate the Fisher matrix away from a good fit.

    M counts the factors of the likelihood over which the loss takes its mean, for the same scale as
    `FisherOperator`: classes or tokens, or numbers of the outputs for `mse_loss` and `binary_cross_entropy`. Targets
    that `cross_entropy` or `nll_loss` ignores, or weights by 0, are not factors. M is known for the losses that
    `FisherOperator` names, as functions, modules or `functools.partial` with keywords. For any other loss, such as
    `huber_loss` or `smooth_l1_loss`, M is the number of examples N, so pass reduction="sum" for a loss that masks
    examples. With class weights $w$, `cross_entropy` divides by their sum, so that
    $\ell_i = M w_{y_i} \mathrm{nll}_i / \sum_j w_{y_j}$. Over `data`, M and these sums include all batches, so that the
    matrix does not depend on how the examples are cut into batches.

    Args:
        model: As in `hodiff.GaussNewtonOperator`; examples along the first dimension of every output.
        loss: Function `loss(outputs, targets)` that returns a tensor of shape (), the mean or sum over examples.
        x: The point.
        *args: As in `hodiff.GaussNewtonOperator`.
        data: Batches to sum over, instead of `args`; `hodiff.HessianOperator` explains this and the further options.
        reduction: Reduction of the loss over the examples of a batch, "mean" or "sum".
        batch_size: Function that returns the number of examples in a batch; by default the divisor of torch's loss.
        compile: Whether to compile the products, with "dynamic" for batches of any size.
        process_group: Process group of `torch.distributed` over whose ranks the operator is summed.
        cache: Whether to keep the linearizations of batches: "auto" within `memory_budget`, True or False.
        memory_budget: Memory for kept linearizations in bytes, 1 GiB by default; see `hodiff.HessianOperator`.
        chunk_size: Number of columns of a block that are multiplied together: a positive int, None for all, or "auto".
        check_deterministic: Whether to evaluate the function twice at the first use, and to refuse values that differ.
            Later operators of a module evaluate it twice only if its training mode has changed or it draws random
            numbers.
        randomness: Treatment of random numbers in the function: "error", or "fixed" for the curvature of one draw.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs * w
        >>> inputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
        >>> A = hodiff.EmpiricalFisherOperator(model, torch.nn.functional.mse_loss, torch.ones(1), inputs, targets)
        >>> A.to_dense()  # the mean of the squares of 2 and 8
        tensor([[34.]])

    Source: F. Kunstner, L. Balles & P. Hennig, "Limitations of the empirical Fisher approximation for natural gradient
    descent", NeurIPS 2019, eq. 3.
    """

    def _matrix(self, outputs: PyTree, targets: Any) -> OutputMatrix:
        gradients = gradients_of_loss(self._bound_loss(outputs, targets))
        leaves = pytree.tree_leaves(outputs)
        lengths = {leaf.shape[:1] for leaf in leaves}
        if len(lengths) != 1:
            raise InputError(
                "EmpiricalFisherOperator: model: expected outputs with the examples along their first dimension, got "
                f"{', '.join(describe(leaf) for leaf in leaves)}; return one row for each example."
            )
        for leaf in leaves:
            require_rows("EmpiricalFisherOperator", self.loss, leaf)
        filled = tuple(
            torch.zeros_like(z)[None] if g is None else g[None] for g, z in zip(gradients, leaves, strict=True)
        )
        mean = self.batches.reduction == "mean"
        return OuterProducts(filled, counted_factors(self.loss, leaves[0], targets) if mean else 1)

    def _size(self, args: tuple[Any, ...], batch: Batch) -> Size:
        inputs, targets = pair(args[0])
        factors = divisor(self.loss, targets, weighted=False)
        if factors is None and self.batches.told:
            # The factors of a loss that is not torch's are rows of the outputs, whatever `batch_size` returns.
            factors = float(len(pytree.tree_leaves(self._evaluate(self._bound(self.leaves, inputs)))[0]))
        return self.batches.with_factors(batch.size, factors)


class _Information:
    """The Fisher information of each factor, times the factor's share of the mean."""

    def __init__(self, information: Callable[[Tensor], Tensor], share: Tensor | float):
        self._information, self._share = information, share

    def product(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        (vector,) = vectors
        return (self._share * self._information(vector),)

    def products(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        return torch.func.vmap(lambda *one: self.product(one))(*vectors)


def _one_output(outputs: PyTree) -> Tensor:
    leaves: list[Tensor] = pytree.tree_leaves(outputs)
    if len(leaves) != 1:
        raise InputError(
            "FisherOperator: model: expected one tensor with examples along its first dimension, got "
            f"{', '.join(describe(leaf) for leaf in leaves)}; pass samples=None for other outputs."
        )
    return leaves[0]
