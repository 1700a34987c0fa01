"""Kronecker factors of single parameters: by K-FAC, or nearest to an exact block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.errors import InputError
from hodiff.operators import KFACOperator
from hodiff.operators.kfac.blocks import KroneckerBlock

# Layers whose parameters have K-FAC factors with the shape of the parameter.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
ITERATIONS = 30


def factors_of_layers(
    module: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Any, options: dict[str, Any]
) -> dict[str, list[Tensor]]:
    """Return K-FAC factors of parameters that belong to one supported layer, by name.

    Args:
        module: The model.
        loss: The summed loss.
        inputs: Inputs of a batch.
        targets: Targets of the batch.
        options: Options of `hodiff.KFACOperator`.

    Returns:
        Two factors of weights, a sum over the examples and a mean, in the order of the dimensions, and one of biases;
        no factors if K-FAC refuses the model, such as one that uses a parameter outside of its layer.
    """
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    point = {
        f"{name}.{own}".lstrip("."): p.detach()
        for name, layer in module.named_modules()
        # Subclasses may use their parameters in other ways, as attention does.
        if type(layer) in LAYERS and getattr(layer, "groups", 1) == 1
        for own, p in layer.named_parameters(recurse=False)
        if p.requires_grad and uses[id(p)] == 1
    }
    if not point:
        return {}
    names = list(point)
    with suppress(InputError):
        operator = KFACOperator(module, loss, point, inputs, targets, bias="separate", reduction="sum", **options)
        return dict(_factors(block, names, len(targets)) for block in operator.blocks)
    return {}


def _factors(block: Any, names: list[str], count: int) -> tuple[str, list[Tensor]]:
    """Return the name of a block's parameter, and its factors in the order of the parameter's dimensions."""
    assert isinstance(block, KroneckerBlock)
    (piece,) = block.layout.pieces
    B, A = (_dense(each[0]) for each in (block.B, block.A))
    if names[piece.index].endswith("bias"):
        return names[piece.index], [B * A]
    # A is a mean over the examples and B a sum; the first factor is to be the sum.
    return names[piece.index], [count * A, B / count] if piece.transposed else [B, A]


def _dense(factor: Tensor) -> Tensor:
    return factor.diag() if factor.dim() == 1 else factor


def nearest_kronecker(factor: Tensor) -> list[Tensor]:
    r"""Minimise $\| \sum_r \operatorname{vec}(R_r) \operatorname{vec}(R_r)^\top - B \otimes A \|_F$.

    Power iterations on the rearranged matrix, which is never formed: $B \propto \sum_r R_r A R_r^\top$ and
    $A \propto \sum_r R_r^\top B R_r$. They start at $A = I$, and keep both factors positive semi-definite.

    Args:
        factor: The matrices $R_r$, (rows, p, q).

    Returns:
        B (p, p), and A (q, q) with trace q.

    Source: C. F. Van Loan & N. Pitsianis, "Approximation with Kronecker products" (1993), sections 3 and 6.
    """
    q = factor.shape[2]
    A = torch.eye(q, dtype=factor.dtype, device=factor.device)
    B = torch.zeros(factor.shape[1], factor.shape[1], dtype=factor.dtype, device=factor.device)
    for _ in range(ITERATIONS):
        B = (factor @ A @ factor.mT).sum(0) / A.square().sum()
        size = B.square().sum()
        if not bool(size > 0):
            break
        new = (factor.mT @ B @ factor).sum(0) / size
        scale = new.trace() / q
        settled = bool((new / scale - A).norm() <= torch.finfo(A.dtype).eps ** 0.5 * A.norm())
        # The scale moves to B, so that A of different batches are comparable.
        A, B = new / scale, B * scale
        if settled:
            break
    return [B, A]


def require_independent(own: Tensor, f: Tensor, part: slice) -> None:
    """Raise if outputs of some examples differ from those within the whole batch."""
    eps = torch.finfo(f.dtype).eps
    if not torch.allclose(own, f[part], rtol=max(1e-3, 4 * eps), atol=max(1e-5, eps) * float(f.abs().max())):
        raise InputError(
            "Backend: model: expected outputs of an example that do not depend on other examples of the batch, got "
            "different ones; call model.eval(), or use the structure 'full'."
        )


def examples_of(x: Any, part: slice, count: int) -> Any:
    """Return some examples of a batch of inputs."""
    if isinstance(x, Tensor):
        return x[part]
    if not isinstance(x, MutableMapping):
        raise InputError(f"Backend: x: expected a tensor or a dict of tensors, got {type(x).__name__}.")
    chosen = dict(x)
    for name, value in x.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == count:
            chosen[name] = value[part]
    return chosen
