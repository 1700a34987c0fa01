"""EK-FAC influence scores of kronfluence, against hodiff's EKFACOperator with the same factors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from doors.pages import run_example
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


def kronfluence_scores(model, training, held_out, damping, folder, task=None, **factors):
    task = task or Classification()
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


class Tokens(nn.Module):
    """Logits (N, C, T), with layers of which kronfluence has no factors and which are frozen."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.table.requires_grad_(False)

    def forward(self, x):
        z = self.table(x)
        return self.head(z + F.scaled_dot_product_attention(self.mix(z), z, z, is_causal=True)).transpose(1, 2)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(self.body(x).tanh()).tanh())


def perceptron(outputs, *, frozen=False):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))
    model[0].requires_grad_(not frozen)
    return model


def grouped():
    image, convolution = nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2), groups=2)
    return nn.Sequential(image, convolution, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def numbers(n):
    return torch.randn(n, 6, dtype=D)


def words(n):
    return torch.randint(9, (n, 5))


def labels(n):
    return torch.randint(3, (n,))


def labels_of_tokens(n):
    return torch.randint(3, (n, 5))


def some_labels_of_tokens(n):
    return labels_of_tokens(n).masked_fill(torch.rand(n, 5) < 0.3, -100)


class Other(Task):
    """A task for any loss, with the layers and tokens that count."""

    def __init__(self, loss, layers, padded):
        self.loss, self.layers, self.padded = loss, layers, padded

    def compute_train_loss(self, batch, model, sample=False):
        return self.loss(model(batch[0]), batch[1])

    def compute_measurement(self, batch, model):
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self):
        return self.layers

    def get_attention_mask(self, batch):
        return (batch[1] != -100).long() if self.padded else None


ENTROPY, SQUARE = nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="sum")
OTHERS = {
    "frozen layers": (lambda: perceptron(3, frozen=True), numbers, labels, ENTROPY, ["2", "4"]),
    "several outputs": (lambda: perceptron(2), numbers, lambda n: torch.randn(n, 2, dtype=D), SQUARE, None),
    "tokens": (Tokens, words, labels_of_tokens, ENTROPY, None),
    "padded tokens": (Tokens, words, some_labels_of_tokens, ENTROPY, None),
    "groups": (grouped, numbers, labels, ENTROPY, None),
    "several calls": (Twice, numbers, labels, ENTROPY, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_scores_of_sums(name, tmp_path):
    """The table of the page: "sum" agrees where kronfluence has the same factors."""
    make, inputs, targets, loss, layers = OTHERS[name]
    torch.manual_seed(0)
    n, damping, model = 30, 0.05, make().double()
    training, held_out = ((inputs(count), targets(count)) for count in (n, 6))
    task = Other(loss, layers, name == "padded tokens")
    options = {"use_empirical_fisher": True, "has_shared_parameters": name == "several calls"}
    found = kronfluence_scores(model, training, held_out, damping, tmp_path, task, **options)
    x = {path: p.detach() for path, p in model.named_parameters() if p.requires_grad}

    def gradients(data):
        def value(x, one, target):
            return loss(torch.func.functional_call(model, x, (one[None],)), target[None])

        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            each = torch.func.vmap(torch.func.grad(value), (None, 0, 0))(x, *data)
        return torch.cat([each[path].flatten(1) for path in x], dim=1)

    A = hodiff.EKFACOperator(model, loss, x, *training, fisher="empirical", reduction="sum")
    expected = n * (gradients(held_out) @ (A.inverse(damping=n * damping) @ gradients(training).T))
    distance = (expected - found).norm() / found.norm()
    assert distance > 0.01 if name in {"groups", "several calls"} else distance < 1e-12


def test_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example("guides/influence.md", "prepare_model(")
    torch.testing.assert_close(names["equal_scores"], names["scores"], rtol=1e-9, atol=1e-12)
    A = hodiff.EKFACOperator(
        names["net"], nn.CrossEntropyLoss(), names["x"], *names["train"].tensors, fisher="empirical"
    )
    mean = names["of_held_out"] @ (A.inverse(damping=names["damping"]) @ names["gradients"])
    torch.testing.assert_close(mean, names["scores"], rtol=1e-9, atol=1e-12)


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
