"""Functions that the tests share, with derivatives that are computed without torch.

A case draws its inputs and, if they have a closed form, gives its gradient and Hessian. Closed forms are written in
NumPy, so that they share no code with the code under test. The Hessian's rows are the leaves of `x`, flattened in
pytree order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import optimize, special
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

REVERSE_OVER_REVERSE = "reverse-over-reverse"
FORWARD_OVER_REVERSE = "forward-over-reverse"
REVERSE_OVER_FORWARD = "reverse-over-forward"
FORWARD_OVER_FORWARD = "forward-over-forward"
OVER_FORWARD = (REVERSE_OVER_FORWARD, FORWARD_OVER_FORWARD)
# torch.func.hessian differentiates a reverse pass that vmap runs for a batch of cotangents.
OVER_BATCHED_REVERSE = "over-batched-reverse"
THIRD_ORDER = "reverse-over-reverse-over-reverse"

Inputs = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A scalar function of a pytree, its inputs and its known derivatives.

    `wrong_in_torch` and `missing_in_torch` record the routes by which plain torch returns a wrong product or
    raises; a test confirms both lists, so that they cannot go stale.
    """

    name: str
    function: Callable[..., Tensor]
    make_inputs: Callable[[torch.dtype, torch.Generator], Inputs]
    gradient: Callable[[Any, tuple[Any, ...]], np.ndarray] | None = None
    hessian: Callable[[Any, tuple[Any, ...]], np.ndarray] | None = None
    smooth: bool = True
    wrong_in_torch: tuple[str, ...] = ()
    missing_in_torch: tuple[str, ...] = ()

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
        """Inputs whose values depend only on the seed (rounded to `dtype`)."""
        return self.make_inputs(dtype, torch.Generator().manual_seed(seed))

    def vector(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> Any:
        """A random direction with the structure of `x`."""
        x, _ = self.inputs(dtype)
        generator = torch.Generator().manual_seed(seed)
        return tree_map(lambda leaf: normal(leaf.shape, dtype, generator), x)

    def available(self, route: str) -> bool:
        """Whether plain torch returns the right product by this route."""
        return route not in self.wrong_in_torch + self.missing_in_torch


def normal(shape: Any, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Draw normal random numbers in float64, and convert them to `dtype`."""
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating tensors in `dtype`."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


def ravel(tree: Any) -> Tensor:
    """The leaves of `tree`, flattened in pytree order."""
    return torch.cat([leaf.reshape(-1) for leaf in tree_leaves(tree)])


def unravel(flat: Tensor, like: Any) -> Any:
    """The inverse of `ravel`, with the structure of `like`."""
    pieces = iter(flat.split([leaf.numel() for leaf in tree_leaves(like)]))
    return tree_map(lambda leaf: next(pieces).reshape(leaf.shape), like)


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


# Functions with a closed form


def rosenbrock(x: Tensor) -> Tensor:
    """Compute the chained Rosenbrock function, with a tridiagonal Hessian."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def quadratic(x: Tensor, matrix: Tensor, vector: Tensor) -> Tensor:
    return x @ matrix @ x + vector @ x


def affine(x: dict[str, Tensor], slope: Tensor) -> Tensor:
    return (slope * x["w"]).sum() + 3 * x["b"] - 1


def partly_linear(x: dict[str, Tensor]) -> Tensor:
    return (x["w"] ** 3).sum() + x["b"].sum()


def log_sum_exp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=0)


def log_sum_exp_hessian(x: Tensor, _: tuple[Any, ...]) -> np.ndarray:
    p = special.softmax(array(x))
    return np.diag(p) - np.outer(p, p)


def logistic_regression(w: Tensor, features: Tensor, labels: Tensor, penalty: float) -> Tensor:
    loss = F.binary_cross_entropy_with_logits(features @ w, labels)
    return loss + 0.5 * penalty * (w * w).sum()


def logistic_gradient(w: Tensor, args: tuple[Any, ...]) -> np.ndarray:
    X, y, penalty = array(args[0]), array(args[1]), args[2]
    return X.T @ (special.expit(X @ array(w)) - y) / len(y) + penalty * array(w)


def logistic_hessian(w: Tensor, args: tuple[Any, ...]) -> np.ndarray:
    X, penalty = array(args[0]), args[2]
    p = special.expit(X @ array(w))
    return (X.T * (p * (1 - p))) @ X / len(X) + penalty * np.eye(X.shape[1])


def softmax_regression(W: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(features @ W, labels)


def softmax_gradient(W: Tensor, args: tuple[Any, ...]) -> np.ndarray:
    X, labels = array(args[0]), args[1].numpy()
    p = special.softmax(X @ array(W), axis=1)
    return (X.T @ (p - np.eye(W.shape[1])[labels]) / len(X)).ravel()


def softmax_hessian(W: Tensor, args: tuple[Any, ...]) -> np.ndarray:
    """Mean over the data of (x xᵀ) ⊗ (diag p - p pᵀ); Böhning (1992)."""
    X = array(args[0])
    p = special.softmax(X @ array(W), axis=1)
    blocks = np.einsum("ma,ab->mab", p, np.eye(W.shape[1])) - np.einsum("ma,mb->mab", p, p)
    return np.einsum("mi,mj,mab->iajb", X, X, blocks).reshape(W.numel(), W.numel()) / len(X)


def mixed_polynomial(x: Tensor) -> Tensor:
    a, b, c = x
    return a**3 * b + 2 * a * b**2 * c - c**4 + a * b * c


def mixed_polynomial_gradient(x: Tensor, _: tuple[Any, ...]) -> np.ndarray:
    a, b, c = array(x)
    return np.array([
        3 * a**2 * b + 2 * b**2 * c + b * c,
        a**3 + 4 * a * b * c + a * c,
        2 * a * b**2 - 4 * c**3 + a * b,
    ])


def mixed_polynomial_hessian(x: Tensor, _: tuple[Any, ...]) -> np.ndarray:
    a, b, c = array(x)
    ab, ac, bc = 3 * a**2 + 4 * b * c + c, 2 * b**2 + b, 4 * a * b + a
    return np.array([[6 * a * b, ab, ac], [ab, 4 * a * c, bc], [ac, bc, -12 * c**2]])


def fourier_power(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * torch.fft.fft(x).abs() ** 2).sum()


def fourier_power_hessian(x: Tensor, args: tuple[Any, ...]) -> np.ndarray:
    """2 Re(Fᴴ diag(w) F) for the discrete Fourier matrix F."""
    transform = np.fft.fft(np.eye(x.numel()))
    return 2 * (transform.conj().T * array(args[0]) @ transform).real


def complex_quartic(x: dict[str, Tensor]) -> Tensor:
    return (torch.complex(x["re"], x["im"]) ** 4).abs()


def complex_quartic_hessian(x: dict[str, Tensor], _: tuple[Any, ...]) -> np.ndarray:
    a, b = float(x["re"]), float(x["im"])
    return np.array([[12 * a * a + 4 * b * b, 8 * a * b], [8 * a * b, 4 * a * a + 12 * b * b]])


def log_determinant(A: Tensor) -> Tensor:
    return torch.logdet(A)


def log_determinant_hessian(A: Tensor, _: tuple[Any, ...]) -> np.ndarray:
    inverse = np.linalg.inv(array(A))
    return -np.einsum("jk,li->ijkl", inverse, inverse).reshape(A.numel(), A.numel())


def sum_of_exponentials(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * x.exp()).sum()


def fourth_powers(x: dict[str, Tensor]) -> Tensor:
    return (x["used"] ** 4).sum()


def fourth_powers_hessian(x: dict[str, Tensor], _: tuple[Any, ...]) -> np.ndarray:
    return np.diag(np.concatenate([np.zeros(x["ignored"].numel()), 12 * array(x["used"]) ** 2]))


def shifted_products(x: Tensor) -> Tensor:
    """x₀ + x₀x₁ + x₁x₂ + …, written in place on a copy."""
    y = x.clone()
    y[1:] *= x[:-1]
    return y.sum()


def squared_relu(x: Tensor) -> Tensor:
    return (torch.relu(x) ** 2).sum()


# Functions without a closed form; `oracles.py` differentiates their values


def nested(x: dict[str, Any]) -> Tensor:
    (a, b), [c] = x["pair"], x["list"]
    return torch.sin(a @ b).sum() * c + torch.exp(c) * (a * a).mean() - torch.tanh(b).prod()


def logistic_map(x: dict[str, Tensor], steps: int) -> Tensor:
    state = x["state"]
    for _ in range(steps):
        state = x["rate"] * state * (1 - state)
    return state.square().sum()


def layer_norm(x: dict[str, Tensor], target: Tensor) -> Tensor:
    return (F.layer_norm(x["input"], (4,), x["weight"]) - target).pow(2).mean()


def batch_norm(x: dict[str, Tensor], target: Tensor) -> Tensor:
    normalized = F.batch_norm(x["input"], None, None, x["weight"], training=True)
    return (torch.tanh(normalized) * target).sum()


def huber_regression(w: Tensor, features: Tensor, target: Tensor) -> Tensor:
    return F.huber_loss(torch.tanh(features @ w), target, delta=0.7)


class ConvolutionalNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.output = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        features = F.avg_pool2d(F.max_pool2d(F.silu(self.convolution(images)), 2), 2)
        return self.output(features.flatten(1))


class TransformerBlock(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2), nn.GELU(), nn.Linear(2, width, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.projections(self.norm_attention(tokens)).chunk(3, dim=-1)
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
        tokens = tokens + weights @ value
        return (tokens + self.mlp(self.norm_mlp(tokens))).mean(dim=-2)


class EmbeddingClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2)
        self.output = nn.Linear(2, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(tokens)).mean(dim=-2))


class TiedLanguageModel(nn.Module):
    """A model whose embedding and output layer share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.hidden = nn.Linear(3, 3)
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(tokens))))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module without numbers: a case supplies every parameter, and a missing parameter raises."""
    with torch.device("meta"):
        return build()


def module_case(
    name: str,
    build: Callable[[], nn.Module],
    make_data: Callable[[torch.dtype, torch.Generator], tuple[Tensor, Tensor]],
    **known: Any,
) -> Case:
    """The cross-entropy of a module as a function of its parameter dict."""
    module = on_meta(build)

    def function(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, parameters, (inputs,)), labels)

    def make_inputs(dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        parameters = {
            name: normal(parameter.shape, dtype, generator, scale=0.7) for name, parameter in module.named_parameters()
        }
        return parameters, make_data(dtype, generator)

    return Case(name, function, make_inputs, **known)


def integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator)


