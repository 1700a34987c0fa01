"""Tests of inverses, spectra and norms in closed form against the dense matrix, and of the common operator methods."""

import copy
import pickle
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import close
from operators.kfac.by_hand import problem
from torch import Tensor, nn

import hodiff

OF_EXAMPLES = [hodiff.operators.ShampooOperator, partial(hodiff.operators.KFOCOperator, iterations=1000)]
KINDS = pytest.mark.parametrize(
    "kind", [hodiff.KFACOperator, hodiff.EKFACOperator, *OF_EXAMPLES], ids=["KFAC", "EKFAC", "Shampoo", "KFOC"]
)


def mixed(kind: Any, **options: Any) -> Any:
    """Return the operator of a network with every kind of block: embedding, grouped, normalization and linear."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Conv1d(6, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    inputs, y = torch.randint(5, (7, 6)), torch.randint(3, (7,))
    if kind in OF_EXAMPLES:
        options.pop("sharing", None)
    return kind(model, F.cross_entropy, dict(model.named_parameters()), inputs, y, **options)


@KINDS
@pytest.mark.parametrize("options", [{}, {"bias": "separate", "norm": "diagonal", "sharing": "reduce"}])
def test_spectra_inverses_and_norms_match_dense_matrix(kind: Any, options: dict[str, str]) -> None:
    A = mixed(kind, **options)
    M, n = A.to_dense(), A.shape[0]
    I = torch.eye(n).double()  # noqa: E741
    close(M, M.mT, 1e-14)
    V = torch.randn(n, 3).double()
    close(A @ V, M @ V)
    close(A @ V[:, 0], M @ V[:, 0])
    close(ravel(A @ A.to_tree(V[:, 1])), M @ V[:, 1])
    close(A.diagonal().value, M.diagonal())
    assert A.trace().value == pytest.approx(float(M.trace()), rel=1e-12)
    assert A.frobenius_norm().value == pytest.approx(float(M.norm()), rel=1e-12)
    damped = M + 0.1 * I
    assert A.logdet(damping=0.1).value == pytest.approx(float(damped.logdet()), rel=1e-12)
    assert A.det(damping=0.1).value == pytest.approx(float(damped.det()), rel=1e-10)
    assert A.det().value == pytest.approx(0.0, abs=1e-100)
    close(A.inverse(damping=0.1).to_dense(), torch.linalg.inv(damped), 1e-11)
    pairs = A.eigh()
    close(pairs.eigenvalues, torch.linalg.eigvalsh(M), 1e-12)
    Q = pairs.eigenvectors.to_dense()
    close(Q.mT @ Q, I)
    close(Q @ torch.diag(pairs.eigenvalues) @ Q.mT, M)
    close(pairs.eigenvectors.T @ V, Q.mT @ V)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("options", [{}, {"bias": "separate", "sharing": "reduce"}])
def test_transposed_linear_layers_of_transformers(kind: Any, options: dict[str, str]) -> None:
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    known = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    model = nn.Sequential(layer(4, 3), nn.Tanh(), layer(3, 4), nn.Flatten(), nn.Linear(6, 3)).double()
    transposed = {"0.weight", "2.weight"}

    def moved(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.mT if name in transposed else each for name, each in tree.items()}

    x = {name: each.detach() for name, each in known.named_parameters()}
    model.load_state_dict(moved(x))
    data = torch.randn(7, 2, 3).double(), torch.randint(3, (7,))
    # Shampoo and KFOC have no options for shared weights.
    options = {name: each for name, each in options.items() if name in signature(kind).parameters}
    A = kind(known, F.cross_entropy, x, *data, **options)
    B = kind(model, F.cross_entropy, dict(model.named_parameters()), *data, **options)
    v = {name: torch.randn_like(each) for name, each in x.items()}
    for P, Q in ((A, B), (A.inverse(damping=0.1), B.inverse(damping=0.1))):
        expected = moved(P @ v)
        for name, each in (Q @ moved(v)).items():
            close(each, expected[name], 1e-11)


def identity(M: Tensor) -> Tensor:
    return torch.eye(len(M), dtype=M.dtype)


@pytest.mark.parametrize("kind", [hodiff.KFACOperator, hodiff.EKFACOperator])
@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda A: 6 * A, lambda M: 6 * M),
        (lambda A: A / torch.tensor(4.0), lambda M: M / 4),
        (lambda A: -A, lambda M: -M),
        (lambda A: A.damped(0.3), lambda M: M + 0.3 * identity(M)),
        (lambda A: (2 * A).damped(0.3) / 5, lambda M: (2 * M + 0.3 * identity(M)) / 5),
        (lambda A: A.inverse(damping=0.1) * 3, lambda M: 3 * torch.linalg.inv(M + 0.1 * identity(M))),
    ],
    ids=["multiple", "quotient", "negative", "damped", "several", "inverse"],
)
def test_multiples_and_damped_operators_match_dense_matrix(kind: Any, change: Any, number: Any) -> None:
    A = change(mixed(kind))
    M = number(mixed(kind).to_dense())
    close(A.to_dense(), M, 1e-11)
    for found, expected in (
        (A.trace(), M.trace()),
        (A.frobenius_norm(), M.norm()),
        (A.logdet(damping=2 * float(M.norm())), (M + 2 * M.norm() * identity(M)).logdet()),
    ):
        assert (found.products, found.standard_error) == (0, 0.0)
        assert found.value == pytest.approx(float(expected), rel=1e-10)
    close(A.eigh().eigenvalues, torch.linalg.eigvalsh(M), 1e-10)


def test_differentiable_factor_is_differentiated() -> None:
    A = mixed(hodiff.KFACOperator)
    v = torch.ones(A.shape[1], dtype=A.dtype)
    factor = torch.tensor(2.0, dtype=A.dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(v @ ((factor * A) @ v), factor)
    assert float(slope) == pytest.approx(float(v @ (A @ v)))


def test_inverse_operator_matches_dense_inverse() -> None:
    A = mixed(hodiff.KFACOperator)
    inverse = A.inverse(damping=0.1)
    M = torch.linalg.inv(A.to_dense() + 0.1 * torch.eye(A.shape[0]).double())
    assert inverse.trace().value == pytest.approx(float(M.trace()), rel=1e-12)
    assert inverse.logdet().value == pytest.approx(-A.logdet(damping=0.1).value, rel=1e-12)
    close(inverse.diagonal().value, M.diagonal(), 1e-11)
    close(inverse.inverse().to_dense(), torch.linalg.inv(M), 1e-11)
    assert sorted(inverse @ A.x) == sorted(A.x)
    assert inverse.to(dtype=torch.float32).to_dense().dtype is torch.float32
    v = torch.randn(A.shape[0]).double()
    close(A.inverse("cg", damping=0.1, tol=1e-12) @ v, inverse @ v, 1e-9)


def test_heuristic_damping_matches_formula() -> None:
    """Every damped factor matches its formula."""
    p = problem("mlp")
    A, damping = hodiff.KFACOperator(*p.arguments, bias="separate"), 0.01
    expected = []
    for block in A.blocks:
        (a,), (b,) = block.A, block.B
        pi = ((a.trace() / len(a)) / (b.trace() / len(b))) ** 0.5
        left = torch.linalg.inv(b + damping**0.5 / pi * torch.eye(len(b)).double())
        expected.append(torch.kron(left, torch.linalg.inv(a + pi * damping**0.5 * torch.eye(len(a)).double())))
    close(A.inverse("heuristic", damping=damping).to_dense(), torch.block_diag(*expected), 1e-11)


def test_regular_matrix_needs_no_damping() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    inputs = torch.randn(20, 2).double()
    A = hodiff.KFACOperator(model, F.mse_loss, dict(model.named_parameters()), inputs, inputs)
    M = A.to_dense()
    close(A.inverse().to_dense() @ M, torch.eye(12).double(), 1e-10)
    assert A.logdet().value == pytest.approx(float(M.logdet()))
    assert A.det().value == pytest.approx(float(M.det()))


@KINDS
def test_rejects_inverse_of_singular_operators(kind: Any) -> None:
    A = mixed(kind)
    with pytest.raises(hodiff.InputError, match=r"inverse: damping: expected more than the rounding"):
        A.inverse()
    with pytest.raises(hodiff.InputError, match=r"logdet: damping: expected more than the rounding"):
        A.logdet()


@KINDS
def test_copies_and_conversions_keep_the_matrix(kind: Any) -> None:
    A = mixed(kind, fisher="monte-carlo", samples=2)
    M = A.to_dense()
    for twin in (copy.deepcopy(A), pickle.loads(pickle.dumps(A)), mixed(kind, fisher="monte-carlo", samples=2)):
        close(twin.to_dense(), M, 0)
    # The copy includes the factors; a new operator computes them.
    assert pickle.loads(pickle.dumps(A)).blocks[0].layout == A.blocks[0].layout
    single = A.to(dtype=torch.float32)
    assert single.to_dense().dtype is torch.float32
    moved = {name: value + 0.1 for name, value in A.x.items()}
    other = A.at(moved)
    assert (other.to_dense() - M).norm() > 1e-3 * M.norm()
    close(other.at(A.x).to_dense(), M, 0)
    close(A.to_dense(), M, 0)
    # Leaves 5 and 6 belong to layer "5".
    rows = torch.cat([torch.arange(M.shape[0])[place] for place in A.domain.select([5, 6])])
    close(A.block("5").to_dense(), M[rows][:, rows])


@KINDS
def test_lower_precision_matches_float64(kind: Any) -> None:
    exact = mixed(kind).to_dense()
    A = mixed(kind)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        lower = A.to(dtype=dtype)
        assert lower.to_dense().dtype is torch.float32
        # Eigenvectors of equal eigenvalues are not unique, but the trace does not depend on them.
        assert lower.trace().value == pytest.approx(float(exact.trace()), rel=tolerance)


@KINDS
def test_subsets_of_parameters_are_accepted(kind: Any) -> None:
    """The parameters may be from some layers, or a weight without its bias."""
    p = problem("mlp")
    model, loss, x, *rest = p.arguments
    whole = kind(model, loss, x, *rest, bias="separate").to_dense()
    some = kind(model, loss, {name: x[name] for name in ("2.bias", "0.weight")}, *rest).to_dense()
    sizes = [leaf.numel() for leaf in x.values()]
    rows = torch.cat([torch.arange(sum(sizes[:3]), sum(sizes)), torch.arange(sizes[0])])
    close(some, whole[rows][:, rows])


def test_in_place_layers_and_buffers_are_left_unchanged() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    layers = [nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).eval()
    inputs, y = torch.randn(6, 3), torch.randint(2, (6,))
    x = dict(model.named_parameters())
    expected = hodiff.KFACOperator(model, F.cross_entropy, x, inputs, y).to_dense()
    model[2] = nn.ReLU(inplace=True)
    A = hodiff.KFACOperator(model, F.cross_entropy, x, inputs, y)
    close(A.to_dense(), expected, 0)
    assert norm.num_batches_tracked == 0
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sum_reduction_is_a_multiple_of_mean() -> None:
    p = problem("mlp")
    model, loss, x, inputs, y = p.arguments
    for fisher, factor in (("exact", 5), ("monte-carlo", 5), ("empirical", 5)):
        mean = hodiff.KFACOperator(model, loss, x, inputs, y, fisher=fisher).to_dense()
        summed = partial(loss, reduction="sum")
        for given in ({"data": [(inputs, y)]}, {"data": [(inputs[:2], y[:2]), (inputs[2:], y[2:])]}):
            if fisher == "monte-carlo" and len(given["data"]) > 1:
                continue  # different draws
            A = hodiff.KFACOperator(model, summed, x, reduction="sum", fisher=fisher, **given)
            close(A.to_dense(), factor * mean)


def masked_mean(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=1, reduction="sum") / (y != 1).sum()


CUT_ALIKE = {
    "class weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]).double()), {}),
    "ignored": (partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1]).double(), ignore_index=1), {}),
    "another loss": (masked_mean, {"batch_size": lambda batch: (batch[1] != 1).sum()}),
}


@pytest.mark.one_in(3)
@KINDS
@pytest.mark.parametrize("cuts", [[3, 3], [2, 4], [2, 2, 2]])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize(("loss", "told"), CUT_ALIKE.values(), ids=CUT_ALIKE)
def test_matrix_does_not_depend_on_the_batch_split(
    kind: Any, cuts: list[int], fisher: str, loss: Any, told: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, y = torch.randn(6, 3).double(), torch.tensor([0, 1, 2, 0, 2, 2])
    x = dict(model.named_parameters())
    data = list(zip(inputs.split(cuts), y.split(cuts), strict=True))
    whole = kind(model, loss, x, inputs, y, fisher=fisher)
    close(kind(model, loss, x, data=data, fisher=fisher, **told).to_dense(), whole.to_dense())


def test_empirical_blocks_with_class_weights_match_closed_form() -> None:
    r"""The factor B of one linear layer is M / D^2 times the sum of w^2 (p - e_y) (p - e_y)^T."""
    torch.manual_seed(0)
    layer, weight = nn.Linear(3, 2).double(), torch.tensor([1.0, 5.0]).double()
    inputs, y = torch.randn(6, 3).double(), torch.tensor([0, 0, 1, 1, 0, 1])
    data = list(zip(inputs.split([2, 4]), y.split([2, 4]), strict=True))
    loss, x = nn.CrossEntropyLoss(weight=weight), dict(layer.named_parameters())
    (block,) = hodiff.KFACOperator(layer, loss, x, data=data, fisher="empirical").blocks
    g = weight[y][:, None] * (layer(inputs).softmax(1) - F.one_hot(y, 2)).detach()
    close(block.B[0], 6 / weight[y].sum() ** 2 * g.T @ g)
    a = torch.cat([inputs, torch.ones(6, 1).double()], 1)
    close(block.A[0], a.T @ a / 6)


class Batch(nn.Module):
    """A model whose input is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["inputs"])


