"""From any function of pytrees to a scalar function of a few numbers, reproducibly.

Everything that `check` compares is a derivative of

    loss(t) = sum_i <u_i, f_i(x + V t)>,    t in R^m,  at t = 0,

with a random cotangent u and directions V. The function gets its inputs in their own dtypes, while t, V, u and
all sums around it are float64, so that no rounding but the function's own is measured. Elements of x that are infinite
or NaN do not move: the function gets them as they are, and is differentiated by the others; where it
then has infinite outputs, these are left aside.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from hodiff.checks.attempts import Failure, attempt, first_line
from hodiff.common.complex_numbers import equal_with_nan
from hodiff.errors import InputError
from hodiff.torch_internals.differentiation import are_differentiated

# Up to this many numbers V is the identity; beyond, a few random directions see every number at once.
FULL = 12
SUBSPACE = 4

# Rounding units, and how many of them the sums inside a function may lose.
_EPS = tuple(torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16))
_NOISE = 1000.0

# Threads add up in another order from call to call, and torch's kernels round by how memory is aligned.
_ROUNDINGS = 1000

# Calls whose outputs are compared, and numbers in the inputs of all of them together.
_CALLS = 12
_SMALL = 1000


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
        return torch.cat([_real(y).reshape(-1).to(t.device) for y in self.function(*self.at(t))])

    def loss(self, t: Tensor) -> Tensor:
        """Contract the outputs with a constant cotangent: the incoming gradient is a constant."""
        pairs = zip(self.cotangents, self.function(*self.at(t)), strict=True)
        return reduce(torch.add, [_contract(u, _real(y)).to(t.device) for u, y in pairs])

    def curved_loss(self, t: Tensor) -> Tensor:
        """Add squares of the outputs, as a loss would: the incoming gradient depends on the inputs."""
        terms = zip(self.cotangents, self.weights, map(_real, self.function(*self.at(t))), strict=True)
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

    def in_double(self) -> "ScalarProblem":
        """Take the same problem with float64 inputs; the numbers are the same."""
        leaves = tuple(leaf.double() for leaf in self.leaves)
        return replace(
            self, leaves=leaves, eps=_coarsest((*leaves, *self.function(*(leaf.clone() for leaf in leaves))))
        )


class UnrepeatableError(Exception):
    """Two calls with the same inputs gave different outputs."""


def scalarize(
    f: Callable[..., Any], args: tuple[Any, ...], generator: torch.Generator, method: str = "auto"
) -> ScalarProblem:
    """Validate a function and its inputs, and draw cotangent and directions."""
    function, leaves, still = _flatten(f, args)
    if _differentiates_inside(function, leaves):
        function = _recorded(function)
    outputs = _require_outputs(f, args, function, leaves)
    if still:
        function = _without_infinities(function, outputs)
        outputs = function(*(leaf.clone() for leaf in leaves))
    directions = _draw_directions(leaves, generator, method)
    reals = [_real(y) for y in outputs]
    cotangents = tuple(draw_normal(y.shape, generator).to(y.device) for y in reals)
    weights = tuple(
        draw_normal(y.shape, generator).to(y.device) / (1 + y.abs()).where(y.isfinite(), 1.0) for y in reals
    )
    eps = _coarsest((*leaves, *outputs))
    problem = ScalarProblem(function, leaves, directions, cotangents, weights, eps, still=still)
    _require_dependence(problem, outputs)
    return problem


def draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw float64 normal numbers that bfloat16 represents, so that every dtype sees the same ones."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().double()


def _draw_directions(leaves: tuple[Tensor, ...], generator: torch.Generator, method: str) -> tuple[Tensor, ...]:
    sizes = [leaf.numel() for leaf in leaves]
    count = sum(sizes)
    full = count <= FULL if method == "auto" else method == "matrices"
    V = torch.eye(count, dtype=torch.float64) if full else draw_normal((count, SUBSPACE), generator)
    return tuple(block.to(leaf.device) for block, leaf in zip(V.split(sizes), leaves, strict=True))


def _flatten(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Tensor, ...], int]:
    """The function of its floating leaves, these with 0 for what does not move, and how much that is."""
    leaves, structure = tree_flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    _require_inputs(args, any(leaves[i].numel() for i in places))
    constants = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    still = {i: ~constants[i].isfinite() for i in places if not constants[i].isfinite().all()}

    def function(*moving: Tensor) -> tuple[Tensor, ...]:
        filled = list(constants)
        for place, leaf in zip(places, moving, strict=True):
            # A probe may ask for other shapes.
            stays = place in still and leaf.shape == still[place].shape
            filled[place] = torch.where(still[place], constants[place].to(leaf.dtype), leaf) if stays else leaf
        return _floating(f(*tree_unflatten(filled, structure)))

    points = tuple(constants[i].masked_fill(still[i], 0.0) if i in still else constants[i].clone() for i in places)
    return function, points, sum(int(each.sum()) for each in still.values())


def _differentiates_inside(function: Callable[..., Any], leaves: tuple[Tensor, ...]) -> bool:
    """Whether a function runs only where gradients are recorded, as it takes one of its inputs by itself."""
    with torch.no_grad():
        plain = attempt(function, *(leaf.clone() for leaf in leaves))
    return isinstance(plain, Failure) and not isinstance(attempt(_recorded(function), *leaves), Failure)


def _recorded(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The function with gradients recorded wherever nothing else differentiates it."""

    def recorded(*leaves: Tensor) -> tuple[Tensor, ...]:
        if are_differentiated(leaves):
            return function(*leaves)
        with torch.enable_grad():
            outputs = function(*(leaf.detach().requires_grad_() for leaf in leaves))
        return tuple(each.detach() for each in outputs)

    return recorded


