"""Approximate products with the inverse of an inner Hessian, one rule a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.meta.conjugate_gradients import conjugate_gradients

Vector = list[Tensor]
# From a right-hand side to an approximate solution.
Inverse = Callable[[Vector], Vector]


@dataclass(eq=False)
class InnerHessian:
    """The inner Hessian with damping at a point, by recorded products.

    Attributes:
        slopes: The inner gradient, with its graph.
        leaves: What it is the gradient by.
        damping: Added to the diagonal.
        products: How many products were taken.
    """

    slopes: Sequence[Tensor]
    leaves: Sequence[Tensor]
    damping: float
    products: int = 0

    def __call__(self, v: Sequence[Tensor]) -> Vector:
        """Multiply."""
        self.products += 1
        return [Hu + self.damping * u for Hu, u in zip(pulled(self.slopes, self.leaves, v), v, strict=True)]


def pulled(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Vector:
    """Gradients of outputs by inputs, zero where there is no dependence."""
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    y, u = zip(*pairs, strict=True)
    return list(torch.autograd.grad(y, list(inputs), u, retain_graph=True, materialize_grads=True))


def by_conjugate_gradients(
    H: InnerHessian, iterations: int, tolerance: float, step: float | None, generator: torch.Generator | None
) -> Inverse:
    """Conjugate gradients, which need a positive definite Hessian."""
    del step, generator
    return lambda b: conjugate_gradients(H, b, steps=iterations, tolerance=tolerance).value


def by_neumann_series(
    H: InnerHessian, iterations: int, tolerance: float, step: float | None, generator: torch.Generator | None
) -> Inverse:
    r"""$\alpha \sum_{k < K} (I - \alpha H)^k$, with $\alpha$ from a power iteration unless it is given."""
    alpha = 0.9 / _largest_eigenvalue(H, generator) if step is None else step

    def solve(b: Vector) -> Vector:
        x, term = list(b), list(b)
        first = norm(b)
        for _ in range(iterations - 1):
            term = [t - alpha * Ht for t, Ht in zip(term, H(term), strict=True)]
            x = [p + t for p, t in zip(x, term, strict=True)]
            if norm(term) <= tolerance * first:
                break
        return [alpha * each for each in x]

    return solve


def by_nystrom(
    H: InnerHessian, iterations: int, tolerance: float, step: float | None, generator: torch.Generator | None
) -> Inverse:
    r"""$(\rho I + C W^{-1} C^\top)^{-1}$ by Woodbury's identity, from `iterations` random columns C of the Hessian."""
    del tolerance, step
    sizes = [leaf.numel() for leaf in H.leaves]
    total = sum(sizes)
    first = H.leaves[0]
    chosen = torch.randperm(total, generator=generator, device=generator.device if generator else None)
    chosen = chosen[: min(iterations, total)].to(first.device)
    columns = []
    for index in chosen.tolist():
        unit = first.new_zeros(total)
        unit[index] = 1
        columns.append(_flat(H(_split(unit, H.leaves))) - H.damping * unit)
    C = torch.stack(columns, dim=1)
    core = H.damping * C[chosen] + C.T @ C

    def solve(b: Vector) -> Vector:
        flat = _flat(b)
        inner = torch.linalg.lstsq(core, (C.T @ flat).unsqueeze(1), driver="gelsd" if core.is_cpu else "gels").solution
        return _split((flat - (C @ inner).squeeze(1)) / H.damping, H.leaves)

    return solve


def _largest_eigenvalue(H: InnerHessian, generator: torch.Generator | None, products: int = 20) -> float:
    """By power iteration, from below."""
    v = [torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device) for x in H.leaves]
    size = 1.0
    for _ in range(products):
        scale = norm(v)
        v = H([each / scale for each in v])
        size = norm(v)
    return max(size, torch.finfo(H.leaves[0].dtype).tiny)


def norm(v: Sequence[Tensor]) -> float:
    """The Euclidean norm of all together."""
    return float(torch.stack([each.square().sum() for each in v]).sum().sqrt())


def _flat(v: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in v])


def _split(flat: Tensor, like: Sequence[Tensor]) -> Vector:
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]
