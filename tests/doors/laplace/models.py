"""Small models whose parameters K-FAC supports, and others; and their Gauss-Newton matrix by torch alone."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    """An autoencoder that decodes with the weight of its encoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.bias = nn.Linear(3, 5), nn.Parameter(0.1 * torch.ones(3))

    def forward(self, x):
        return torch.tanh(self.encoder(x.mean(1)[:, :3])) @ self.encoder.weight + self.bias


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, x):
        return self.layers(x[:, None])


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(20, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers(x)


MODELS = {each.__name__: each for each in (Perceptron, Convolutions, Attention, Recurrent, Tied)}


def draw(name, likelihood="classification", count=12):
    """Return a model in float64, inputs of five tokens and targets."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    inputs = torch.randn(count, 5, 4).double()
    if likelihood == "classification":
        return model, inputs, torch.randint(3, (count,))
    return model, inputs, torch.randn(count, 3).double()


def jacobians(model, inputs):
    """Jacobians (examples, outputs, parameters), one gradient at a time."""
    parameters = list(model.parameters())
    rows = []
    for each in inputs:
        f = model(each[None])[0]
        gradients = [torch.autograd.grad(one, parameters, retain_graph=True) for one in f]
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in each]) for each in gradients]))
    return torch.stack(rows)


def gauss_newton(model, inputs, likelihood="classification"):
    J = jacobians(model, inputs)
    p = model(inputs).detach().softmax(1)
    if likelihood == "regression":
        return torch.einsum("ncp,ncq->pq", J, J)
    return torch.einsum("ncp,nck,nkq->pq", J, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], J)