def _without_infinities(
    function: Callable[..., tuple[Tensor, ...]], outputs: tuple[Tensor, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function with 0 for outputs that are infinite, as the logarithm of a masked weight."""
    masks = [y.isinf() for y in outputs]

    def finite(*leaves: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(function(*leaves), masks, strict=True)
        return tuple(torch.where(mask, 0.0, y) if mask.shape == y.shape and mask.any() else y for y, mask in pairs)

    return finite


def _floating(output: Any) -> tuple[Tensor, ...]:
    """The floating-point outputs; integers, booleans and None have no derivative."""
    tensors = [leaf for leaf in tree_leaves(output) if leaf is not None]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(f"check: f(*inputs): expected tensors, got {type(tensor).__name__}. Return tensors only.")
    return tuple(t for t in tensors if t.is_floating_point() or t.is_complex())


def _frame(leaf: Tensor, block: Tensor) -> Tensor:
    """The block [V x], which times (t, 1) is x + V t."""
    # Products of matrices and vectors alone, here and below: for each sum or product with a constant, forward mode
    # would make zeros for the constant, of a shape that torch works out in Python, and be three times slower.
    return torch.cat((block, leaf.detach().reshape(-1, 1)), 1)


def _contract(weights: Tensor, y: Tensor) -> Tensor:
    """The sum of products of their elements."""
    return (weights.reshape(1, -1) @ y.reshape(-1)).sum()


def _real(y: Tensor) -> Tensor:
    return (torch.view_as_real(y) if y.is_complex() else y).double()


def _coarsest(tensors: tuple[Tensor, ...]) -> float:
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)


def _require_inputs(args: tuple[Any, ...], has_floating: bool) -> None:
    for path, leaf in tree_flatten_with_path(args)[0]:
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise InputError(
                f"check: inputs{keystr(path)}: expected a real tensor, got {leaf.dtype}. "
                "Take the real and imaginary parts as two inputs and join them inside f with torch.complex."
            )
    if not has_floating:
        kinds = [str(a.dtype) if isinstance(a, Tensor) else type(a).__name__ for a in tree_leaves(args)]
        raise InputError(
            "check: inputs: expected at least one floating-point tensor with elements, "
            f"got {', '.join(kinds) or 'nothing'}. Only floating-point tensors are differentiated."
        )


def _require_outputs(
    f: Callable[..., Any], args: tuple[Any, ...], function: Callable[..., Any], leaves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        # A function may write into its inputs.
        outputs, *others = (attempt(function, *(leaf.clone() for leaf in leaves)) for _ in range(_calls(leaves)))
    if isinstance(outputs, Failure) or any(isinstance(again, Failure) for again in others):
        try:
            function(*leaves)
        except InputError:
            raise
        except Exception as error:
            name = getattr(f, "__name__", type(f).__name__)
            raise InputError(
                f"check: f: expected {name}(*inputs) to run with {len(args)} arguments, got {first_line(error)}"
            ) from error
    if not any(y.numel() for y in outputs):
        raise InputError(
            "check: f(*inputs): expected a floating-point tensor with elements, got none. Return tensors, or tuples, "
            "lists and dicts of them; of another object take them by a loss, `loss=lambda output: output.logits.sum()`."
        )
    gaps = [
        (_gap(a, b), _ROUNDINGS * torch.finfo(a.dtype).eps * _largest(a))
        for again in others
        for a, b in zip(outputs, again, strict=True)
    ]
    if any(gap > rounding for gap, rounding in gaps):
        raise UnrepeatableError(f"two calls with the same inputs differ by {max(gap for gap, _ in gaps):.1e}")
    return outputs


def _calls(leaves: tuple[Tensor, ...]) -> int:
    """How often to call a function, of which some go wrong at every n-th call: small ones often."""
    return max(2, min(_CALLS, _SMALL // max(1, sum(leaf.numel() for leaf in leaves))))


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; one that is not finite in one of the two counts as infinite."""
    gap = (a.detach() - b.detach()).abs().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(gap.masked_fill(same, 0.0).nan_to_num(math.inf, posinf=math.inf).max()) if a.numel() else 0.0


def _largest(a: Tensor) -> float:
    return float(a.detach().abs().nan_to_num(0.0, posinf=0.0, neginf=0.0).max()) if a.numel() else 0.0


def _require_dependence(problem: ScalarProblem, outputs: tuple[Tensor, ...]) -> None:
    """A function that is cut off from its inputs in the graph and in its values has nothing to check."""
    tracked = [leaf.clone().requires_grad_() for leaf in problem.leaves]

    def gradients() -> bool:
        """What f closes over may require grad as well, so the graph alone does not tell."""
        values = [_real(y).sum() for y in problem.function(*tracked) if y.requires_grad]
        return bool(values) and any(g is not None for g in torch.autograd.grad(values, tracked, allow_unused=True))

    with torch.enable_grad():
        reached = attempt(gradients)
    if reached is not False:
        return
    with torch.no_grad():
        moved = attempt(problem.function, *problem.at(problem.point + problem.step))
    if isinstance(moved, Failure):
        return
    if all(equal_with_nan(a, b) for a, b in zip(outputs, moved, strict=True)):
        raise InputError(
            "check: f(*inputs): expected an output that depends on a floating-point input, got a constant. "
            "Pass what f closes over as inputs."
        )
