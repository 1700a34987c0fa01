"""K-FAC and EKFAC in plain NumPy: loops over examples, columns and places, and explicit Kronecker products.

Networks are chains of layers. The input of a layer comes from the layers before it. The gradient of its output comes
from `torch.autograd.functional.jacobian` of the layers after it, for each example; indexing gathers the patches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Seen:
    """A layer in one example: its module, its input, and the Jacobian of the outputs by its output."""

    module: nn.Module
    x: np.ndarray
    jacobian: np.ndarray


def observed_layers(model: nn.Sequential, x: Tensor) -> dict[str, Seen]:
    """Return every layer with parameters, for one example (without a batch dimension)."""
    found = {}
    for name, module in model.named_children():
        if not list(module.parameters()):
            continue
        before = model[: int(name)](x[None])
        after = module(before)
        rest = model[int(name) + 1 :]
        jacobian = torch.autograd.functional.jacobian(lambda y, rest=rest: rest(y)[0].reshape(-1), after)
        size = jacobian.shape[0]
        shape = after.shape[1:]
        found[name] = Seen(module, before[0].detach().numpy(), jacobian.reshape(size, *shape).numpy())
    return found


def convolved(module: Any, x: np.ndarray, group: int, place: tuple[int, ...]) -> np.ndarray:
    """Gather the patch of a group at a place, element by element."""
    channels = x.shape[0] // module.groups
    patch = []
    for channel in range(group * channels, (group + 1) * channels):
        for offset in product(*map(range, module.kernel_size)):
            where = [
                p * s + o * d - (0 if isinstance(pad, str) else pad)
                for p, s, o, d, pad in zip(place, module.stride, offset, module.dilation, module.padding, strict=True)
            ]
            inside = all(0 <= w < size for w, size in zip(where, x.shape[1:], strict=True))
            patch.append(x[(channel, *where)] if inside else 0.0)
    return np.array(patch)


def pairs(s: Seen, group: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (a, Jacobian by the layer's output) at each place that shares the weight; embeddings have one-hot a."""
    module, x, J = s.module, s.x, s.jacobian
    if isinstance(module, nn.Linear):
        return [(x[i], J[(slice(None), *i)]) for i in np.ndindex(x.shape[:-1])]
    if isinstance(module, nn.Embedding):
        rows = np.eye(module.num_embeddings)
        if module.padding_idx is not None:
            rows[module.padding_idx] = 0
        return [(rows[x[i]], J[(slice(None), *i)]) for i in np.ndindex(x.shape)]
    width = J.shape[1] // module.groups
    mine = slice(group * width, (group + 1) * width)
    return [(convolved(module, x, group, i), J[(slice(None), mine, *i)]) for i in np.ndindex(J.shape[2:])]


