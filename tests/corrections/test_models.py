"""Unmodified models: all routes agree with each other and with differences of the gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import hodiff

D = torch.float64


def differences(function, x, v, step=3e-4):
    """Derivative of a function of a dictionary along v, by central differences of sixth order."""

    def at(t):
        return function({name: value + t * step * v[name] for name, value in x.items()})

    ahead, behind = ([at(sign * k) for k in (1, 2, 3)] for sign in (1, -1))
    weights = 45 / 60, -9 / 60, 1 / 60
    return {
        name: sum(w * (a[name] - b[name]) for w, a, b in zip(weights, ahead, behind, strict=True)) / step for name in x
    }


def largest_difference(found, truth):
    """Largest difference of two dictionaries, relative to the largest number."""
    scale = max(each.abs().max() for each in truth.values())
    return (max((found[name] - truth[name]).abs().max() for name in truth) / scale).item()


def assert_all_routes(loss, x):
    x = {name: value.detach().double() for name, value in x.items()}
    v = {name: torch.randn_like(value) for name, value in x.items()}
    gradient = hodiff.corrected()(torch.func.grad(loss))
    truth = differences(gradient, x, v)
    products = {route: hodiff.hvp(loss, x, v, route=route) for route in hodiff.ROUTES}
    for route, product in products.items():
        assert largest_difference(product, truth) < 1e-7, route
        assert largest_difference(product, products[hodiff.ROUTES[0]]) < 1e-9, route


def of_parameters(model, names, loss):
    """The loss as a function of the parameters whose names contain one of the words."""
    model = model.double()
    chosen = {name: p for name, p in model.named_parameters() if any(word in name for word in names)}
    assert chosen
    return (lambda parameters: loss(lambda *args, **kw: functional_call(model, parameters, args, kw))), chosen


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
# The encoder warns that it does not use its path for nested tensors.
@pytest.mark.one_in(9)
@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_transformer_encoder_derivatives_agree(norm_first, training, padded):
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2).double().requires_grad_(False).train(training)
    mask = torch.tensor([[False] * 3, [False, False, True]]) if padded else None

    def loss(x):
        output = model(x["x"], src_key_padding_mask=mask)
        return output[:, :2].sin().sum()

    assert_all_routes(loss, {"x": torch.randn(2, 3, 4)})


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_torch_alone_is_wrong_or_raises(route):
    """The tests of this file would prove nothing if torch alone were right."""
    model = nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True).double().requires_grad_(False)
    x, v = torch.randn(2, 3, 4, dtype=D), torch.randn(2, 3, 4, dtype=D)

    def loss(x):
        return model(x).sin().sum()

    try:
        by_torch = hodiff.hvp(loss, x, v, route=route, correct=False)
    except hodiff.RouteError:
        return
    assert not torch.allclose(by_torch, hodiff.hvp(loss, x, v, route=route), rtol=1e-3)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_derivatives_agree(need_weights):
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4, dtype=D)

    def loss(call):
        output, weights = call(x, x, x, need_weights=need_weights)
        return output.sin().sum() + (weights.square().sum() if need_weights else 0)

    assert_all_routes(*of_parameters(model, ["in_proj"], loss))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.network = nn.LSTM(3, 4, 2, batch_first=True)
        self.head = nn.Linear(4, 7)

    def forward(self, tokens, lengths=None):
        x = self.embedding(tokens)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=True)
        output, _ = self.network(x)
        return self.head(output if lengths is None else output.data)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lengths", [None, [5, 3]], ids=["padded", "packed"])
def test_lstm_language_model_derivatives_agree(lengths):
    tokens = torch.randint(7, (2, 6))
    targets = tokens[:, 1:]
    if lengths is not None:
        targets = pack_padded_sequence(targets, lengths, batch_first=True).data

    def loss(call):
        return F.cross_entropy(call(tokens[:, :-1], lengths).reshape(-1, 7), targets.flatten())

    assert_all_routes(*of_parameters(LanguageModel(), ["embedding", "ih_l0", "hh_l1", "head"], loss))


class Block(nn.Module):
    """A smooth residual block, so that differences are accurate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(2), nn.BatchNorm2d(2)])

    def forward(self, x):
        inner = F.silu(self.norms[0](self.first(x)))
        return F.silu(x + self.norms[1](self.second(inner)))