def test_dict_batches_are_accepted() -> None:
    torch.manual_seed(0)
    model = Batch().double()
    batch = {"inputs": torch.randn(5, 3).double(), "labels": torch.randint(2, (5,))}
    loss = lambda z, batch: F.cross_entropy(z, batch["labels"])  # noqa: E731
    x = dict(model.named_parameters())
    A = hodiff.KFACOperator(model, loss, x, batch)
    plain = hodiff.KFACOperator(
        model.layer, F.cross_entropy, dict(model.layer.named_parameters()), batch["inputs"], batch["labels"]
    )
    close(A.to_dense(), plain.to_dense())
    close(hodiff.KFACOperator(model, loss, x, data=[batch], batch_size=lambda b: 5).to_dense(), plain.to_dense())


@pytest.mark.parametrize("cut", [False, True], ids=["plain", "with a detached constant"])
def test_first_evaluation_without_check_records_one_call_of_each_layer(cut: bool) -> None:
    """Warnings of a function's first run compare it at other parameters, whose calls must not be recorded."""
    calls = []

    class Counted(nn.Module):  # its code must be new to the process
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            z = self.first(x).tanh()
            return self.last(z + 0 * z.detach() if cut else z)

    torch.manual_seed(0)
    model = Counted().double()
    inputs, y = torch.randn(6, 3).double(), torch.randint(2, (6,))
    blocks = hodiff.KFACOperator(model, F.cross_entropy, dict(model.named_parameters()), inputs, y, check=False).blocks
    assert (len(calls) == 1) is not cut
    a = torch.cat([model.first(inputs).tanh(), torch.ones(6, 1).double()], 1).detach()
    close(blocks[1].A[0], a.T @ a / 6)


@pytest.mark.parametrize("chunk_size", ["auto", 2])
def test_large_layers_pulled_back_in_turn_have_the_same_factors_and_diagonal(chunk_size: Any) -> None:
    """On a CPU, "auto" pulls columns back one by one if the gradients of layers are large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 512), nn.Tanh(), nn.Linear(512, 3)).double()
    inputs, y = torch.randn(256, 2).double(), torch.randint(3, (256,))
    x = dict(model.named_parameters())
    A = hodiff.KFACOperator(model, F.cross_entropy, x, inputs, y, chunk_size=chunk_size, check=False)
    whole = hodiff.KFACOperator(model, F.cross_entropy, x, inputs, y, chunk_size=None, check=False)
    for block, expected in zip(A.blocks, whole.blocks, strict=True):
        close(block.B, expected.B)
        close(block.A, expected.A)
    G = hodiff.GaussNewtonOperator(model, F.cross_entropy, x, inputs, y, check_deterministic=False)
    found, expected = (G.diagonal(exact=True, chunk_size=size).value for size in (chunk_size, None))
    close(found, expected)
