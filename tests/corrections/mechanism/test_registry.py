"""Registering and unregistering rules: the newest rule applies, hodiff's own are restored, bad arguments are named."""

import pytest
import torch
import torch.nn.functional as F

import hodiff
from hodiff.corrections import register, table, unregister
from hodiff.corrections.mechanism.registry import CORRECTIONS

ONES = torch.ones(2)


def constant(value):
    return lambda *_, **__: torch.tensor(value)


def corrected_lerp():
    with hodiff.corrected():
        return torch.lerp(ONES, ONES, 0.5)


def test_unregister_restores_the_rule_of_hodiff():
    before, rows = CORRECTIONS[F.layer_norm], table()
    register(F.layer_norm, torch.layer_norm, reason="mine")(constant(7.0))
    assert "mine" in {row.reason for row in table()}
    with hodiff.corrected():
        assert F.layer_norm(ONES, (2,)) == torch.layer_norm(ONES, (2,)) == 7
        unregister(F.layer_norm)
        assert F.layer_norm(ONES, (2,)).shape == ONES.shape
        assert torch.layer_norm(ONES, (2,)) == 7
        unregister(torch.layer_norm)
    assert CORRECTIONS[F.layer_norm] is CORRECTIONS[torch.layer_norm] is before
    assert table() == rows


def test_products_are_right_after_unregister():
    x, v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def product(**options):
        return hodiff.hvp(lambda x: F.layer_norm(x, (3,))[0], x, v, route="reverse-over-forward", **options)

    by_own_rule = product()
    register(F.layer_norm, reason="mine")(lambda x, *_, **__: x * x.sum())
    by_mine = product()
    unregister(F.layer_norm)
    torch.testing.assert_close(by_mine, torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    assert torch.equal(product(), by_own_rule)
    assert not torch.allclose(by_own_rule, product(correct=False), rtol=1e-3)


def test_unregister_removes_the_newest_rule_first():
    register(torch.lerp, torch.lerp, reason="old")(constant(1.0))
    register(torch.lerp, reason="new")(constant(2.0))
    assert [row.reason for row in table() if row.name == "torch.lerp"] == ["new"]
    assert corrected_lerp() == 2
    unregister(torch.lerp, torch.lerp)
    assert corrected_lerp() == 1
    unregister(torch.lerp)
    torch.testing.assert_close(corrected_lerp(), torch.lerp(ONES, ONES, 0.5))
    assert "torch.lerp" not in {row.name for row in table()}


def test_skipped_rule_leaves_the_older_rule_active():
    register(torch.lerp, reason="old")(constant(1.0))
    register(torch.lerp, reason="new", mended="2.0")(constant(2.0))
    assert corrected_lerp() == 1
    assert {row.reason for row in table() if row.name == "torch.lerp"} == {"old", "new"}
    unregister(torch.lerp)
    assert corrected_lerp() == 1
    unregister(torch.lerp)
    assert torch.lerp not in CORRECTIONS


def test_unregister_rejects_functions_without_a_user_rule():
    with pytest.raises(hodiff.InputError, match=r"torch\.cosh with none"):
        unregister(torch.cosh)
    with pytest.raises(hodiff.InputError, match=r"layer_norm with only hodiff's own, which stays"):
        unregister(F.layer_norm)
    with pytest.raises(hodiff.InputError, match=r"unregister: functions: expected callables, got str 'torch\.cosh'"):
        unregister("torch.cosh")
    with pytest.raises(hodiff.InputError, match="unregister: functions: expected at least one"):
        unregister()
    register(torch.lerp, reason="mine")(constant(1.0))
    with pytest.raises(hodiff.InputError, match="cosh"):
        unregister(torch.lerp, torch.cosh)
    assert corrected_lerp() == 1  # no rule was removed
    unregister(torch.lerp)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "odd"}, "kind: expected"),
        ({"routes": ("rr",)}, r"routes: expected some of hodiff.ROUTES, .*, got \('rr',\)"),
        ({"routes": hodiff.ROUTES[0]}, "routes: expected some of hodiff.ROUTES"),
        ({"least_elements": -1}, "least_elements: expected"),
        ({"least_elements": "many"}, "least_elements: expected"),
        ({"devices": "cpu"}, "devices: expected kinds of devices, such as .*, got 'cpu'"),
        ({"mended": "soon"}, "mended: expected a version of torch such as .*, got 'soon'"),
        ({"mended": 2.15}, "mended: expected a version of torch such as .*, got 2.15"),
    ],
)
def test_register_rejects_bad_options(options, message):
    with pytest.raises(hodiff.InputError, match="register: " + message):
        register(torch.lerp, reason="a test", **options)
    assert torch.lerp not in CORRECTIONS


@pytest.mark.parametrize("covers", [None, lambda *_: True])
def test_rule_that_returns_none_is_named(covers):
    @register(torch.lerp, reason="a test", covers=covers)
    def forgetful(input, end, weight):
        input + end * weight

    try:
        with pytest.raises(hodiff.HodiffError, match=r"forgetful, the rule registered for torch\.lerp: .* got None"):
            corrected_lerp()
    finally:
        unregister(torch.lerp)


def test_rule_may_return_none_where_torch_does():
    x = torch.ones(2, requires_grad=True)
    with hodiff.corrected():
        assert x.sum().backward() is None
