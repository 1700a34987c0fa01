"""Models and losses for the curvature operators, with the textbook Hessian of each loss with respect to the outputs.

All cases are small and in float64. Closed forms use elementary operations, and Jacobians of models come from
torch.func, so they share no code with the operators.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from cases import ravel
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

EXAMPLES = 5


def unravel(flat: Tensor, like: Any) -> Any:
    leaves, spec = tree_flatten(like)
    pieces = flat.split([leaf.numel() for leaf in leaves])
    return tree_unflatten([p.reshape(leaf.shape).to(leaf.dtype) for p, leaf in zip(pieces, leaves, strict=True)], spec)


def categorical_hessian(logits: Tensor) -> Tensor:
    """Compute the Hessian of a sum of cross-entropies: diag(s) - s s^T for each distribution along dimension 1."""
    rows = logits.movedim(1, -1).reshape(-1, logits.shape[1])
    s = rows.exp() / rows.exp().sum(1, keepdim=True)
    blocks = torch.block_diag(*(torch.diag(p) - torch.outer(p, p) for p in s))
    # The blocks have the classes last, so permute them to the order of the outputs.
    order = torch.arange(logits.numel()).reshape(logits.shape).movedim(1, -1).reshape(-1)
    hessian = torch.empty_like(blocks)
    hessian[order[:, None], order[None, :]] = blocks
    return hessian


def bernoulli_hessian(logits: Tensor) -> Tensor:
    p = 1 / (1 + (-logits.reshape(-1)).exp())
    return torch.diag(p * (1 - p))


def poisson_hessian(log_rates: Tensor) -> Tensor:
    return torch.diag(log_rates.reshape(-1).exp())


def squares_hessian(outputs: Tensor) -> Tensor:
    return 2 * torch.eye(outputs.numel(), dtype=outputs.dtype)


@dataclass(frozen=True)
class Loss:
    """A loss of torch, its Hessian when it sums, the number of factors that its mean averages, and random targets."""

    function: Callable[..., Tensor]
    hessian: Callable[[Tensor], Tensor]
    factors: Callable[[Tensor], int]
    targets: Callable[[Tensor], Tensor]


LOSSES = {
    "cross-entropy": Loss(
        F.cross_entropy,
        categorical_hessian,
        lambda z: z.numel() // z.shape[1],
        lambda z: torch.randint(z.shape[1], (z.shape[0], *z.shape[2:])),
    ),
    "squares": Loss(F.mse_loss, squares_hessian, Tensor.numel, torch.randn_like),
    "bernoulli": Loss(F.binary_cross_entropy_with_logits, bernoulli_hessian, Tensor.numel, torch.rand_like),
    "poisson": Loss(F.poisson_nll_loss, poisson_hessian, Tensor.numel, lambda z: torch.randint(4, z.shape).to(z.dtype)),
}


class Skip(nn.Module):
    """A convolution whose result is concatenated with its input, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(2, 2, 3, padding=1)
        self.up = nn.Conv1d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.cat([x, torch.tanh(self.down(x))], dim=1))


class OfDict(nn.Module):
    """A network whose input is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.linear = nn.Linear(2, 3)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.linear(torch.tanh(self.embedding(inputs["token"]) * inputs["scale"]))


class Tied(nn.Module):
    """A network that uses one matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(torch.tanh(self.square(x)))


