"""Values other than tensors that change between a checkpointed call and backward are restored, or refused."""

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from hodiff.errors import InputError
from hodiff.recompute.checkpoint import checkpoint, checkpoint_sequential

D = torch.float64
FACTOR = 2.0
FACTORS = {"one": 2.0, "list": [2.0]}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.dtype = 2.0, D
        self.mode = "sin"

    def forward(self, x):
        y = torch.sin(x) if self.mode == "sin" else torch.cos(x)
        return self.factor * (y if self.training else x).to(self.dtype)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 2.0

    def __call__(self, x):
        return self.factor * x.sin()


def _reads_a_global(x):
    return FACTOR * x.sin()


def _reads_entries(x):
    return FACTORS["one"] * x.sin() * FACTORS["list"][0] / 2


def _reads_an_optional_entry(x):
    return x.sin() * FACTORS.get("new", 2.0)


def _set_global(value):
    global FACTOR
    FACTOR = value


def _cases():
    module, slotted = Scaled(), Slotted()
    factors = [2.0, 1.0]
    total = {"sum": [1.0, 1.0]}
    recent, signs, history = deque([2.0], maxlen=2), {"plus"}, deque()
    cell = 2.0

    def rebind():
        nonlocal cell
        cell = 3.0

    yield "training", module, module.eval, module.train
    yield "number", module, lambda: setattr(module, "factor", 3.0), lambda: setattr(module, "factor", 2.0)
    yield "word", module, lambda: setattr(module, "mode", "cos"), lambda: setattr(module, "mode", "sin")
    yield "dtype", module, lambda: setattr(module, "dtype", torch.half), lambda: setattr(module, "dtype", D)
    yield "deleted", module, lambda: delattr(module, "factor"), lambda: setattr(module, "factor", 2.0)
    yield "slot", slotted, lambda: setattr(slotted, "factor", 3.0), lambda: setattr(slotted, "factor", 2.0)
    yield "list", lambda x: factors[0] * x.sin(), lambda: factors.__setitem__(0, 3.0), lambda: None
    yield "longer list", lambda x: sum(total["sum"]) * x.sin(), lambda: total["sum"].append(1.0), lambda: None
    yield "deque", lambda x: sum(recent) * x.sin(), lambda: recent.append(1.0), lambda: recent.pop()
    yield "full deque", lambda x: recent[0] * x.sin(), lambda: recent.extend((3.0, 4.0)), lambda: recent.clear()
    yield "set", lambda x: 2 * len(signs) * x.sin(), lambda: signs.add("minus"), lambda: signs.discard("minus")

    def noting(x):
        history.append(len(history))
        return 2 * len(history) * x.sin()

    yield "deque that f fills", noting, lambda: history.append(5), lambda: None
    yield "cell", lambda x: cell * x.sin(), rebind, lambda: None
    yield "global", _reads_a_global, lambda: _set_global(3.0), lambda: _set_global(2.0)
    yield "entry", _reads_entries, lambda: FACTORS.update(one=3.0), lambda: FACTORS.update(one=2.0)
    yield "entry of a list", _reads_entries, lambda: FACTORS.update(list=[3.0]), lambda: FACTORS.update(list=[2.0])
    yield "new entry", _reads_an_optional_entry, lambda: FACTORS.update(new=3.0), lambda: FACTORS.pop("new")


@pytest.mark.parametrize(("f", "change", "undo"), [pytest.param(*rest, id=name) for name, *rest in _cases()])
def test_recomputation_uses_the_values_of_the_first_run(f, change, undo):
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    change()
    try:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x)
        if "new" in FACTORS:
            assert FACTORS["new"] == 3.0, "afterwards it is there again"
    finally:
        undo()
    torch.testing.assert_close(y, 2 * x.sin())
    torch.testing.assert_close(slope, 2 * x.cos())
    torch.testing.assert_close(curvature, -2 * x.sin())


def test_recomputation_does_not_see_what_the_first_run_wrote():
    noted = {}

    def f(x):
        first = "seen" not in noted
        noted["seen"] = True
        return x.sin() if first else x

    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.cos())
    assert noted == {"seen": True}


def test_containers_are_restored_after_recomputation():
    recent, names = deque([1.0], maxlen=2), {"a"}

    def f(x):
        recent.append(2.0)
        names.add("b")
        return x.sin() * len(recent) * len(names)

    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    recent.append(3.0)
    names.clear()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 4 * x.cos())
    assert list(recent) == [2.0, 3.0]
    assert not names


def test_later_changes_are_restored_after_recomputation():
    module, history = Scaled(), [1.0]
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(lambda x: module(x) * len(history), x)
    module.eval()
    module.factor = 3.0
    history += [2.0, 3.0]
    torch.autograd.grad(y.sum(), x)
    assert (module.training, module.factor, history) == (False, 3.0, [1.0, 2.0, 3.0])


def test_changes_made_by_f_happen_once():
    """The recomputation starts from the state of the first call, and keeps changes made since."""
    module = Scaled()
    module.calls = 0

    def f(x):
        module.calls += 1
        return module.calls * x.sin()

    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    module.calls = 10
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.cos())
    assert module.calls == 10


def _array():
    numbers = np.ones(3)
    return (lambda x: torch.from_numpy(numbers) * x.sin()), (lambda: numbers.fill(2.0)), "NumPy array"


def _array_of_a_module():
    module = Scaled()
    module.numbers = np.ones(3)
    return (lambda x: torch.from_numpy(module.numbers) * x), (lambda: module.numbers.fill(2.0)), "NumPy array"


def _shorter_list():
    factors = [2.0, 3.0]
    return (lambda x: factors[-1] * x), factors.pop, "a list of 2 that has 1 entries now"


def _missing_tensor():
    weights = {"w": torch.ones(3, dtype=D)}
    return (lambda x: weights["w"] * x), weights.clear, "not in its place"


@pytest.mark.parametrize("make", [_array, _array_of_a_module, _shorter_list, _missing_tensor])
def test_unrestorable_changes_are_rejected(make):
    f, change, said = make()
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    change()
    with pytest.raises(InputError, match=f"checkpoint: f: expected what f reads to stay as it is .*{said}"):
        torch.autograd.grad(y.sum(), x)


def test_segments_do_not_use_layers_of_other_segments():
    """Recorded derivatives under vmap match the chain without checkpoints."""
    chain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).to(D)
    x = torch.randn(3, dtype=D, requires_grad=True)

    def forward(run, x):
        for part in (0, 1):
            x = run(lambda x, part=part: chain[2 * part + 1](chain[2 * part](x)), x)
        return x.pow(3).sum()

    for run in (checkpoint, lambda f, x: f(x)):
        (slope,) = torch.autograd.grad(forward(run, x), x, create_graph=True)
        rows = torch.func.vmap(lambda u: torch.autograd.grad(slope, x, u, retain_graph=True)[0])(torch.eye(3, dtype=D))
        if run is checkpoint:
            found = rows
    torch.testing.assert_close(found, rows)
    y = checkpoint_sequential(chain, 2, x)
    assert y.shape == (3,)
