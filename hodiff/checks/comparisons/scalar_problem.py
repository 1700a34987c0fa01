"""A scalar function of a few numbers through a function at a point, in float64 around it.

    loss(t) = sum_i <u_i, f_i(x + V t)>,    t in R^m,  at t = 0,

with a cotangent u and directions V. The function gets its inputs in their own dtypes, while t, V, u and all sums around
it are float64, so that no rounding but the function's own is measured.
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
    """A function at a point.

    Attributes:
        function: Maps the floating leaves of the inputs to a tuple of the floating leaves of the output.
        leaves: The point, in the dtypes at which the function is called.
        directions: V, one block of shape (numel, m) a leaf, float64.
        cotangents: u, one tensor an output, float64.
        weights: The curvature of the curved loss, one tensor an output, float64.
        eps: The coarsest rounding among inputs and outputs.
        reach: What the largest step of differences is multiplied by.
        still: How many numbers of the inputs do not move, as they are infinite or NaN.
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
        """Whether the largest step may be far too large for an element, which moves alone."""
        count = sum(leaf.numel() for leaf in self.leaves)
        return len(self.point) == count and has_extremes(self.leaves)

    @property
    def dtypes(self) -> str:
        """Those of the inputs, as ``"float32/float64"``."""
        return "/".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in self.leaves}))

    def at(self, t: Tensor) -> tuple[Tensor, ...]:
        """Place the leaves at x + V t."""
        t_and_one = torch.nn.functional.pad(t, (0, 1), value=1.0)
        return tuple(
            (frame @ t_and_one.to(leaf.device)).reshape(leaf.shape).to(leaf.dtype)
            for leaf, frame in zip(self.leaves, self._frames, strict=True)
        )

    def joined_outputs(self, t: Tensor) -> Tensor:
        """Join all outputs at x + V t in one vector."""
        return torch.cat([real_parts(y).reshape(-1).to(t.device) for y in self.function(*self.at(t))])

    def loss(self, t: Tensor) -> Tensor:
        """Contract the outputs with a constant cotangent: the incoming gradient is a constant."""
        pairs = zip(self.cotangents, self.function(*self.at(t)), strict=True)
        return reduce(torch.add, [_contract(u, real_parts(y)).to(t.device) for u, y in pairs])

    def curved_loss(self, t: Tensor) -> Tensor:
        """Add squares of the outputs, as a loss would: the incoming gradient depends on the inputs."""
        terms = zip(self.cotangents, self.weights, map(real_parts, self.function(*self.at(t))), strict=True)
        return reduce(torch.add, [(_contract(u, y) + _contract(0.5 * w, y**2)).to(t.device) for u, w, y in terms])

    def is_coarse(self) -> bool:
        """Whether f rounds its inputs inside: it sees a change of 1e-5, but none of 1e-10 that it ought to see."""
        with torch.no_grad():
            here, far, near = (self.joined_outputs(self.point + h * self.step) for h in (0.0, 1e-5, 1e-10))
        visible = 1e-5 * (far - here).abs() > 100 * self.eps * here.abs()
        return bool(visible.any()) and not bool((near - here)[visible].any())

    def rounding(self) -> float:
        """The rounding unit that the outputs show: of float64, or of a lower precision inside f.

        Third differences over small steps, of which nothing but rounding is left, or a kink; so in two places. Of a
        steep function they are its third derivative, and fall by a thousand over steps of a tenth.

        Returns:
            The unit of a dtype.
        """
        shown = min(self._roughness(0), self._roughness(10))
        if shown > _NOISE * _EPS[0]:
            shown = min(shown, max(self._roughness(start, 1e-6) for start in (0, 10, 20, 30)))
        return next((eps for eps in _EPS if shown <= _NOISE * eps), self.eps)

    def _roughness(self, start: int, size: float = 1e-5) -> float:
        with torch.no_grad():
            steps = size * self.step * torch.arange(start, start + 4).to(self.point)
            a, b, c, d = (self.joined_outputs(self.point + h) for h in steps)
        rough = ((d - a) - 3 * (c - b)).abs() / a.abs().max().clamp_min(torch.finfo(a.dtype).tiny)
        return float(rough[rough.isfinite()].max()) if rough.isfinite().any() else 0.0

    def in_double(self) -> ScalarProblem:
        """Take the same problem with float64 inputs; the numbers are the same."""
        leaves = tuple(leaf.double() for leaf in self.leaves)
        return replace(self, leaves=leaves, eps=coarsest((*leaves, *self.function(*(leaf.clone() for leaf in leaves)))))


def _frame(leaf: Tensor, block: Tensor) -> Tensor:
    """The block [V x], which times (t, 1) is x + V t."""
    # Products of matrices and vectors alone, here and below: for each sum or product with a constant, forward mode
    # would make zeros for the constant, of a shape that torch works out in Python, and be three times slower.
    return torch.cat((block, leaf.detach().reshape(-1, 1)), 1)


def _contract(weights: Tensor, y: Tensor) -> Tensor:
    """The sum of products of their elements."""
    return (weights.reshape(1, -1) @ y.reshape(-1)).sum()


def real_parts(y: Tensor) -> Tensor:
    """Its real and imaginary parts, or itself, in float64."""
    return (torch.view_as_real(y) if y.is_complex() else y).double()


def coarsest(tensors: tuple[Tensor, ...]) -> float:
    """The largest rounding unit of their dtypes."""
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)
