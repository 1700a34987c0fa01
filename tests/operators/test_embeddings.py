"""Operators refuse embeddings whose gradients are no derivatives, or that change the point."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff

ROWS, LABELS = torch.tensor([[0, 1, 1, 4], [2, 2, 2, 3]]), torch.tensor([0, 2])


class Words(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.words, self.read = kind(9, 4, **options), nn.Linear(4, 3)

    def forward(self, rows):
        found = self.words(rows)
        return self.read((found.mean(1) if found.dim() == 3 else found).tanh())


def hessian(model, x):
    return hodiff.HessianOperator(lambda p: F.cross_entropy(torch.func.functional_call(model, p, (ROWS,)), LABELS), x)


OPERATORS = {
    "f": hessian,
    "model": lambda model, x: hodiff.GaussNewtonOperator(model, F.cross_entropy, x, ROWS, LABELS),
    "Gram": lambda model, x: hodiff.GramOperator(model, x, ROWS),
}


@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["scale_grad_by_freq", "max_norm"])
def test_embeddings_without_derivatives_are_refused(make, kind, option):
    model = Words(kind, **{option: 0.5 if option == "max_norm" else True}).double()
    x = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = {name: p.clone() for name, p in x.items()}
    with pytest.raises(hodiff.RouteError, match=rf"embedding{'_bag' * (kind is nn.EmbeddingBag)}: expected .*{option}"):
        make(model, x).to_dense()
    assert all(torch.equal(x[name], before[name]) for name in x)
    assert make(Words(kind).double(), x).to_dense().isfinite().all()
    if option == "scale_grad_by_freq":  # of other parameters the gradients are derivatives
        head = {name: p for name, p in x.items() if name.startswith("read")}
        A = make(model, head)
        torch.testing.assert_close(A.to_dense(), A @ torch.eye(A.shape[0], dtype=torch.float64))


def test_frozen_embeddings_below_larger_layers_are_accepted():
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(16, 3)).double()
    head = {name: p.detach() for name, p in model.named_parameters() if name.startswith("2.")}
    A = hessian(model, head)
    torch.testing.assert_close(A.to_dense(), A @ torch.eye(51, dtype=torch.float64))


def test_embeddings_within_a_vector_are_refused():
    model = nn.Embedding(9, 4, scale_grad_by_freq=True).double()

    def loss(x):
        return torch.func.functional_call(model, {"weight": x.view(9, 4)}, (ROWS,)).tanh().sum()

    with pytest.raises(hodiff.RouteError, match="embedding: expected scale_grad_by_freq=False"):
        hodiff.HessianOperator(loss, torch.ones(36, dtype=torch.float64)).to_dense()
