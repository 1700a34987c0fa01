"""Tests of the values that a callable reads besides its arguments: every change is detected, without false alarms."""

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hodiff.recompute.dependencies import Dependencies

NUMBER = 1.0
TENSOR = torch.ones(2)
settings = types.ModuleType("settings_of_the_user")
settings.scale = 1.0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Layer(nn.Module):
    """A module with state in all possible places."""

    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.ones(2))
        self.number = 1.0
        self.slotted = Slotted()
        self.items = [1.0, torch.ones(2)]
        self.table = {"a": (torch.ones(2), 3)}
        self.array = np.ones(2)
        self.names = {"one"}
        self.inner = nn.Dropout(0.5)
        self.act = torch.sin
        self.call = functools.partial(torch.mul, 2.0)

    @property
    def scale(self) -> float:
        return NUMBER

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.scale * TENSOR * settings.scale)


def of_layer(layer: Layer) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x)


def put(container: Any, key: Any, value: Any) -> None:
    container[key] = value


CHANGES: dict[str, Callable[[Layer, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda layer, _: setattr(layer, "number", 2.0),
    "mode": lambda layer, _: layer.eval(),
    "inner mode": lambda layer, _: layer.inner.eval(),
    "inner number": lambda layer, _: setattr(layer.inner, "p", 0.1),
    "slot": lambda layer, _: setattr(layer.slotted, "value", 2.0),
    "element": lambda layer, _: put(layer.items, 0, 2.0),
    "length": lambda layer, _: layer.items.append(1.0),
    "tuple": lambda layer, _: put(layer.table, "a", (layer.table["a"][0], 4)),
    "key": lambda layer, _: put(layer.table, "b", 1),
    "array": lambda layer, _: layer.array.__setitem__(0, 2.0),
    "set": lambda layer, _: layer.names.add("two"),
    "function": lambda layer, _: setattr(layer, "act", torch.cos),
    "partial": lambda layer, _: setattr(layer, "call", functools.partial(torch.mul, 3.0)),
    "method": lambda layer, _: setattr(layer, "forward", lambda x: x),
    "hook": lambda layer, _: layer.register_forward_hook(lambda *_: None),
    "module": lambda layer, _: setattr(layer, "inner", nn.Identity()),
    "shape": lambda layer, _: setattr(layer, "buffer", torch.ones(3)),
    "dtype": lambda layer, _: layer.double(),
    "class": lambda _, patch: patch.setattr(Layer, "power", 3.0),
    "global": lambda _, patch: patch.setitem(globals(), "NUMBER", 2.0),
    "global of another file": lambda _, patch: patch.setattr(settings, "scale", 2.0),
    "zero of the other sign": lambda layer, _: setattr(layer, "number", -0.0),
    "another type": lambda layer, _: setattr(layer, "number", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_values_are_detected(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    f = of_layer(layer)
    before = Dependencies(f)
    assert before.hold()
    assert Dependencies(f).form == before.form
    CHANGES[change](layer, monkeypatch)
    assert not before.hold()
    assert Dependencies(f).form != before.form


REBOUND: dict[str, Callable[[Layer, pytest.MonkeyPatch], Any]] = {
    "parameter": lambda layer, _: setattr(layer, "weight", nn.Parameter(torch.zeros(2))),
    "element": lambda layer, _: put(layer.items, 1, torch.zeros(2)),
    "in a tuple": lambda layer, _: put(layer.table, "a", (torch.zeros(2), 3)),
    "global": lambda _, patch: patch.setitem(globals(), "TENSOR", torch.zeros(2)),
    "equal number": lambda layer, _: setattr(layer, "number", float("1")),
}


@pytest.mark.parametrize("change", REBOUND)
def test_replaced_tensors_keep_the_form(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    f = of_layer(layer)
    before = Dependencies(f)
    assert {id(each) for each in before.tensors} >= {id(layer.weight), id(layer.buffer), id(TENSOR)}
    REBOUND[change](layer, monkeypatch)
    after = Dependencies(f)
    assert not before.hold()
    assert after.form == before.form
    if change != "equal number":
        assert any(not each.any() for each in after.tensors)


def test_recreated_closures_have_the_same_form() -> None:
    layer = Layer()
    assert Dependencies(of_layer(layer)).form == Dependencies(of_layer(layer)).form
    assert Dependencies(of_layer(layer)).form != Dependencies(lambda x: layer(x)).form


def test_form_depends_on_tensor_identity() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert Dependencies([a, b]).form != Dependencies([a, a]).form
    assert Dependencies([a, b]).form == Dependencies([b, a]).form


def test_filled_replaces_tensors_temporarily() -> None:
    layer = Layer()
    dependencies = Dependencies(layer)
    with dependencies.filled([torch.full_like(each, 7.0) for each in dependencies.tensors]):
        assert float(layer.weight[0]) == float(layer.buffer[0]) == float(layer.items[1][0]) == 7
        assert float(layer.table["a"][0][0]) == float(TENSOR[0]) == 7
        # Values that the run leaves behind are discarded with it.
        layer.items.append(2.0)
        layer.memory = torch.zeros(1)
        layer.number = 5.0
    assert dependencies.hold()
    assert layer.weight[0].item() == float(TENSOR[0]) == layer.number == 1
    assert not hasattr(layer, "memory")