def test_residual_block_with_batch_norm_in_training_derivatives_agree():
    x = torch.randn(3, 2, 4, 4, dtype=D)
    assert_all_routes(*of_parameters(Block().train(), [""], lambda call: call(x).square().mean()))


TINY = {"vocab_size": 11, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 4}


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_hugging_face_model_derivatives_agree(name):
    transformers = pytest.importorskip("transformers")
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if name == "GPT2":
        config = transformers.GPT2Config(vocab_size=11, n_positions=6, n_embd=4, n_layer=1, n_head=2, **no_dropout)
        model, names = transformers.GPT2LMHeadModel(config), ["wte", "ln_1", "c_attn.weight"]
    else:
        config = transformers.BertConfig(**TINY, intermediate_size=6, max_position_embeddings=6)
        model, names = transformers.BertForMaskedLM(config).eval(), ["word_embeddings", "LayerNorm", "query.weight"]
    # Token 0 is BERT's padding, whose embedding has no gradient in torch, by convention.
    tokens = torch.randint(1, 11, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

    def loss(call):
        # The models' own loss is computed in float32.
        logits = call(input_ids=tokens, attention_mask=mask).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    assert_all_routes(*of_parameters(model, names, loss))


def critic():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)).double()


def of_norm(slope):
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def of_square(slope):
    return slope.flatten(1).square().sum(1).mean() / 2


@pytest.mark.parametrize("penalty", [of_norm, of_square], ids=["WGAN-GP", "R1"])
@pytest.mark.parametrize("model", ["critic", "encoder"])
def test_gradient_penalty_derivatives_agree(model, penalty):
    if model == "critic":
        model, x = critic(), torch.randn(3, 4, dtype=D)
    else:
        layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True)
        model, x = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 1)).double(), torch.randn(3, 3, 4, dtype=D)

    def loss(parameters):
        leaf = x.clone().requires_grad_()
        value = functional_call(model, parameters, leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        return penalty(slope)

    assert_gradient(loss, model)


def test_force_training_derivatives_agree():
    """Forces are minus the gradient of an energy by positions, from a normalized network with attention."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu"), nn.Linear(4, 1)
    ).double()
    places, forces = torch.randn(4, 3, dtype=D), torch.randn(4, 3, dtype=D)

    def loss(parameters):
        leaf = places.clone().requires_grad_()
        distances = (leaf[:, None] - leaf[None]).square().sum(-1).add(0.5).sqrt()
        energy = functional_call(model, parameters, distances).sum()
        (slope,) = torch.autograd.grad(energy, leaf, create_graph=True)
        return (-slope - forces).square().mean()

    assert_gradient(loss, model)


def assert_gradient(loss, model):
    """Compare `backward` with differences of the loss along a direction."""
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    v = {name: torch.randn_like(p) for name, p in parameters.items()}
    with hodiff.corrected():
        loss(parameters).backward()
    slope = sum((p.grad * v[name]).sum() for name, p in parameters.items() if p.grad is not None)

    def value(parameters):
        with hodiff.corrected():
            return {"loss": loss({name: p.detach() for name, p in parameters.items()}).detach()}

    start = {name: p.detach() for name, p in parameters.items()}
    # Differences are along one direction: the dictionary moves, and its value is one number.
    step, weights = 1e-3, (45 / 60, -9 / 60, 1 / 60)

    def at(t):
        return value({name: p + t * v[name] for name, p in start.items()})["loss"]

    truth = sum(w * (at(k * step) - at(-k * step)) for k, w in enumerate(weights, 1)) / step
    assert math.isclose(slope, truth, rel_tol=1e-8)
