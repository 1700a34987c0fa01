"""Kronecker-factored approximate curvature, K-FAC, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.common.options import require_callable
from hodiff.common.randomness import drawn_seed
from hodiff.common.trees import PyTree, describe, flatten_primals
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.operators.data.batches import Batches, Size
from hodiff.operators.data.distributed import require_group
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import Block, KroneckerBlock
from hodiff.operators.kfac.columns import Loss
from hodiff.operators.kfac.kfac_options import MONTE_CARLO, KroneckerOptions
from hodiff.operators.kfac.layered import LayeredOperator
from hodiff.operators.kfac.layers import Source, sources_of
from hodiff.operators.kfac.sharded_blocks import JointFactors
from hodiff.operators.linear.constant_points import require_constant
from hodiff.operators.linear.spaces import Space
from hodiff.operators.linearized.likelihoods import Likelihood, ignored_targets, known_likelihood, likelihood_of
from hodiff.operators.linearized.model_loss import known_size, module_with, require_declared_reduction


class KFACOperator(LayeredOperator):
    r"""Kronecker-factored approximate curvature, K-FAC: Kronecker products for the layers' blocks of the Fisher.

    In example n a layer of weight W multiplies inputs $a_{nr}$, at R places r that share W, and $g_{nr}$ are gradients
    at its outputs: columns of $J^\top S$ with $S S^\top$ the Hessian of the loss in the model's outputs, or of a
    sampled or given loss. The block of W is approximated by

    $$ F = \sum_n \Big(\sum_r g_{nr} \otimes a_{nr}\Big) \Big(\sum_r g_{nr} \otimes a_{nr}\Big)^\top
         \approx B \otimes A $$

    $$ \text{"expand":}\quad A = \frac1{N R} \sum_{n, r} a_{nr} a_{nr}^\top, \quad B = \sum_{n, r} g_{nr} g_{nr}^\top
       \qquad \text{"reduce":}\quad A = \frac1N \sum_n \bar a_n \bar a_n^\top, \quad
       B = \sum_n \hat g_n \hat g_n^\top $$

    with $\bar a_n$ the mean and $\hat g_n$ the sum over r, if the Hessian includes the divisor of the mean; B of
    the given targets has the scale of `hodiff.EmpiricalFisherOperator`. It is the exact block for one example without
    sharing, and for all examples if the model is linear in its inputs and the loss squared. Over `data`, A and B do
    not depend on how the examples are cut into batches; "monte-carlo" draws other targets for another cut.

    Layers: `Linear`, and `Conv1D` of `transformers`; `Conv1d`, `Conv2d` and `Conv3d`, with separate factors for each
    group of channels; `Embedding`, whose A is diagonal and computed as for "expand"; `LayerNorm`, `RMSNorm`,
    `GroupNorm`, `BatchNorm` (in eval mode) and `InstanceNorm`, for which the exact block is used, or its diagonal. A
    separate bias has A = 1. Layers are hooked, so the model has to be a module that calls them. Places that the loss
    ignores, such as padding, count in A only if the loss of other places depends on them; a loss that is not one of
    torch's ignores outputs that none of its columns reaches. If a layer is called on one chunk of the examples after
    another, the calls count as one; otherwise calls share the same examples. The factors are computed on first use.
    If the parameters were changed in place since, products raise an error; `at` computes new factors.

    Args:
        model: An `nn.Module` of one argument, the inputs, that returns one tensor with examples along its first
            dimension.
        loss: Function `loss(outputs, targets)` that returns a tensor of shape (), a sum or mean over examples.
        x: The point: a dict of some or all of the model's parameters by name, each in a layer named above.
        *args: `inputs, targets`; or one batch of another form, which is passed to both functions.
        fisher: Gradients that B averages. "exact": columns of the square root of the loss's Hessian in the outputs, or,
            if the outputs are probabilities or their logarithms or the loss has `label_smoothing`, of the information
            of `hodiff.FisherOperator`, whose targets are drawn from the model's own prediction; one pullback for each
            column; "monte-carlo": gradients for targets drawn from the model's prediction, `samples` pullbacks;
            "empirical": gradients for the given targets, one pullback.
        samples: Number of targets that "monte-carlo" draws for each output; 1 by default.
        likelihood: Distribution of the targets for "monte-carlo", required if the loss is not one of torch's.
        generator: Generator of the drawn targets; by default a generator seeded with 0.
        sharing: Treatment of positions that share a layer's weights, such as tokens, pixels or repeated calls: "expand"
            treats each position as an example of its own, "reduce" first averages inputs and sums gradients over the
            positions.
        bias: "joined": a layer's weight and bias are one block (the inputs get a last element 1); "separate": they are
            two blocks.
        norm: Blocks of normalization layers, which have no Kronecker structure: "full" is the exact block of their
            parameters, "diagonal" its diagonal.
        data: Batches to sum over, instead of `args`: a list, a DataLoader or any iterable that yields the same batches
            in each pass. A batch is a pair of inputs and targets, or an object that is passed to both functions as a
            whole.
        reduction: Reduction of the loss over the examples of a batch, "mean" or "sum", as for other operators.
        batch_size: Function that returns the divisor of a batch's mean, for losses that are not torch's.
        chunk_size: Number of gradients that are pulled back together: a positive int, None for all, or "auto" for as
            many as keep them within 64 MiB on a CPU and 1 GiB on a GPU, and on a CPU for one if layers are large.
        check: Whether to evaluate the first batch twice, to refuse a model that is not deterministic, and to compare
            the gradients of the parameters with those computed from the layers' inputs and outputs, to refuse a model
            that uses a parameter outside its layer. Later operators evaluate a model twice only if its training mode
            has changed or it draws random numbers.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.
        process_group: Process group of `torch.distributed` whose ranks each have a part of the `data`; factors are
            those of all examples. Parameters may be those of a model under `fully_shard`: each block is then on one
            rank, and vectors are sharded like the parameters.

    Attributes:
        blocks: Each layer's block, with its factors `A` (groups, q, q) and `B` (groups, p, p), or diagonals; of sharded
            parameters, the blocks on this rank.

    Raises:
        InputError: If an argument is invalid, or a parameter belongs to no supported layer; or, on first use, if a
            parameter is used outside of its layer, or the model mixes examples.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> x = dict(model.named_parameters())
        >>> inputs, targets = torch.randn(8, 3), torch.randint(2, (8,))
        >>> A = hodiff.KFACOperator(model, torch.nn.functional.cross_entropy, x, inputs, targets)
        >>> A.shape, (A @ x)["0.weight"].shape
        ((26, 26), torch.Size([4, 3]))
        >>> step = A.inverse(damping=1e-2) @ x
        >>> torch.allclose((A.damped(1e-2) @ step)["2.bias"], x["2.bias"], atol=1e-4)
        True

    Source: J. Martens & R. Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML
    2015, section 3; R. Grosse & J. Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers",
    ICML 2016, section 3; R. Eschenhagen, A. Immer, R. Turner, F. Schneider & P. Hennig, "Kronecker-factored approximate
    curvature for modern neural network architectures", NeurIPS 2023, section 3.
    """

    evaluates_once = True

    @leave_inference_mode
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        x: PyTree,
        *args: Any,
        fisher: str = "exact",
        samples: int | None = None,
        likelihood: Likelihood | None = None,
        generator: torch.Generator | None = None,
        sharing: str = "expand",
        bias: str = "joined",
        norm: str = "full",
        data: Iterable[PyTree] | None = None,
        reduction: str = "mean",
        batch_size: Callable[[PyTree], int] | None = None,
        chunk_size: int | str | None = "auto",
        check: bool = True,
        progress: bool = False,
        correct: bool = True,
        process_group: Any = None,
    ):
        caller = type(self).__name__
        require_group(caller, "process_group", process_group)
        if process_group is not None and data is None:
            raise InputError(
                f"{caller}: data: expected batches, because factors of ranks are weighted by numbers of examples, got "
                "none; pass data=[batch]."
            )
        options = KroneckerOptions(
            caller,
            fisher=fisher,
            samples=samples,
            likelihood=likelihood,
            generator=generator,
            sharing=sharing,
            bias=bias,
            norm=norm,
            data=data,
            reduction=reduction,
            batch_size=batch_size,
            chunk_size=chunk_size,
            check=check,
            progress=progress,
            correct=correct,
        )
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{caller}: model: expected an nn.Module, because its layers get hooks, got {describe(model)}; for a "
                "function, use GaussNewtonOperator, or a module that calls it."
            )
        require_callable(caller, loss=loss)
        if (data is not None) == bool(args) or len(args) > 2:
            raise InputError(
                f"{caller}: expected either data=, or the arguments (inputs, targets) or one batch after x, got "
                f"{len(args)} of them{' and data=' * (data is not None)}; pass {caller}(model, loss, x, inputs, "
                "targets)."
            )
        require_declared_reduction(caller, loss, reduction)
        model = module_with(caller, model, x)
        require_constant(caller, x, model, loss, args, data if isinstance(data, (list, tuple)) else None)
        leaves, _ = flatten_primals(x, caller, "x")
        super().__init__(Space.of(x, caller=caller, sharded_too=True))
        self._joint = JointFactors(caller, self.domain.shards, leaves, model, process_group)
        self.model, self.loss = model, loss
        self.fisher, self.sharing = fisher, sharing
        self.chunk_size, self.check, self.correct = chunk_size, check, correct
        self._sources = sources_of(caller, model, list(x), bias, norm)
        self._loss = _loss_of(loss, options)
        self.args = batch_of(args)
        self.batches = Batches(caller, data, reduction, batch_size, progress)
        self.batches.known_size = partial(known_size, loss)
        self.relocate(leaves, self.domain)

    @leave_inference_mode
    def _compute(self) -> tuple[Block, ...]:
        with torch.no_grad(), refused(type(self).__name__):
            blocks = self._factors()
            return tuple(compress(blocks, self._joint.owned([each.layout for each in blocks])))

    def _factors(self) -> tuple[KroneckerBlock, ...]:
        """Compute the factors, as sums over batches, examples, places and columns."""
        sources = self._all_sources
        inputs: dict[Source, Tensor | None] = dict.fromkeys(sources)
        gradients = {source: self._zeros(source) for source in sources}
        counts = dict.fromkeys(sources, 0)
        sizes = Size()
        for batch, recorded in self._recorded_batches():
            ignored = ignored_targets(self.loss, batch.content[1])
            # If no target of a batch counts, none of its places does.
            counting = () if ignored is not None and bool(ignored.all()) else sources
            # For losses other than torch's, ignored outputs show in the columns.
            counted = torch.zeros_like(recorded.outputs, dtype=torch.bool)
            watched = known_likelihood(self.loss) is None if ignored is None else bool(ignored.any())
            reached: dict[Source, Tensor] = {}
            for columns, found in self._pulled(batch, recorded):
                counted |= (columns != 0).any(0)
                for source, g in found.items():
                    gradients[source].add_(moments.of_gradients(source, g, self.sharing), alpha=batch.size.weight)
                    if watched:
                        reached[source] = moments.reached_places(g, reached.get(source))
            if watched and ignored is None:
                ignored = moments.ignored_places(counted)
            for source in counting:
                a = self._inputs(source, recorded)
                used = moments.used_places(ignored, reached[source]) if watched and ignored is not None else None
                one, count = moments.of_inputs(source, a, self.sharing, used)
                if one is not None:
                    before = inputs[source]
                    inputs[source] = one.to(self.dtype) if before is None else before.add_(one)
                counts[source] += count
            sizes += batch.size
        self._joint.sum_([*gradients.values(), *inputs.values()])
        numbers = torch.tensor([float(counts[source]) for source in sources], dtype=torch.float64)
        self._joint.sum_([numbers])
        counts = dict(zip(sources, map(int, numbers.tolist()), strict=True))
        scale = self._scale(self._joint.sizes(sizes))
        blocks = []
        # In place, because a factor may be larger than the model.
        for source, B in gradients.items():
            total, count = inputs[source], counts[source]
            A = moments.mean_of_inputs(source, None, 1, B) if total is None else total.div_(count)
            blocks.append(KroneckerBlock(source.layout, A, B.mul_(scale)))
        return tuple(blocks)


def batch_of(args: tuple[Any, ...]) -> Any:
    """Return the arguments as one batch, or None if there are none."""
    return args if len(args) == 2 else args[0] if args else None


def _loss_of(loss: Callable[..., Tensor], options: KroneckerOptions) -> Loss:
    """Return the loss with its options, and raise if they do not fit."""
    caller, fisher, likelihood = options.caller, options.fisher, options.likelihood
    for name, value in (("samples", options.samples), ("likelihood", likelihood)):
        if value is not None and fisher != MONTE_CARLO:
            raise InputError(
                f"{caller}: {name}: expected None with fisher={fisher!r}, which draws no samples, got {value!r}; "
                f"pass fisher={MONTE_CARLO!r}."
            )
    if fisher == MONTE_CARLO and likelihood is None:
        likelihood = likelihood_of(caller, loss)
    # All passes must draw the same targets, so they share one seed.
    generator = options.generator or torch.Generator().manual_seed(0)
    seed = drawn_seed(generator, 2**31)
    mean = options.reduction == "mean"
    return Loss(caller, loss, mean, options.correct, fisher, options.samples or 1, likelihood, seed)
