"""Probes of single Functions: their findings; they never raise, and leave arguments and state unchanged."""

import random
import sys

import pytest
import torch
from torch.autograd import Function

from hodiff.checks import check
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.probes.fixed_tensors import fixed_devices
from hodiff.checks.probes.function_calls import function_calls
from hodiff.checks.probes.probe import PROBES, probe
from hodiff.checks.probes.rule_derivatives import slopes_of
from hodiff.checks.probes.side_effects import uninitialised_memory
from hodiff.checks.probes.torch_calls import TorchCalls

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


class Square(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g, None

    @staticmethod
    def jvp(ctx, t, _):
        return 2 * ctx.saved_tensors[0] * t


class HalfDetached(Square):
    """x², whose gradient is x + x with one term detached."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (x + x.detach()) * g, None


class Vicious(Square):
    """Raises in every rule but forward."""

    @staticmethod
    def backward(ctx, g):
        raise KeyError("no")

    @staticmethod
    def jvp(ctx, t, _):
        raise RuntimeError


def only_call(function, x=X):
    (call,) = function_calls(lambda x: (function.apply(x),), (x,), function)
    return call


def test_function_calls_are_found_inside_plain_functions():
    calls = function_calls(lambda x: (HalfDetached.apply(Square.apply(x.sin())),), (X,), None)
    assert {call.name for call in calls} == {"Square", "HalfDetached"}
    (square,) = (call for call in calls if call.name == "Square")
    assert torch.equal(square.args[0], X.sin())
    assert square.args[1] == 2
    assert square.moving == (True, False)


def test_recording_calls_leaves_the_class_unchanged():
    before = dict(vars(Square)), dict(vars(HalfDetached))
    only_call(Square), only_call(HalfDetached)
    assert (dict(vars(Square)), dict(vars(HalfDetached))) == before


def test_slopes_of_saved_tensors_show_a_detach():
    generator = torch.Generator().manual_seed(0)
    for function, ratio in ((Square, 1.0), (HalfDetached, 0.5)):
        ran = only_call(function).run()
        slopes = slopes_of(ran, "backward", ran.cotangents(generator), generator)
        saved = next(slope for slope in slopes if slope.name == "saved_tensors[0]")
        assert saved.by_autograd == pytest.approx(ratio * saved.by_differences)
        assert saved.cut is (ratio != 1.0)
        incoming = next(slope for slope in slopes if slope.name == "incoming 0")
        assert not incoming.cut


@pytest.mark.slow
def test_finding_is_located_at_the_detach():
    (finding,) = (f for f in check(HalfDetached, X).findings if f.code == "HD104")
    name, line = finding.location.rsplit(":", 1)
    assert name.endswith("test_probes.py")
    with open(__file__) as file:
        assert "x.detach()" in file.readlines()[int(line) - 1]


def test_trace_names_calls_that_leave_the_graph():
    x = X.clone().requires_grad_()
    with TorchCalls() as trace:
        x.detach(), x.data
        with torch.no_grad():
            x.tolist()
    assert [step.name for step in trace.of("detach")] == ["detach", "data"]
    assert [step.name for step in trace.of("foreign")] == ["tolist"]
    assert len(trace.of("no_grad")) == 1
    assert all("test_probes.py:" in step.location for step in trace.steps)


def test_rule_that_raises_does_not_stop_the_probes():
    function = Vicious.apply
    calls = function_calls(lambda x: (function(x),), (X,), None)
    assert probe(Vicious, (X,), lambda x: (function(x),), (X,), calls, CheckOptions()) == []
    assert "HD408" in check(Vicious, X).codes


@pytest.mark.parametrize("each", [each for each, _ in PROBES])
def test_probe_leaves_arguments_and_global_state_unchanged(each):
    call = only_call(Square)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in call.args]
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    assert each(call, torch.Generator().manual_seed(0)) == []
    assert torch.equal(call.args[0], copies[0])
    assert call.args[0]._version == 0
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    assert sys.getprofile() is None


def test_deterministic_settings_are_restored_after_an_error():
    assert uninitialised_memory(only_call(Vicious), torch.Generator()) == []
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_random_rules_are_seeded_and_the_state_is_restored():
    class Noisy(Square):
        @staticmethod
        def backward(ctx, g):
            return Square.backward(ctx, g)[0] * torch.rand_like(g), None

    torch.manual_seed(random.randrange(1000))
    state = torch.get_rng_state()
    first, second = check(Noisy, X), check(Noisy, X)
    assert torch.equal(state, torch.get_rng_state())
    assert first == second
    assert "HD305" in first.codes


def test_null_data_pointer_is_never_passed():
    taken = []

    class Pointer(Square):
        @staticmethod
        def forward(x, power=2):
            taken.append(x.data_ptr())
            return x**power

    fixed_devices(only_call(Pointer), torch.Generator())
    assert taken
    assert 0 not in taken