CASES: tuple[Case, ...] = (
    Case(
        "rosenbrock",
        rosenbrock,
        lambda dtype, g: (normal(5, dtype, g), ()),
        gradient=lambda x, _: optimize.rosen_der(array(x)),
        hessian=lambda x, _: optimize.rosen_hess(array(x)),
    ),
    Case(
        "quadratic",
        quadratic,
        lambda dtype, g: (normal(4, dtype, g), (normal((4, 4), dtype, g), normal(4, dtype, g))),
        gradient=lambda x, args: array(args[0] + args[0].T) @ array(x) + array(args[1]),
        hessian=lambda x, args: array(args[0] + args[0].T),
    ),
    Case(
        "affine",
        affine,
        lambda dtype, g: ({"w": normal((2, 2), dtype, g), "b": normal((), dtype, g)}, (normal(2, dtype, g),)),
        gradient=lambda x, args: np.concatenate([np.tile(array(args[0]), 2), [3.0]]),
        hessian=lambda x, _: np.zeros((5, 5)),
    ),
    Case(
        "partly_linear",
        partly_linear,
        lambda dtype, g: ({"w": normal(3, dtype, g), "b": normal(2, dtype, g)}, ()),
        gradient=lambda x, _: np.concatenate([3 * array(x["w"]) ** 2, np.ones(2)]),
        hessian=lambda x, _: np.diag(np.concatenate([6 * array(x["w"]), np.zeros(2)])),
    ),
    Case(
        "log_sum_exp",
        log_sum_exp,
        lambda dtype, g: (normal(5, dtype, g), ()),
        gradient=lambda x, _: special.softmax(array(x)),
        hessian=log_sum_exp_hessian,
    ),
    Case(
        "logistic_regression",
        logistic_regression,
        lambda dtype, g: (
            normal(4, dtype, g),
            (normal((12, 4), dtype, g), integers(2, (12,), g).to(dtype), 0.1),
        ),
        gradient=logistic_gradient,
        hessian=logistic_hessian,
    ),
    Case(
        "softmax_regression",
        softmax_regression,
        lambda dtype, g: (normal((3, 4), dtype, g), (normal((10, 3), dtype, g), integers(4, (10,), g))),
        gradient=softmax_gradient,
        hessian=softmax_hessian,
    ),
    Case(
        "mixed_polynomial",
        mixed_polynomial,
        lambda dtype, g: (normal(3, dtype, g), ()),
        gradient=mixed_polynomial_gradient,
        hessian=mixed_polynomial_hessian,
    ),
    Case(
        "fourier_power",
        fourier_power,
        lambda dtype, g: (normal(5, dtype, g), (normal(5, dtype, g).abs(),)),
        hessian=fourier_power_hessian,
    ),
    Case(
        "complex_quartic",
        complex_quartic,
        lambda dtype, g: ({"re": normal((), dtype, g), "im": normal((), dtype, g)}, ()),
        hessian=complex_quartic_hessian,
    ),
    Case(
        "log_determinant",
        log_determinant,
        lambda dtype, g: (3 * torch.eye(3, dtype=dtype) + normal((3, 3), dtype, g, scale=0.5), ()),
        gradient=lambda A, _: np.linalg.inv(array(A)).T.ravel(),
        hessian=log_determinant_hessian,
        wrong_in_torch=OVER_FORWARD if torch.__version__ < "2.15" else (),
    ),
    Case(
        "scalar",
        lambda x: torch.exp(torch.sin(x)),
        lambda dtype, g: (normal((), dtype, g), ()),
        gradient=lambda x, _: (np.cos(array(x)) * np.exp(np.sin(array(x)))).reshape(1),
        hessian=lambda x, _: ((np.cos(array(x)) ** 2 - np.sin(array(x))) * np.exp(np.sin(array(x)))).reshape(1, 1),
    ),
    Case(
        "non_contiguous",
        sum_of_exponentials,
        lambda dtype, g: (normal((2, 3), dtype, g).T, (normal((3, 2), dtype, g),)),
        gradient=lambda x, args: (array(args[0]) * np.exp(array(x))).ravel(),
        hessian=lambda x, args: np.diag((array(args[0]) * np.exp(array(x))).ravel()),
    ),
    Case(
        "expanded",
        sum_of_exponentials,
        lambda dtype, g: (normal(3, dtype, g).expand(2, 3), (normal((2, 3), dtype, g),)),
        gradient=lambda x, args: (array(args[0]) * np.exp(array(x))).ravel(),
        hessian=lambda x, args: np.diag((array(args[0]) * np.exp(array(x))).ravel()),
    ),
    Case(
        "ignored_leaf",
        fourth_powers,
        lambda dtype, g: ({"ignored": normal((2, 1), dtype, g), "used": normal(3, dtype, g)}, ()),
        gradient=lambda x, _: np.concatenate([np.zeros(2), 4 * array(x["used"]) ** 3]),
        hessian=fourth_powers_hessian,
    ),
    Case(
        "zero_size_leaf",
        fourth_powers,
        lambda dtype, g: ({"ignored": normal((0, 3), dtype, g), "used": normal(2, dtype, g)}, ()),
        gradient=lambda x, _: 4 * array(x["used"]) ** 3,
        hessian=fourth_powers_hessian,
    ),
    Case(
        "in_place",
        shifted_products,
        lambda dtype, g: (normal(4, dtype, g), ()),
        hessian=lambda x, _: np.eye(4, k=1) + np.eye(4, k=-1),
    ),
    Case(
        "squared_relu",
        squared_relu,
        lambda dtype, g: (normal(5, dtype, g), ()),
        gradient=lambda x, _: 2 * np.maximum(array(x), 0),
        hessian=lambda x, _: np.diag(2.0 * (array(x) > 0)),
        smooth=False,
    ),
    Case(
        "nested",
        nested,
        lambda dtype, g: (
            {"pair": (normal((2, 3), dtype, g), normal(3, dtype, g)), "list": [normal((), dtype, g)]},
            (),
        ),
    ),
    Case(
        "logistic_map",
        logistic_map,
        lambda dtype, g: (
            {
                "state": torch.rand(2, generator=g, dtype=torch.float64).to(dtype),
                "rate": torch.tensor(2.5, dtype=dtype),
            },
            (3,),
        ),
    ),
    Case(
        "layer_norm",
        layer_norm,
        lambda dtype, g: (
            {"input": normal((2, 4), dtype, g), "weight": normal(4, dtype, g)},
            (normal((2, 4), dtype, g),),
        ),
        wrong_in_torch=(*OVER_FORWARD, OVER_BATCHED_REVERSE, THIRD_ORDER),
    ),
    Case(
        "batch_norm",
        batch_norm,
        lambda dtype, g: (
            {"input": normal((4, 3), dtype, g), "weight": normal(3, dtype, g)},
            (normal((4, 3), dtype, g),),
        ),
        wrong_in_torch=(*OVER_FORWARD, OVER_BATCHED_REVERSE, THIRD_ORDER),
    ),
    Case(
        "huber_regression",
        huber_regression,
        lambda dtype, g: (normal(3, dtype, g), (normal((6, 3), dtype, g), 2 * normal(6, dtype, g))),
        smooth=False,
        missing_in_torch=(FORWARD_OVER_REVERSE, FORWARD_OVER_FORWARD),
    ),
    module_case(
        "mlp",
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)),
        lambda dtype, g: (normal((5, 3), dtype, g), integers(2, (5,), g)),
    ),
    module_case(
        "cnn",
        ConvolutionalNetwork,
        lambda dtype, g: (normal((3, 1, 6, 6), dtype, g), integers(2, (3,), g)),
        smooth=False,
    ),
    module_case(
        "transformer",
        TransformerBlock,
        lambda dtype, g: (normal((2, 4, 3), dtype, g), integers(3, (2,), g)),
        wrong_in_torch=(*OVER_FORWARD, OVER_BATCHED_REVERSE, THIRD_ORDER),
    ),
    module_case(
        "embedding",
        EmbeddingClassifier,
        lambda dtype, g: (integers(5, (4, 3), g), integers(3, (4,), g)),
    ),
    module_case(
        "tied",
        TiedLanguageModel,
        lambda dtype, g: (integers(4, (6,), g), integers(4, (6,), g)),
    ),
)


def case(name: str) -> Case:
    return next(each for each in CASES if each.name == name)
