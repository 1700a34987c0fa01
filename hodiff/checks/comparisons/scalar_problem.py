"""Scalar function of a few float64 numbers, which restricts and contracts a function at a point.

    loss(t) = sum_i <u_i, f_i(x + V t)>,    t in R^m,  at t = 0,

with a cotangent u and directions V. The function gets its inputs in their own dtypes, while t, V, u and all sums around
it are float64, so that only the function's own rounding is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from hodiff.checks.oracles.finite_differences import has_extremes

# Rounding units, and how many of them the sums inside a function may lose.
_EPS = tuple(torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16))
_NOISE = 1000.0


@dataclass(frozen=True)
class ScalarProblem:
    """Function at a point, with directions and cotangents.

    Attributes:
        function: Maps the floating leaves of the inputs to a tuple of the floating leaves of the output.
        leaves: The point, in the dtypes at which the function is called.
        directions: V, one block of shape (numel, m) per leaf, float64.
        cotangents: u, one tensor per output, float64.
        weights: The curvature of the curved loss, one tensor per output, float64.
        eps: The coarsest rounding among inputs and outputs.
        reach: Factor of the largest step of differences.
        still: Number of input elements that are constants, as they are infinite or NaN.
    """

    function: Callable[..., tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]
    directions: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    eps: float
    reach: float = 1.0
    still: int = 0
    _frames: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_frames", tuple(map(_frame, self.leaves, self.directions)))

    @property
    def point(self) -> Tensor:
        """The origin of t."""
        block = self.directions[0]
        return torch.zeros(block.shape[1], dtype=torch.float64, device=block.device)

    @property
    def step(self) -> float:
        """Largest step in t for differences."""
        count = sum(leaf.numel() for leaf in self.leaves)
        square = sum(float(leaf.double().square().sum()) for leaf in self.leaves)
        return 0.1 * self.reach * max(1.0, (square / count) ** 0.5)

    @property
    def is_extreme(self) -> bool:
        """Whether elements move one by one, and the largest step may be far too large for an element."""
        count = sum(leaf.numel() for leaf in self.leaves)
        return len(self.point) == count and has_extremes(self.leaves)

    @property
    def dtypes(self) -> str:
        """Dtypes of the inputs, such as ``"float32/float64"``."""
        return "/".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in self.leaves}))

    def at(self, t: Tensor) -> tuple[Tensor, ...]:
        """Return the leaves at x + V t."""
        t_and_one = torch.nn.functional.pad(t, (0, 1), value=1.0)
        return tuple(
            (frame @ t_and_one.to(leaf.device)).reshape(leaf.shape).to(leaf.dtype)
            for leaf, frame in zip(self.leaves, self._frames, strict=True)
        )

    def joined_outputs(self, t: Tensor) -> Tensor:
        """Return all outputs at x + V t in one vector."""
        return torch.cat([real_parts(y).reshape(-1).to(t.device) for y in self.function(*self.at(t))])

    def loss(self, t: Tensor) -> Tensor:
        """Return the outputs at x + V t contracted with the cotangent: the incoming gradient is a constant."""
        pairs = zip(self.cotangents, self.function(*self.at(t)), strict=True)
        return reduce(torch.add, [_contract(u, real_parts(y)).to(t.device) for u, y in pairs])

    def curved_loss(self, t: Tensor) -> Tensor:
        """Return the loss plus weighted squares of the outputs: the incoming gradient depends on the inputs."""
        terms = zip(self.cotangents, self.weights, map(real_parts, self.function(*self.at(t))), strict=True)
        return reduce(torch.add, [(_contract(u, y) + _contract(0.5 * w, y**2)).to(t.device) for u, w, y in terms])

    def is_coarse(self) -> bool:
        """Whether f rounds inside: outputs respond to a change of 1e-5, but not to a change of 1e-10."""
        with torch.no_grad():
            here, far, near = (self.joined_outputs(self.point + h * self.step) for h in (0.0, 1e-5, 1e-10))
        visible = 1e-5 * (far - here).abs() > 100 * self.eps * here.abs()
        return bool(visible.any()) and not bool((near - here)[visible].any())

    def rounding(self) -> float:
        """Return the rounding unit of the outputs: of float64, or of a lower precision inside f.

        Third differences over small steps leave only rounding, or a kink; so they are taken in two places. For a steep
        function they show its third derivative, and fall by a factor of 1000 if the steps are divided by 10.

        Returns:
            The unit of a dtype.
        """
        shown = min(self._roughness(0), self._roughness(10))
        if shown > _NOISE * _EPS[0]:
            shown = min(shown, max(self._roughness(start, 1e-6) for start in (0, 10, 20, 30)))
        return next((eps for eps in _EPS if shown <= _NOISE * eps), self.eps)

    def _roughness(self, start: int, size: float = 1e-5) -> float:
        with torch.no_grad():
            steps = size * self.step * torch.arange(start, start + 4, device="cpu").to(self.point)
            a, b, c, d = (self.joined_outputs(self.point + h) for h in steps)
        rough = ((d - a) - 3 * (c - b)).abs() / a.abs().max().clamp_min(torch.finfo(a.dtype).tiny)
        return float(rough[rough.isfinite()].max()) if rough.isfinite().any() else 0.0

    def in_double(self) -> ScalarProblem:
        """Return the problem with float64 inputs; their values are equal."""
        leaves = tuple(leaf.double() for leaf in self.leaves)
        return replace(self, leaves=leaves, eps=coarsest((*leaves, *self.function(*(leaf.clone() for leaf in leaves)))))


def _frame(leaf: Tensor, block: Tensor) -> Tensor:
    """Return the block [V x], whose product with (t, 1) is x + V t."""
    # Only products of matrices and vectors are used here and below. For each sum or product with a constant, forward
    # mode would create zeros for the constant, whose shape torch computes in Python, and be three times slower.
    return torch.cat((block, leaf.detach().reshape(-1, 1)), 1)


def _contract(weights: Tensor, y: Tensor) -> Tensor:
    """Return the sum of products of the elements."""
    return (weights.reshape(1, -1) @ y.reshape(-1)).sum()


def real_parts(y: Tensor) -> Tensor:
    """Return a tensor in float64; a complex tensor as real and imaginary parts."""
    return (torch.view_as_real(y) if y.is_complex() else y).double()


def coarsest(tensors: tuple[Tensor, ...]) -> float:
    """Return the largest rounding unit of the tensors' dtypes."""
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)
