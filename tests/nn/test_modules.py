"""Every module of `hodiff.nn` can be trained, copied, pickled, restored and printed."""

import copy
import inspect
import io
import pickle

import pytest
import torch

from hodiff import InputError, hvp, nn, preflight


def normal(*shape):
    return lambda: (torch.randn(shape, generator=torch.Generator().manual_seed(2)),)


def with_target(target):
    return lambda: (*normal(4, 3)(), target)


# The constructor and the inputs of each module.
MODULES = {
    "Swish": (nn.Swish, normal(2, 3)),
    "ScaledSigmoid": (lambda: nn.ScaledSigmoid(2.0, learned=True), normal(2, 3)),
    "ClippedReLU": (lambda: nn.ClippedReLU(1.0), normal(2, 3)),
    "ReLU": (nn.ReLU, normal(2, 3)),
    "SiLU": (nn.SiLU, normal(2, 3)),
    "GELU": (nn.GELU, normal(2, 3)),
    "Mish": (nn.Mish, normal(2, 3)),
    "Softplus": (lambda: nn.Softplus(2.0, learned=True), normal(2, 3)),
    "LogSigmoid": (nn.LogSigmoid, normal(2, 3)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), normal(2, 2, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), normal(2, 2, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), normal(2, 1, 3, 3, 3)),
    "GradientReversal": (lambda: nn.GradientReversal(0.5), normal(2, 3)),
    "ScaleGradient": (lambda: nn.ScaleGradient(0.5), normal(2, 3)),
    "FusedLinear": (lambda: nn.FusedLinear(3, 2, "gelu"), normal(4, 3)),
    "FakeQuantize": (lambda: nn.FakeQuantize(8), normal(4, 3)),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, with_target(torch.tensor([0, 2, 1, 1]))),
    "HuberLoss": (nn.HuberLoss, with_target(torch.full((4, 3), 0.1))),
    "HingeLoss": (nn.HingeLoss, with_target(torch.ones(4, 3))),
    "GumbelSoftmax": (nn.GumbelSoftmax, normal(4, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(3), normal(4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), normal(4, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), normal(3, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), normal(4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), normal(2, 3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), normal(2, 2, 2, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), normal(2, 3, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), normal(2, 3, 2, 2)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(2, affine=True), normal(2, 2, 2, 2, 2)),
}


def modules():
    return [name for name, each in vars(nn).items() if inspect.isclass(each) and issubclass(each, torch.nn.Module)]


def test_every_module_is_tested():
    assert set(MODULES) == set(modules())


@pytest.fixture(params=MODULES)
def built(request):
    build, draw = MODULES[request.param]
    torch.manual_seed(0)
    return build(), draw()


def run(module, inputs):
    torch.manual_seed(1)
    return module(*inputs)


def test_preflight_has_no_false_remarks(built):
    module, inputs = built
    found = preflight(module, *inputs)
    assert not found.cuts
    assert all("draws random numbers" in each or "in place" in each for each in found.remarks)


def test_modules_are_copied_and_pickled(built):
    module, inputs = built
    expected = run(copy.deepcopy(module), inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(other, inputs), expected)


def test_state_dict_round_trips(built):
    module, inputs = built
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(torch.load(file))
    assert torch.equal(run(other, inputs), run(module, inputs))


def test_repr_starts_with_the_class_name(built):
    module, _ = built
    assert repr(module).startswith(type(module).__name__)


def test_training_step_and_hvp_run(built):
    module, inputs = built
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    loss = run(module, inputs).square().sum()
    loss.backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
    point = inputs[0].detach()
    product = hvp(lambda x: run(module, (x, *inputs[1:])).square().sum(), point, torch.ones_like(point))
    assert bool(product.isfinite().all())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_unfused_layers_are_quantized_dynamically():
    """After `unfused`, fused layers quantize like torch's layer and activation; torch matches the exact type."""
    model = torch.nn.Sequential(nn.FusedLinear(64, 32, "gelu"), torch.nn.Linear(32, 2)).eval()
    (x,) = normal(16, 64)()
    pair = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval()
    pair[0].load_state_dict(model[0].state_dict())
    quantize = torch.ao.quantization.quantize_dynamic
    found = quantize(nn.unfused(model), {torch.nn.Linear})
    expected = quantize(torch.nn.Sequential(pair, model[1]), {torch.nn.Linear})
    assert "DynamicQuantizedLinear" in repr(found[0])
    assert torch.equal(found(x), expected(x))
    assert type(quantize(model, {torch.nn.Linear})[0]) is nn.FusedLinear


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu", "gelu"])
def test_unfused_model_computes_the_same(activation):
    layer = nn.FusedLinear(3, 3, activation, bias=activation != "tanh")
    model = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Sequential(layer, torch.nn.Dropout())}).eval()
    apart = nn.unfused(model)
    (x,) = normal(4, 3)()
    torch.testing.assert_close(apart["b"](x), model["b"](x))
    assert not any(isinstance(each, nn.FusedLinear) for each in apart.modules())
    assert isinstance(model["a"], nn.FusedLinear)
    # Tied layers stay tied, and the model shares none of them.
    assert apart["a"] is apart["b"][0]
    assert len(list(apart.parameters())) == len(list(model.parameters()))
    assert not {id(each) for each in apart.parameters()} & {id(each) for each in model.parameters()}
    assert not any(each.training for each in apart.modules())
    assert type(nn.unfused(layer)) is torch.nn.Sequential


def test_unfused_rejects_non_modules():
    with pytest.raises(InputError, match="unfused: model: expected a module, got Tensor"):
        nn.unfused(torch.ones(2))
