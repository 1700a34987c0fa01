"""Tests of inner loops, optimizers and learners with gradgradcheck and SciPy's Hessian; hypergradients with SciPy."""

import inspect

import pytest
import torch
from drawing import draw
from meta.problems import batch, mse, quartic
from second_order import Row, assert_listed, assert_second_order, parametrize_by_rows, public
from torch import Tensor, nn
from torch.func import functional_call

from hodiff import meta
from hodiff.checks import scipy_hessian

X, SHIFT, RATE = draw(2), draw(2, seed=1), torch.tensor(0.05, dtype=torch.float64)
OPTIMIZERS = [
    name
    for name, value in vars(meta).items()
    if inspect.isclass(value) and issubclass(value, meta.Optimizer) and value is not meta.Optimizer
]


def adapted_by(name: str):
    """Run two steps, as a function of the start, a closed-over tensor and the learning rate."""
    return lambda w, shift, lr: meta.adapt(quartic, w, shift, getattr(meta, name)(lr), 2)


def by_torchs(shift: Tensor, size: Tensor) -> Tensor:
    """Run two steps from the start in a torch optimizer, as a function of the closed-over tensors."""
    start = nn.Parameter(X.clone())
    optimizer, state = meta.from_torch(torch.optim.Adam([start], lr=0.05))

    def loss(params: list[Tensor], task: tuple[Tensor, Tensor]) -> Tensor:
        return quartic(params[0], task[0]) * task[1]

    return meta.adapt(loss, [start.detach()], (shift, size), optimizer, 2, state=state)[0]


TASKS = tuple(torch.stack(parts) for parts in zip((*batch(0), *batch(1)), (*batch(2), *batch(3)), strict=True))
NETWORK = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()


def of_learner(learner: meta.MetaLearner) -> Row:
    """Return the meta-objective as a function of all learned parameters."""
    names, values = zip(*learner.named_parameters(), strict=True)
    values = tuple(draw(*each.shape, seed=i) / 2 for i, each in enumerate(values))
    objective = lambda *leaves: functional_call(learner, dict(zip(names, leaves, strict=True)), (TASKS,))  # noqa: E731
    return Row(type(learner).__name__, objective, values, atol=1e-4)


ROWS = [
    Row("adapt", adapted_by("SGD"), (X, SHIFT, RATE), step=0.02),
    *(
        Row(name, adapted_by(name), (X, SHIFT, RATE), step=0.004, atol=1e-4, slow=name not in ("SGD", "Adam"))
        for name in OPTIMIZERS
    ),
    Row("from_torch", by_torchs, (SHIFT, RATE + 1), step=0.004, atol=1e-4),
    of_learner(meta.MAML(NETWORK, mse, 0.1, 2)),
    of_learner(meta.ANIL(NETWORK, mse, 0.1, 2)),
    of_learner(meta.MetaSGD(NETWORK, mse, 0.1, 2)),
]
WITHOUT = {
    "FOMAML": "its meta-gradient leaves second derivatives out, which is no derivative of its loss",
    "Reptile": "its meta-gradient is the way to where the inner loop ends",
    "IMAML": "its meta-gradient is that at the inner minimum, to which tests hold it (test_imaml_higher.py)",
    "MetaLearner": "the base class",
    "Optimizer": "the base class",
    "OptimizerState": "a result",
    "Adaptation": "a result",
    "Hypergradient": "a result",
    "hypergradient": "returns numbers without a graph; see below",
}


def test_every_public_name_has_a_row():
    assert_listed(public(meta), ROWS, WITHOUT)


@pytest.mark.one_in(8)
@parametrize_by_rows(ROWS)
def test_passes_gradgradcheck_and_scipy_hessian(row):
    assert_second_order(row)


WEIGHTS = draw(2, seed=5)


def inner(w: Tensor, h: Tensor) -> Tensor:
    return (w - h.sin()).square().sum() + (w[0] * w[1] * h[0]) / 4


def outer(w: Tensor, h: Tensor) -> Tensor:
    return (w**3).sum() + h.square().sum()


def minimum(h: Tensor) -> Tensor:
    A = 2 * torch.eye(2, dtype=h.dtype) + h[0] / 4 * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=h.dtype)
    return torch.linalg.solve(A, 2 * h.sin())


@pytest.mark.parametrize("method", ["implicit-cg", "neumann", "nystrom"])
def test_hypergradients_match_scipy(method):
    """SciPy differentiates t -> t * outer(minimum(h + s d)); its mixed second derivative is the derivative along d."""
    options = {"damping": 1e-8, "iterations": 2} if method == "nystrom" else {"tolerance": 1e-10}
    found = meta.hypergradient(outer, inner, minimum(WEIGHTS), WEIGHTS, method, **options).value
    direction = draw(2, seed=6)

    def value(ts: Tensor) -> Tensor:
        h = WEIGHTS + ts[1] * direction
        return ts[0] * outer(minimum(h), h)

    slope = scipy_hessian(value, torch.zeros(2), initial_step=0.05).matrix[0, 1]
    torch.testing.assert_close(found @ direction, slope, rtol=1e-6, atol=1e-6)
