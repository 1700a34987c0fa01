"""Attributes and globals of one name are not confused; globals are found wherever code names them."""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest
import torch
from torch import Tensor, nn

from hodiff.functions import checkpoint
from hodiff.recompute.dependencies import Dependencies
from hodiff.recompute.names_in_code import names_in
from hodiff.recompute.reachable import names_of_globals

HERE = sys.modules[__name__]
weight = torch.ones(3, dtype=torch.float64)
out = torch.zeros(())
settings = ModuleType("settings_of_the_user")


class Net(nn.Module):
    """A module with an attribute that has the name of a global."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).tanh()


def test_attribute_is_no_global(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that calls its loss as the model calls a layer."""
    net, x = Net(), torch.ones(2, 3)
    for _ in range(3):
        monkeypatch.setitem(globals(), "out", checkpoint(net, x).square().sum())
        out.backward()
    assert net.out.weight.grad is not None
    expected = torch.autograd.grad(net(x).square().sum(), net.out.weight)[0]
    torch.testing.assert_close(net.out.weight.grad, 3 * expected)


def test_captured_graph_does_not_depend_on_a_global_with_the_name_of_an_attribute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Dependencies(Net())
    monkeypatch.setitem(globals(), "out", torch.ones(7))
    assert before.hold()
    assert not any(each is out for each in before.tensors)


def _directly(x: Tensor) -> Tensor:
    return weight * x


def _in_an_inner_function(x: Tensor) -> Tensor:
    return torch.stack([(lambda a: weight[i] * a)(each) for i, each in enumerate(x)])


def _in_a_class(x: Tensor) -> Tensor:
    class Local:
        held = weight

    return Local.held * x


def _as_attribute_of_the_module(x: Tensor) -> Tensor:
    return HERE.weight * x


_IMPORTS = f"""
def imports_its_module(x):
    import {__name__} as this
    return this.weight * x

def imports_from_its_module(x):
    from {__name__} import weight
    return weight * x
"""


def _importing(name: str) -> Callable[[Tensor], Tensor]:
    local: dict[str, Callable[[Tensor], Tensor]] = {}
    exec(_IMPORTS, globals(), local)
    return local[name]


READERS = [
    _directly,
    _in_an_inner_function,
    _in_a_class,
    _as_attribute_of_the_module,
    _importing("imports_its_module"),
    _importing("imports_from_its_module"),
]


@pytest.mark.parametrize("f", READERS, ids=lambda f: f.__name__)
def test_globals_get_gradients(f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "weight", torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True))
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((checkpoint(f, x) ** 2).sum(), weight, create_graph=True)
    torch.testing.assert_close(slope, 2 * weight)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), weight)[0], torch.full_like(weight, 2.0))


def _reads_settings(x: Tensor) -> Tensor:
    return settings.scale * x


def _imports_settings(x: Tensor) -> Tensor:
    import settings_of_the_user  # type: ignore[import-not-found]

    return settings_of_the_user.scale * x


def _imports_from_settings(x: Tensor) -> Tensor:
    from settings_of_the_user import scale

    return scale * x


@pytest.mark.parametrize("f", [_reads_settings, _imports_settings, _imports_from_settings], ids=lambda f: f.__name__)
def test_captured_graphs_depend_on_attributes_of_modules(
    f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    for held in (1.0, torch.ones(2)):
        monkeypatch.setattr(settings, "scale", held, raising=False)
        before = Dependencies(f)
        assert before.hold()
        assert any(each is held for each in before.tensors) == isinstance(held, Tensor)
        monkeypatch.setattr(settings, "scale", 2.0)
        assert not before.hold()


def test_names_by_what_the_code_looks_up() -> None:
    local: dict[str, FunctionType] = {}
    exec(
        "def f(self, x):\n"
        "    global written, gone\n"
        "    import package.module\n"
        "    from package import thing\n"
        "    written = self.attribute.method(x)\n"
        "    del gone\n"
        "    class Local:\n"
        "        bound = loaded_in_class\n"
        "    return [called(each) + module.weight for each in x]\n",
        local,
    )
    names = names_in(local["f"].__code__)
    assert set(names.of_globals) - {"__name__"} == {"written", "gone", "loaded_in_class", "called", "module"}
    assert names.of_imports == ("package.module", "package", "thing")
    assert {"attribute", "method", "weight", *names.of_globals} < set(names.of_all)


def test_globals_that_do_not_exist_are_skipped() -> None:
    assert names_of_globals(lambda: weight + missing) == ["weight"]  # type: ignore[name-defined]  # noqa: F821