class ReverseOnce(torch.autograd.Function):
    """A square whose backward is differentiable only in forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * tangent


def nested(x: Any, inputs: Tensor) -> Tensor:
    """Apply a network with a nested pytree of parameters, including a number and an ignored leaf."""
    (first, second), scale = x["layers"], x["scale"]
    return torch.tanh(inputs @ first) @ second * scale


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def _images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 2))


def _nested() -> Any:
    return {
        "layers": [torch.randn(3, 2), torch.randn(2, 2)],
        "scale": torch.tensor(0.7),
        "ignored": torch.randn(2),
    }


def _vectors() -> Tensor:
    return torch.randn(EXAMPLES, 3)


def _tokens() -> dict[str, Tensor]:
    return {"token": torch.randint(4, (EXAMPLES,)), "scale": torch.randn(EXAMPLES, 1)}


@dataclass(frozen=True)
class Problem:
    """A model at a point, a loss, and a batch of five examples."""

    name: str
    model: Any
    loss: Loss
    x: Any
    inputs: Any
    targets: Tensor

    @property
    def call(self) -> Callable[[Any, Any], Tensor]:
        """Return the model as a function."""
        if isinstance(self.model, nn.Module):
            return lambda x, inputs: functional_call(self.model, x, (inputs,))
        return self.model

    def objective(self, reduction: str = "mean") -> Callable[[Any, Any], Tensor]:
        """Return the loss as a function of parameters and batch."""

        def f(x: Any, batch: Any) -> Tensor:
            inputs, targets = batch
            return self.loss.function(self.call(x, inputs), targets, reduction=reduction)

        return f

    def reduced(self, reduction: str) -> Callable[..., Tensor]:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return self.loss.function(outputs, targets, reduction=reduction)

        return loss

    def batches(self, *cuts: int) -> list[Any]:
        """Split the batch at the given examples."""
        edges = (0, *cuts, EXAMPLES)
        return [
            tree_map(lambda leaf, start=start, stop=stop: leaf[start:stop], (self.inputs, self.targets))
            for start, stop in pairwise(edges)
        ]

    def hessian(self, reduction: str = "mean") -> Tensor:
        """Compute the Hessian by `torch.autograd.functional`."""
        f, batch = self.objective(reduction), (self.inputs, self.targets)
        return torch.autograd.functional.hessian(lambda flat: f(unravel(flat, self.x), batch), ravel(self.x))

    def jacobian(self) -> Tensor:
        flat = ravel(self.x)
        jacobian = jacrev(lambda flat: self.call(unravel(flat, self.x), self.inputs))(flat)
        return jacobian.reshape(-1, flat.numel())

    def gauss_newton(self, reduction: str = "mean") -> Tensor:
        outputs, J = self.call(self.x, self.inputs), self.jacobian()
        divisor = self.loss.factors(outputs) if reduction == "mean" else 1
        return J.mT @ self.loss.hessian(outputs) @ J / divisor


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "mlp": (_mlp, _vectors, "cross-entropy"),
    "regression": (_mlp, _vectors, "squares"),
    "soft-labels": (_mlp, _vectors, "bernoulli"),
    "counts": (_mlp, _vectors, "poisson"),
    "sequence": (lambda: nn.Conv1d(2, 3, 2), lambda: torch.randn(EXAMPLES, 2, 4), "cross-entropy"),
    "skip": (Skip, lambda: torch.randn(EXAMPLES, 2, 4), "squares"),
    "images": (_images, lambda: torch.randn(EXAMPLES, 1, 3, 3), "cross-entropy"),
    "dict": (OfDict, _tokens, "bernoulli"),
    "tied": (Tied, _vectors, "cross-entropy"),
    "nested": (lambda: nested, _vectors, "poisson"),
}


def problem(name: str) -> Problem:
    """Build a problem of the table with the same random numbers every time."""
    make, inputs_of, loss_name = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            model = make()
            x = (
                {key: value.detach() for key, value in model.named_parameters()}
                if isinstance(model, nn.Module)
                else _nested()
            )
            inputs = inputs_of()
            loss = LOSSES[loss_name]
            outputs = functional_call(model, x, (inputs,)) if isinstance(model, nn.Module) else model(x, inputs)
            targets = loss.targets(outputs.detach())
        finally:
            torch.set_default_dtype(torch.float32)
    return Problem(name, model, loss, x, inputs, targets)


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Assert equality up to rounding, relative to the largest element."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)
