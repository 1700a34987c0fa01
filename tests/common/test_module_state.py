"""Buffers during and after a run that changes them, against copies made before the run."""

import pytest
import torch

import hodiff
from hodiff.common.module_state import exchanged_buffers, functional_call, untouched_buffers
from hodiff.doors import CurvatureMonitor
from hodiff.meta import MAML


def test_untouched_buffers_are_copies_in_training():
    norm = torch.nn.BatchNorm1d(3)
    held, before = norm.running_mean, norm.running_mean.clone()
    with untouched_buffers([norm]):
        norm(torch.randn(5, 3) + 7)
        assert not torch.allclose(norm.running_mean, before)
    assert norm.running_mean is held
    assert torch.equal(held, before)


def test_untouched_buffers_are_not_copied_in_evaluation():
    norm = torch.nn.BatchNorm1d(3).eval()
    held = norm.running_mean
    with untouched_buffers([norm]):
        assert norm.running_mean is held


def test_buffers_are_restored_after_an_error():
    norm = torch.nn.BatchNorm1d(3)
    held, other = norm.running_var, torch.zeros(3)

    def fail():
        with exchanged_buffers([(norm._buffers, "running_var", other)]):
            assert norm.running_var is other
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert norm.running_var is held


class TwoNames(torch.nn.Module):
    """A layer with two names, and a buffer in it."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_functional_call_leaves_the_tensors_of_modules_with_two_names():
    model = TwoNames().double().eval()
    other = {name: 2 * each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}
    held = dict((*model.named_parameters(), *model.named_buffers()))
    x = torch.randn(4, 3, dtype=torch.float64)
    whole, model_of_others = functional_call(model, other, (x,)), TwoNames().double().eval()
    model_of_others.load_state_dict(other, strict=False)
    torch.testing.assert_close(whole, model_of_others(x))
    with pytest.raises(RuntimeError):
        functional_call(model, other, (x[:, :2],))
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        assert each is held[name]


def gauss_newton(model, x):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    A = hodiff.GaussNewtonOperator(model, torch.nn.functional.mse_loss, parameters, x, x)
    return A @ parameters


def adapted(model, x):
    maml = MAML(model, torch.nn.functional.mse_loss, 0.1, 1)
    return maml.adapt((x, x))


USERS = {
    "Gauss-Newton": gauss_newton,
    "monitor": lambda model, x: CurvatureMonitor(
        model, lambda model, x: model(x).square().mean(), [x], measures=["sharpness"]
    ).measure(0),
    "ENGD": lambda model, x: hodiff.optim.ENGD(model).step((lambda p: model(p[None])[0], x)),
    "MAML": adapted,
}


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_modules_with_two_names_keep_their_parameters(user):
    model = TwoNames().double().eval()
    held = list(model.parameters())
    user(model, torch.randn(4, 3, dtype=torch.float64))
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
