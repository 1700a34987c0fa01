"""Number of calls of the function in a check, which is small because a call may run an expensive solver."""

import pytest
import torch
from custom_functions import custom, old_style
from torch import nn

import hodiff
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons import order_by_order as orders
from hodiff.checks.findings.torch_functions import culprits
from hodiff.checks.oracles.compositions import derivative

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)


# Takes ctx in forward, which torch.func refuses
OldSine = old_style("OldSine", lambda x: (x.sin(), x), lambda ctx, g: g * ctx.saved_tensors[0].cos())


def backward(ctx, g):
    raise ValueError("no slope")


def large_slope(ctx, g):
    return 1.01 * g * ctx.saved_tensors[0].cos()


# Sines whose derivatives raise, and whose derivatives are one percent too large
Mute = custom("Mute", lambda x: x.sin(), backward, backward, vmap=True)
Off = custom("Off", lambda x: x.sin(), large_slope, large_slope, vmap=True)


class Counted(nn.Module):
    """Counts its calls, and those of its copies."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        COUNTS.append(1)
        return self.function(self.layer(x))


COUNTS: list[int] = []


def calls_of(module):
    COUNTS.clear()
    report = hodiff.check(module, X)
    return report, len(COUNTS)


def test_function_that_raises_by_every_route_is_called_few_times():
    report, count = calls_of(Counted(Mute.apply))
    assert not report.ok
    assert "no slope" in str(report)
    # Nested differences would take thousands of calls.
    assert count < 200


def test_function_that_torch_rejects_is_called_few_times():
    report, count = calls_of(Counted(OldSine.apply))
    assert report.codes == ("HD405",)
    assert report.ok
    assert count < 200


@pytest.mark.slow
def test_errors_of_a_custom_function_start_no_search_of_torch_functions(monkeypatch):
    searched = []
    monkeypatch.setattr("hodiff.checks.pipelines.fault_search.culprits", lambda *_, **__: searched.append(1) or ())
    assert calls_of(Counted(OldSine.apply))[0].codes == ("HD405",)
    assert not searched
    calls_of(Counted(Mute.apply))
    assert searched


@pytest.mark.slow
def test_search_finds_the_torch_function_that_raises():
    def step(x):
        # Torch has no derivative of igamma by its first argument.
        return torch.igamma(x.abs(), x.exp()) * torch.exp(x)

    alone = CheckOptions(correct=False)
    found = list(culprits(lambda: lambda: step(X), alone, raising=True))
    everything = list(culprits(lambda: lambda: step(X), alone))
    assert [each.name for each in found] == ["torch.igamma"]
    assert [each.failed for each in found] == [each.failed for each in everything]


def test_function_that_raises_has_entries_of_every_order():
    report = hodiff.check(Mute, X, order=3)
    raised = {(entry.order, entry.quantity) for entry in report.entries if entry.status == "raises"}
    assert {(k, "vs differences") for k in (1, 2, 3)} | {(2, "vs SciPy")} <= raised


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_nested_differences_stop_at_the_time_budget(monkeypatch, seconds):
    monkeypatch.setattr(orders, "SECONDS", seconds)
    report = hodiff.check(Off, X, vmap=False)
    said = [each.detail for each in report.entries if each.route == "all routes" and each.status == "skipped"]
    assert not report.ok
    assert bool(said) == (seconds == 0)
    assert all(each.startswith("differences of differences would take some ") for each in said)


def test_rejected_route_is_not_tried_again():
    calls = []

    def f(x):
        calls.append(1)
        return OldSine.apply(x).sum()

    gradient = derivative(f, "reverse")
    expected = X.cos()
    for count in (2, 3, 4):  # the first call is refused and repeated
        torch.testing.assert_close(gradient(X), expected)
        assert len(calls) == count
    # Inside a transform, the error of torch.func is raised.
    with pytest.raises(RuntimeError):
        torch.func.jvp(gradient, (X,), (X,))
