"""Rules that skip unneeded work give torch's values, dtypes and derivatives, and leave other calls unchanged."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_error
from torch import nn

import hodiff
from hodiff.corrections import Corrections
from hodiff.corrections.mechanism.registry import listed_corrections


def nodes(tensor):
    """Names of all nodes in the graph of a tensor."""
    found, queue = set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue += [parent for parent, _ in node.next_functions]
    return {node.name() for node in found}


X = torch.tensor([[-1.0, 0.0, 2.0, float("nan")], [3.0, -0.0, float("inf"), -float("inf")]])
CALLS = {
    "relu": (lambda x: F.relu(x), X),
    "torch.relu": (lambda x: torch.relu(x), X),
    "method": (lambda x: x.relu(), X),
    "half": (lambda x: F.relu(x), X.half()),
    "conv1d": (lambda x: F.conv1d(x, torch.ones(2, 1, 3), torch.ones(2), padding=1), torch.randn(2, 1, 5)),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3), padding="same"), torch.randn(2, 3, 5, 5)),
    "unbatched conv2d": (lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3), stride=2), torch.randn(3, 5, 5)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3])), torch.randn(3, 4)),
    "ignored": (lambda x: F.cross_entropy(x, torch.tensor([1, -100, 3])), torch.randn(3, 4)),
    "summed": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3]), reduction="sum"), torch.randn(3, 4)),
    "weighted": (lambda x: F.cross_entropy(x, torch.tensor([1, 0]), weight=torch.rand(4)), torch.randn(2, 4)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), torch.randn(2, 16, 6, 6)),
    "max_pool2d, ties": (lambda x: F.max_pool2d(x, 3, 2, 1), torch.randn(2, 16, 7, 7).relu()),
    "max_pool2d, options": (lambda x: F.max_pool2d(x, (2, 3), 1, (1, 0), 2, ceil_mode=True), torch.randn(1, 17, 9, 8)),
    "max_pool2d, NaN": (lambda x: F.max_pool2d(x, 2), torch.full((1, 16, 2, 2), float("nan"))),
    "max_pool2d, strided": (lambda x: F.max_pool2d(x.mT, 2), torch.randn(2, 16, 6, 4)),
    "gelu": (lambda x: F.gelu(x), X),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "gelu, half": (lambda x: F.gelu(x), X[:, :3].half()),
    "silu": (lambda x: F.silu(x), X),
    "silu of an activation, in place": (lambda x: F.silu(x * 1, inplace=True), X),
    "mish": (lambda x: F.mish(x, inplace=False), X),
    "softplus": (lambda x: F.softplus(x), X),
    "softplus, options": (lambda x: F.softplus(x, 2.0, threshold=5), X),
    "tanh": (lambda x: x.tanh(), X),
    "sigmoid": (lambda x: torch.special.expit(input=x), X),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), torch.randn(3, 4)),
    "rms_norm, weight": (lambda x: F.rms_norm(x, [2, 4], x.detach()[0], eps=1e-3), torch.randn(3, 2, 4)),
    "rms_norm, half": (lambda x: torch.rms_norm(x, (4,), None, 1e-3), torch.randn(3, 4).half()),
    "rms_norm, zeros": (lambda x: F.rms_norm(x, (4,), eps=1e-6), torch.zeros(2, 4)),
    "rms_norm, weight of another dtype": (
        lambda x: F.rms_norm(x, (4,), torch.ones(4, dtype=torch.float64)),
        torch.randn(3, 4),
    ),
    "probabilities": (lambda x: F.cross_entropy(x, torch.full((2, 4), 0.25)), torch.randn(2, 4)),
}


SMOOTH = {"gelu", "silu", "mish", "softplus", "tanh", "sigmoid", "rms_norm"}


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_values_and_dtypes_match_torch(name):
    function, x = CALLS[name]
    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    with Corrections(lean=True, many=True):
        got = function(x.clone().requires_grad_())
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.detach(), expected, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "conv1d",
        "conv2d",
        "unbatched conv2d",
        "cross_entropy",
        "ignored",
        "summed",
        *(name for name in CALLS if "pool" in name and "NaN" not in name),
        *(name for name in CALLS if name.split()[0].strip(",") in SMOOTH and not {"half", "dtype"} & set(name.split())),
    ],
)
def test_products_match_torch(name):
    function, x = CALLS[name]
    x = torch.where(x.isfinite(), x, 0.5).double()

    def loss(x):
        return function(x.float()).double().square().sum() + (x**3).sum()

    v = torch.ones_like(x)

    def product(mode):
        leaf = x.clone().requires_grad_()
        with mode:
            value = loss(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        return torch.autograd.grad(gradient, leaf, v)[0]

    torch.testing.assert_close(product(Corrections(lean=True, many=True)), product(nullcontext()), rtol=1e-5, atol=1e-5)


WRONG = {
    "cross_entropy, sizes": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
    "cross_entropy, target out of range": lambda x: F.cross_entropy(x, torch.tensor([0, 3])),
    "cross_entropy, negative target": lambda x: F.cross_entropy(x, torch.tensor([0, -1])),
    "cross_entropy, float target": lambda x: F.cross_entropy(x, torch.tensor([0.0, 1.0])),
    "cross_entropy, bool target": lambda x: F.cross_entropy(x, torch.tensor([True, False])),
    "cross_entropy, reduction": lambda x: F.cross_entropy(x, torch.tensor([0, 1]), reduction="median"),
    "conv1d, channels": lambda x: F.conv1d(x[None], torch.ones(1, 3, 1)),
    "conv1d, dtypes": lambda x: F.conv1d(x[None], torch.ones(1, 2, 1, dtype=torch.float64)),
    "conv1d, kernel too large": lambda x: F.conv1d(x[None], torch.ones(1, 2, 5)),
    "conv1d, stride": lambda x: F.conv1d(x[None], torch.ones(1, 2, 1), stride=0),
    "conv1d, padding": lambda x: F.conv1d(x[None], torch.ones(1, 2, 1), padding="full"),
    "conv1d, same with a stride": lambda x: F.conv1d(x[None], torch.ones(1, 2, 1), padding="same", stride=2),
    "conv1d, groups": lambda x: F.conv1d(x[None], torch.ones(1, 1, 1), groups=2),
    "conv1d, bias": lambda x: F.conv1d(x[None], torch.ones(1, 2, 1), torch.ones(3)),
    "conv1d, no tensor": lambda x: F.conv1d(x[None], 3.0),
    "conv2d, dimensions": lambda x: F.conv2d(x, torch.ones(1, 2, 1, 1)),
    "max_pool2d, stride": lambda x: F.max_pool2d(torch.ones(1, 16, 4, 4) * x.sum(), 2, -1),
    "max_pool2d, padding": lambda x: F.max_pool2d(torch.ones(1, 16, 4, 4) * x.sum(), 2, padding=2),
    "max_pool2d, too small": lambda x: F.max_pool2d(torch.ones(1, 16, 1, 1) * x.sum(), 2),
    "max_pool2d, kernel": lambda x: F.max_pool2d(torch.ones(1, 16, 4, 4) * x.sum(), "2"),
    "max_pool2d, three sizes": lambda x: F.max_pool2d(torch.ones(1, 16, 4, 4) * x.sum(), (2, 2, 2)),
    "relu, no tensor": lambda x: F.relu([x]),
    "gelu, approximate": lambda x: F.gelu(x, approximate="sigmoid"),
    "gelu, no tensor": lambda x: F.gelu([x]),
    "softplus, beta": lambda x: F.softplus(x, "1"),
    "tanh, too many": lambda x: torch.tanh(x, x),
    "rms_norm, sizes": lambda x: F.rms_norm(x, (2,)),
    "rms_norm, weight": lambda x: F.rms_norm(x, (3,), torch.ones(2)),
    "rms_norm, one size": lambda x: F.rms_norm(x, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_match_torch(name):
    x = torch.randn(2, 3, requires_grad=True)
    same_error(WRONG[name], x, mode=Corrections(lean=True, many=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch_matches_torch(reduction):
    x, target = torch.randn(0, 3, requires_grad=True), torch.empty(0, dtype=torch.long)
    expected = F.cross_entropy(x, target, reduction=reduction)
    with Corrections(lean=True, many=True):
        got = F.cross_entropy(x, target, reduction=reduction)
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_rules_reach_modules_and_end_with_the_context():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    x, target = torch.randn(2, 1, 4, 4), torch.tensor([0, 2])
    with Corrections(lean=True, many=True):
        inside = nodes(F.cross_entropy(model(x), target))
    outside = nodes(F.cross_entropy(model(x), target))
    assert {"ConvolutionBackward", "CrossEntropyBackward", "ThresholdBackwardBackward0"} <= inside
    assert {"ConvolutionBackward0", "NllLossBackward0", "ReluBackward0"} <= outside


def test_in_place_relu_writes_in_place():
    x = torch.tensor([-1.0, 1.0])
    with Corrections(lean=True, many=True):
        assert F.relu(x, inplace=True) is x
    assert x.tolist() == [0.0, 1.0]


def test_products_compute_no_gradient_by_constant_images():
    """Unlike torch, a product computes no gradient by the data."""
    images, targets = torch.randn(4, 1, 128, 128), torch.tensor([0, 1, 2, 0])
    model = nn.Sequential(nn.Conv2d(1, 2, 3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 32 * 32, 3))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (images,)), targets)

    with torch.profiler.profile() as profile:
        hodiff.hvp(loss, parameters, parameters)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::convolution_backward"] == 2  # by the weight: for the gradient, and for its pullback


def test_rules_that_are_only_faster_name_the_devices_on_which_they_were_measured():
    """On other devices torch's way is taken; `mends` says where torch is wrong, on every device."""
    faster = {each.name: each.devices for each in listed_corrections() if each.kind == "slow" or each.lean is not None}
    assert set(faster) >= {"torch.nn.functional.conv2d", "torch.nn.functional.relu", "torch.nn.functional.silu"}
    assert set(faster.values()) == {("cpu",)}


@pytest.mark.parametrize("many", [False, True])
def test_other_devices_take_torchs_way(many):
    def names_on(device):
        x = torch.ones(2, 16, 64, 64, device=device, requires_grad=True)
        weight = torch.ones(16, 16, 1, 1, device=device)
        with Corrections(lean=True, many=many):
            results = (F.relu(x), F.conv2d(x, weight), F.max_pool2d(x, 2), F.rms_norm(x, (64,)), F.silu(x))
            return [each.grad_fn.name() for each in results]

    # The device "meta" stands for one that was not measured.
    torchs = ["ReluBackward0", "ConvolutionBackward0", "MaxPool2DWithIndicesBackward0", "FusedRmsNormBackward0"]
    assert names_on("meta")[:3] == torchs[:3]
    assert names_on("meta")[4] == "SiluBackward0"
    own = names_on("cpu")
    assert not set(own[:4]) & set(torchs)
    assert (own[4] != "SiluBackward0") == many
