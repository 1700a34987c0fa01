"""What every module of `hodiff.nn` must do: train, be copied, pickled, restored and described."""

import copy
import inspect
import io
import pickle

import pytest
import torch

import hodiff.nn
from hodiff import hvp

# How to build each module, and the input it takes.
MODULES = {}


def modules():
    return [
        name for name, each in vars(hodiff.nn).items() if inspect.isclass(each) and issubclass(each, torch.nn.Module)
    ]


def test_every_module_is_listed():
    assert set(MODULES) == set(modules())


@pytest.fixture(params=MODULES)
def built(request):
    build, draw = MODULES[request.param]
    torch.manual_seed(0)
    return build(), draw()


def run(module, inputs):
    torch.manual_seed(1)
    return module(*inputs)


def test_copied_and_pickled(built):
    module, inputs = built
    expected = run(copy.deepcopy(module), inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(other, inputs), expected)


def test_state_is_saved_and_restored(built):
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


def test_described(built):
    module, _ = built
    assert repr(module).startswith(type(module).__name__)


def test_a_training_step_and_a_product(built):
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
