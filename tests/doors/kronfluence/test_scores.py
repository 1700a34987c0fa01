"""EK-FAC influence scores of kronfluence, against hodiff's EKFACOperator with the same factors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import nn
from torch.utils.data import TensorDataset

import hodiff

D = torch.float64
COVARIANCES = ("activation_covariance_dtype", "gradient_covariance_dtype", "eigendecomposition_dtype")
FACTORS = dict.fromkeys((*COVARIANCES, "per_sample_gradient_dtype", "lambda_dtype"), D)
SCORES = dict.fromkeys(("per_sample_gradient_dtype", "precondition_dtype", "score_dtype"), D)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = self.mix(x.view(-1, 4, 6)).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v)).mean(1)


MODELS = {
    "perceptron": lambda: nn.Sequential(
        nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(30, 3)
    ),
    "attention": Attention,
}


class Classification(Task):
    def compute_train_loss(self, batch, model, sample=False):
        x, labels = batch
        outputs = model(x)
        if sample:
            labels = torch.multinomial(outputs.detach().softmax(-1), 1)[:, 0]
        return F.cross_entropy(outputs, labels, reduction="sum")

    def compute_measurement(self, batch, model):
        return self.compute_train_loss(batch, model)


def draw(name, count=40, queries=7):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    training, held_out = ((torch.randn(n, 24, dtype=D), torch.randint(3, (n,))) for n in (count, queries))
    return model, training, held_out


def kronfluence_scores(model, training, held_out, damping, folder, **factors):
    task = Classification()
    analyzer = Analyzer(
        "model", prepare_model(copy.deepcopy(model), task), task, output_dir=str(folder), cpu=True, disable_tqdm=True
    )
    train, query = TensorDataset(*training), TensorDataset(*held_out)
    analyzer.fit_all_factors(
        "factors", train, per_device_batch_size=8, factor_args=FactorArguments(strategy="ekfac", **FACTORS, **factors)
    )
    analyzer.compute_pairwise_scores(
        "scores",
        "factors",
        query,
        train,
        per_device_query_batch_size=len(query),
        per_device_train_batch_size=8,
        score_args=ScoreArguments(damping_factor=damping, **SCORES),
    )
    return analyzer.load_pairwise_scores("scores")["all_modules"]


def gradients(model, x, data):
    def loss(x, inputs, label):
        return F.cross_entropy(torch.func.functional_call(model, x, (inputs[None],)), label[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(x, *data)
    return torch.cat([found[name].flatten(1) for name in x], dim=1)


def hodiff_scores(model, training, held_out, damping, fisher):
    x = {name: p.detach() for name, p in model.named_parameters()}
    A = hodiff.EKFACOperator(model, nn.CrossEntropyLoss(), x, *training, fisher=fisher)
    with hodiff.corrected():
        return gradients(model, x, held_out) @ (A.inverse(damping=damping) @ gradients(model, x, training).T)


@pytest.mark.parametrize("damping", [1e-3, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_scores_agree_with_the_same_factors(name, damping, tmp_path):
    problem = draw(name)
    found = kronfluence_scores(*problem, damping, tmp_path, use_empirical_fisher=True)
    expected = hodiff_scores(*problem, damping, "empirical")
    torch.testing.assert_close(expected, found, rtol=1e-9, atol=1e-9 * float(found.abs().max()))
    # With other factors they would not agree.
    other = hodiff_scores(*problem, damping, "exact")
    assert (other - found).norm() > 0.01 * found.norm()


def test_scores_by_drawn_targets_approach_those_of_the_exact_expectation(tmp_path):
    """kronfluence draws one target for each example; on copies of the data it draws many."""
    model, training, held_out = draw("perceptron")
    exact = hodiff_scores(model, training, held_out, 0.1, "exact")
    distances = []
    for copies in (1, 50):
        torch.manual_seed(0)
        many = tuple(torch.cat([each] * copies) for each in training)
        found = kronfluence_scores(model, many, held_out, 0.1, tmp_path / str(copies))[:, :40]
        distances.append(float((found - exact).norm() / exact.norm()))
    assert distances[1] < 0.3 * distances[0]
    assert distances[1] < 0.05


def test_corrected_attention_changes_no_score(tmp_path):
    problem = draw("attention")
    plain = kronfluence_scores(*problem, 0.1, tmp_path / "plain", use_empirical_fisher=True)
    with hodiff.corrected():
        found = kronfluence_scores(*problem, 0.1, tmp_path / "corrected", use_empirical_fisher=True)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)