def kfac(
    model: nn.Sequential,
    inputs: Tensor,
    roots: list[np.ndarray],
    name: str,
    *,
    sharing: str = "expand",
    bias: bool = False,
    group: int = 0,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return A, B and the gradients (p, q) of each example and column; `roots` has the matrix S of each loss term."""
    A, B, gradients, count = 0.0, 0.0, [], 0
    for x, S in zip(inputs, roots, strict=True):
        layer = observed_layers(model, x)[name]
        vectors = [(np.append(a, 1.0) if bias else a, J) for a, J in pairs(layer, group)]
        if sharing == "reduce":
            mean = sum(a for a, _ in vectors) / len(vectors)
            A, count = A + np.outer(mean, mean), count + 1
        else:
            A, count = A + sum(np.outer(a, a) for a, _ in vectors), count + len(vectors)
        for column in S.T:
            gs = [np.tensordot(column, J, 1) for _, J in vectors]
            terms = [sum(gs)] if sharing == "reduce" else gs
            B = B + sum(np.outer(g, g) for g in terms)
            gradients.append(sum(np.outer(g, a) for g, (a, _) in zip(gs, vectors, strict=True)))
    return A / count, B, gradients


def coordinates(model: nn.Module, names: list[str], layer: str, group: int, bias: bool) -> np.ndarray:
    """Return the positions of a layer's block (p, q) in the flat vector of all parameters."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    starts = {name: sum(sizes[each] for each in names[:i]) for i, name in enumerate(names)}
    module = model.get_submodule(layer)
    places = starts[f"{layer}.weight"] + np.arange(sizes[f"{layer}.weight"]).reshape(len(module.weight), -1)
    if isinstance(module, nn.Embedding):
        return places.T
    width = len(places) // getattr(module, "groups", 1)
    mine = slice(group * width, (group + 1) * width)
    if not bias:
        return places[mine]
    biases = starts[f"{layer}.bias"] + np.arange(len(places))
    return np.concatenate([places[mine], biases[mine, None]], axis=1)


def dense(p: "Problem", sharing: str, joined: bool, correct: Any = None) -> np.ndarray:
    """Return the whole matrix; `correct` computes other blocks from layer, group, part, A, B and gradients."""
    names = list(p.x)
    matrix = np.zeros((sum(leaf.numel() for leaf in p.x.values()),) * 2)
    for layer, module in p.model.named_children():
        if not list(module.parameters()):
            continue
        embedding = isinstance(module, nn.Embedding)
        groups = getattr(module, "groups", 1)
        for group in range(groups):
            with_bias = joined and not embedding
            how = {"sharing": "expand" if embedding else sharing, "bias": with_bias, "group": group}
            A, B, gradients = kfac(p.model, p.inputs, p.roots, layer, **how)
            places = coordinates(p.model, names, layer, group, with_bias).reshape(-1)
            block = np.kron(B, A) if correct is None else correct(layer, group, "weight", A, B, gradients)
            matrix[np.ix_(places, places)] = block
            if not joined and not embedding:
                both = coordinates(p.model, names, layer, group, True)
                block = B
                if correct is not None:
                    block = correct(layer, group, "bias", np.eye(1), B, bias_gradients(p, layer, group))
                matrix[np.ix_(both[:, -1], both[:, -1])] = block
    return matrix


def bias_gradients(p: "Problem", layer: str, group: int) -> list[np.ndarray]:
    """Return the gradients of a bias, (p, 1)."""
    _, _, gradients = kfac(p.model, p.inputs, p.roots, layer, bias=True, group=group)
    return [g[:, -1:] for g in gradients]


def corrected(Q: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Project the second moment of gradients on matrices with eigenvectors Q."""
    exact = sum(np.outer(g.reshape(-1), g.reshape(-1)) for g in gradients)
    return Q @ np.diag(np.diag(Q.T @ exact @ Q)) @ Q.T


def softmax_root(z: np.ndarray) -> np.ndarray:
    """Return S of the cross-entropy of one example."""
    p = np.exp(z - z.max())
    p /= p.sum()
    return np.diag(np.sqrt(p)) - np.outer(p, np.sqrt(p))


def squares_root(z: np.ndarray) -> np.ndarray:
    """Return S of the sum of squares."""
    return np.sqrt(2) * np.eye(z.size)


def logistic_root(z: np.ndarray) -> np.ndarray:
    """Return S of the sum of binary cross-entropies."""
    p = 1 / (1 + np.exp(-z.reshape(-1)))
    return np.diag(np.sqrt(p * (1 - p)))


@dataclass(frozen=True)
class Case:
    """A chain of layers, and a loss with a known root S."""

    model: Callable[[], nn.Sequential]
    inputs: Callable[[], Tensor]
    loss: Callable[..., Tensor]
    root: Callable[[np.ndarray], np.ndarray]
    targets: Callable[[Tensor], Tensor]
    factors: Callable[[Tensor], int]


def _classes(z: Tensor) -> Tensor:
    return torch.randint(z.shape[1], (len(z),))


def _flat(*layers: nn.Module, out: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.LazyLinear(out))


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(5, 3),
        F.cross_entropy,
        softmax_root,
        _classes,
        len,
    ),
    "tokens": Case(
        lambda: _flat(nn.Embedding(6, 3, padding_idx=2), nn.Linear(3, 4), out=2),
        lambda: torch.tensor([[0, 1, 1, 2], [3, 0, 0, 5], [4, 4, 2, 1]]),
        F.mse_loss,
        squares_root,
        torch.randn_like,
        Tensor.numel,
    ),
    "conv1d": Case(
        lambda: _flat(nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2), out=2),
        lambda: torch.randn(4, 4, 6),
        F.binary_cross_entropy_with_logits,
        logistic_root,
        torch.rand_like,
        Tensor.numel,
    ),
    "conv2d": Case(
        lambda: _flat(nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 1)), out=3),
        lambda: torch.randn(4, 2, 4, 4),
        F.cross_entropy,
        softmax_root,
        _classes,
        len,
    ),
    "conv3d": Case(
        lambda: _flat(nn.Conv3d(2, 2, 2, groups=2), out=2),
        lambda: torch.randn(3, 2, 3, 2, 3),
        F.mse_loss,
        squares_root,
        torch.randn_like,
        Tensor.numel,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A case with random parameters, inputs and targets."""

    model: nn.Sequential
    loss: Callable[..., Tensor]
    x: dict[str, Tensor]
    inputs: Tensor
    targets: Tensor
    roots: list[np.ndarray]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.model, self.loss, self.x, self.inputs, self.targets


def problem(name: str) -> Problem:
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            model, inputs = case.model(), case.inputs()
            outputs = model(inputs).detach()
            targets = case.targets(outputs)
        finally:
            torch.set_default_dtype(torch.float32)
    roots = [case.root(z.numpy()) / np.sqrt(case.factors(outputs)) for z in outputs]
    return Problem(model, case.loss, dict(model.named_parameters()), inputs, targets, roots)
