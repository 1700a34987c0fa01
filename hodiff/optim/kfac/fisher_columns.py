r"""Columns c of the outputs, with $\sum c c^\top$ their Fisher matrix, that are pulled back to the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.kfac.columns import Columns, Given, Root, View
from hodiff.operators.kfac.kfac_options import EXACT, MONTE_CARLO
from hodiff.optim.recorded_losses import BITS, FAMILIES, LABELS, SQUARES, FoundLoss, drawn, find


def find_any(caller: str, loss: Tensor) -> FoundLoss:
    """Find the loss of any family in a graph."""
    found = find(loss, tuple(FAMILIES.values()), partial(_unknown, caller))
    if found.outputs.dim() < 2 and (found.family == LABELS or not found.outputs.dim()):
        raise _unknown(caller, "that of a single example without an example dimension")
    return found


def columns_of(found: FoundLoss, loss: Tensor, fisher: str, generator: torch.Generator) -> Columns:
    """Compute the columns by the method `fisher`."""
    scale = float(found.weight / found.count) ** 0.5
    if fisher == MONTE_CARLO:
        return Given(scale * DRAWN[found.family](found, generator)[None])
    if fisher == EXACT:
        view = View(found.outputs.shape, found.family == LABELS, apart=True)
        return Root(scale * ROOTS[found.family](found, view), view)
    (given,) = torch.autograd.grad([loss], [found.edge], retain_graph=True)
    # The gradient contains the loss's weight and the share of each term.
    return Given(given[None] / scale if scale else torch.zeros_like(given)[None])


def _drawn_labels(found: FoundLoss, generator: torch.Generator) -> Tensor:
    mean, count = drawn(found.outputs, found.ignored, generator)
    return mean * count


def _drawn_values(found: FoundLoss, generator: torch.Generator) -> Tensor:
    # A squared error without the factor 1/2 belongs to a Gaussian of variance 1/2.
    noise = torch.randn(found.outputs.shape, generator=generator, device=generator.device)
    return 2**0.5 * noise.to(found.outputs)


def _drawn_bits(found: FoundLoss, generator: torch.Generator) -> Tensor:
    probabilities = found.outputs.float().sigmoid()
    bits = torch.bernoulli(probabilities.to(generator.device), generator=generator)
    return (probabilities - bits.to(probabilities)).to(found.outputs)


def _root_of_labels(found: FoundLoss, view: View) -> Tensor:
    # The gradient for a label is a unit vector in log-probabilities.
    roots = view.rows((found.outputs / 2).exp()[None])[0]
    if found.ignored is not None:
        roots = roots.masked_fill(found.ignored.reshape(*roots.shape[:2], 1), 0)
    return roots.diag_embed()


def _root_of_squares(found: FoundLoss, view: View) -> Tensor:
    return view.rows(torch.full_like(found.outputs, 2**0.5)[None])[0][..., None]


def _root_of_bits(found: FoundLoss, view: View) -> Tensor:
    probabilities = found.outputs.sigmoid()
    return view.rows((probabilities * (1 - probabilities)).sqrt()[None])[0][..., None]


# Gradients of the terms for targets drawn from the outputs' distribution.
DRAWN: Mapping[str, Callable[[FoundLoss, torch.Generator], Tensor]] = {
    LABELS: _drawn_labels,
    SQUARES: _drawn_values,
    BITS: _drawn_bits,
}
# Roots of the terms' Fisher information, (N, places, size, columns).
ROOTS: Mapping[str, Callable[[FoundLoss, View], Tensor]] = {
    LABELS: _root_of_labels,
    SQUARES: _root_of_squares,
    BITS: _root_of_bits,
}


def _unknown(caller: str, got: str) -> InputError:
    return InputError(
        f"{caller}: expected a loss with one cross_entropy or nll_loss of labels, mse_loss or "
        f"binary_cross_entropy_with_logits, without weights, of reduction 'mean' or 'sum', got {got}; pass "
        "update_every=None, and call update_curvature on such a loss of the same outputs before backward."
    )
