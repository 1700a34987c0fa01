"""Operators that torch differentiates rightly by every route, and plain functions of them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from zoo.bases import BIAS, MATRIX, WEIGHT, X, Y, double
from zoo.specimen import Right

POSITIVE = double(0.5, 1.2, 2.0)
REGULAR = double(3.0, 0.4, -0.2, 0.3, 2.0, 0.5, 0.1, -0.6, 4.0, shape=(3, 3))


def tanh_in_double(x):
    return x.tanh() * x


def network():
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


NETWORK = network()
PARAMETERS = {name: parameter.detach() for name, parameter in NETWORK.named_parameters()}


def loss_of_parameters(parameters, x):
    return functional_call(NETWORK, parameters, (x,)).square().mean()


def nested(tree):
    return {"y": tree["a"].sin() * tree["bs"][0], "z": [tree["bs"][1].exp().sum()]}


def with_options(x, power, name, missing=None):
    del name
    return x**power if missing is None else missing


def magnitude(re, im):
    """Compute with complex numbers, and return real ones."""
    z = torch.complex(re, im)
    return (z**3).abs() + (z * z.conj()).real.sum()


def spectrum(x):
    return torch.fft.fft(x).abs().square()


def written_in_place(x):
    y = x.clone()
    y[1:] *= x[:-1]
    y.add_(1)
    return y


def chosen(x):
    """Select a branch of `where` without NaN in the other branch."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).log(), x * x)


def with_scalars(x):
    """Use a scalar tensor, which any device accepts."""
    return x * torch.tensor(2.0, dtype=x.dtype) + torch.arange(3, dtype=x.dtype, device=x.device)


def unused(x, y):
    return x.exp() + 0 * y.sum()


def indexed(x, index):
    return x[index].prod(), x.cumsum(0)


def integer_output(x):
    values, order = (x * x).sort()
    return values, order


SPECIMENS = [
    Right("sin", torch.sin, X),
    Right("exp", torch.exp, X),
    Right("sigmoid", torch.sigmoid, X),
    Right("tanh", torch.tanh, X),
    Right("log", torch.log, POSITIVE),
    Right("sqrt", torch.sqrt, POSITIVE),
    Right("relu", torch.relu, X),
    Right("softplus", F.softplus, X),
    Right("logsigmoid", F.logsigmoid, X),
    Right("gelu", F.gelu, X),
    Right("add", torch.add, (X, Y)),
    Right("identity", lambda x: x.clone(), X),
    Right("negated", torch.neg, X),
    Right("product_of_broadcast", torch.mul, (MATRIX, Y)),
    Right("linear", F.linear, (MATRIX, WEIGHT, BIAS)),
    Right("matmul", torch.matmul, (MATRIX, WEIGHT.T)),
    Right("softmax", lambda x: x.softmax(-1), MATRIX),
    Right("logsumexp", lambda x: x.logsumexp(-1), MATRIX),
    Right("norm", torch.linalg.vector_norm, X),
    Right("inverse", torch.linalg.inv, REGULAR),
    Right("amax", lambda x: x.amax(-1), MATRIX),
    Right("transposed_view", lambda x: x.T[1:].flatten() ** 2, MATRIX),
    Right("expanded", lambda x: (x.expand(2, 3) * MATRIX).sum(), X),
    Right("float32", lambda x: x.tanh() * x, X.float()),
    Right("bfloat16", lambda x: x.tanh() * x, X.bfloat16()),
    Right(
        "float32_only", lambda x: (x.float().tanh() * x.float()).to(x.dtype), X.float(), {"reference": tanh_in_double}
    ),
    Right("functional_call", loss_of_parameters, (PARAMETERS, MATRIX)),
    Right("nested", nested, ({"a": X, "bs": [Y, BIAS]},)),
    Right("with_options", with_options, (X, 3, "name")),
    Right("magnitude", magnitude, (X, Y)),
    Right("spectrum", spectrum, X),
    Right("written_in_place", written_in_place, X),
    Right("chosen", chosen, X),
    Right("with_scalars", with_scalars, X),
    Right("unused", unused, (X, Y)),
    Right("indexed", indexed, (X, torch.tensor([0, 2]))),
    Right("integer_output", integer_output, X),
    Right("number", lambda x: x**3, torch.tensor(0.7, dtype=torch.float64)),
    Right("dropout_in_evaluation", lambda x: F.dropout(x * x, 0.5, training=False), X),
    Right("many_numbers", lambda x: torch.sin(x).cumsum(0), torch.linspace(-1, 1, 30, dtype=torch.float64)),
]
